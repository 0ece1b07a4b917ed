"""An iteration of Megatron-Core's on real tensors, written down event by event."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what is not installed: apex, Transformer Engine
    from megatron.core import parallel_state

from ...plan.plan import ResolvedPlan
from ...tape.events import Category, Drop
from ...tape.program import Program
from ...trace.distributed import categories_of_fsdp
from ...trace.places import Places
from ...trace.recording import BACKWARD, EMBEDDING, FORWARD, HEAD, Outline, Pass, Recording, Traced
from ...trace.step import Watch
from ...trace.storages import Follow, resizes_followed
from ...trace.surroundings import Surroundings
from ...values import replace
from .core_training import Batch, InChunks, MegatronTraining, training_of
from .from_plan import padded_vocab

__all__ = ["followed", "training_of"]

BATCH, PASSTHROUGH, LAYERS, NORM = "batch", "passthrough", "decoder.layers", "decoder.final_layernorm"


def followed(plan: ResolvedPlan, rank: int, program: Program, within: Surroundings) -> Traced:
    """The iteration behind ``within.warmup`` others. ``program``: the estimate's, whose entries name the places.

    What Megatron-Core compiles runs operator by operator: a compiled function would make tensors unseen.
    """
    recording = Recording()
    places = ChunkPlaces(recording, program)
    follow = Follow(recording, places, device=within.device, fake=False)
    with follow, resizes_followed(follow), categories_of_fsdp(follow), torch.compiler.set_stance("force_eager"):
        follow.calibrate()
        with training_of(plan, rank, within, follow) as training:
            places.knows(training.models, training.chunks if sharded(plan) else training.models)
            outline = Outline((LAYERS,), NORM, sum(_elements(model) for model in training.models))
            for _ in range(within.warmup):
                training.iterate(Watch())
            gc.collect()
            _mark(training, follow)
            with places.followed():
                training.iterate(_Marking(places, follow))
            _mark_main(training, follow)
            gc.collect()
            follow.close()
    scores = padded_vocab(plan) // plan.layout.tp
    return _with_batches(Traced(recording.categorised(scores), outline, passes=tuple(places.passes)))


def _with_batches(traced: Traced) -> Traced:
    """``traced`` with places as the estimate has them: what ends of a micro-batch's inputs in backward belongs to the
    batch, not to the layer that was the last to need it. Events stay as they are."""
    recording, entries = traced.recording, traced.entries
    openings = {one.begin: one for one in traced.passes}
    places = list(recording.places)
    for at, (event, place) in enumerate(zip(recording.events, recording.places, strict=True)):
        if isinstance(event, Drop) and event.category is Category.INPUTS and place.phase == BACKWARD:
            places[at] = place._replace(module="")
            openings[at] = Pass(BACKWARD, 0, place.microbatch, at, at, BATCH)
            openings.setdefault(at + 1, Pass(BACKWARD, 0, place.microbatch, at + 1, at + 1, entries[at]))
    passes = tuple(openings[at] for at in sorted(openings))
    return replace(traced, recording=replace(recording, places=places), passes=passes)


def sharded(plan: ResolvedPlan) -> bool:
    """PyTorch's FSDP2 runs, whose hooks are around the whole model and which has no buffers of gradients."""
    return plan.megatron.torch_fsdp != "none"


def _elements(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class ChunkPlaces(Places):
    """Places in the chunks of one rank, whose layers are called as the estimate calls them. What a pass does outside of
    modules belongs to the entry that ``opens`` named last."""

    def __init__(self, recording: Recording, program: Program) -> None:
        super().__init__(torch.nn.Module())
        self.recording = recording
        self.entries = [name for span in program.spans for name in span.names]
        self.passes: list[Pass] = []
        self.chunk = 0
        self.models: list[Any] = []
        self.edges: dict[int, Any] = {}
        """The model of each module in which a chunk's passes begin and end, by the module's ``id``."""

    def knows(self, models: Sequence[Any], edges: Sequence[Any]) -> None:
        self.models = list(models)
        self.edges = {id(edge): model for edge, model in zip(edges, models, strict=True)}
        for model in models:
            for path, module in model.named_modules():
                name = self._renamed(path, model)
                self.names[id(module)] = name
                self.owners |= dict.fromkeys(map(id, module.parameters(recurse=False)), name)

    def _renamed(self, path: str, model: Any) -> str:
        if not path.startswith(f"{LAYERS}."):
            return path
        local, dot, rest = path.removeprefix(f"{LAYERS}.").partition(".")
        return f"{LAYERS}.{self._group(_number(model.decoder.layers[int(local)]))}{dot}{rest}"

    def _group(self, number: int) -> str:
        """The span that a layer is in, without ``layer.``: layers that are recomputed together have one."""
        for name in self.entries:
            low, _, high = name.removeprefix("layer.").partition("–")
            if name.startswith("layer.") and int(low) <= number <= int(high or low):
                return name.removeprefix("layer.")
        return str(number)

    def ends(self, model: Any) -> tuple[str, str]:
        """The first and the last entry of a chunk."""
        layers = model.decoder.layers
        inner = [f"layer.{self._group(_number(layers[at]))}" for at in (0, -1)] if len(layers) else [PASSTHROUGH] * 2
        return EMBEDDING if model.pre_process else inner[0], HEAD if model.post_process else inner[1]

    def opens(self, entry: str) -> None:
        at = len(self.recording.events)
        self.passes.append(Pass(self.phase, self.chunk, self.microbatch, at, at, entry))

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Also where a chunk begins and ends."""

        def enters(module: torch.nn.Module, args: Any) -> None:
            if id(module) in self.edges:
                self.opens(self.ends(self.edges[id(module)])[0])

        def leaves(module: torch.nn.Module, args: Any, output: Any) -> None:
            if id(module) in self.edges:
                self.opens(BATCH)

        with super().followed():
            handles = register_module_forward_pre_hook(enters), register_module_forward_hook(leaves)
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()


def _number(layer: Any) -> int:
    """In the whole model, from 0."""
    return int(layer.layer_number) - 1


class _Marking(InChunks):
    """Tells a trace where the schedule is, and what inputs are."""

    def __init__(self, places: ChunkPlaces, follow: Follow) -> None:
        super().__init__()
        self.places, self.follow = places, follow

    def begins(self, phase: str, microbatch: int) -> None:
        places = self.places
        places.chunk, places.microbatch, places.phase = self.chunk, microbatch, phase
        if phase in (FORWARD, BACKWARD):
            places.opens(BATCH if phase == FORWARD else places.ends(places.models[self.chunk])[1])

    def batch(self, batch: Batch) -> None:
        for tensor in batch.values():
            self.follow.mark(tensor, Category.INPUTS)

    def returned(self) -> None:
        if self.places.models[self.chunk].post_process:
            self.places.opens(HEAD)


def _mark(training: MegatronTraining, follow: Follow) -> None:
    """Everything that outlives an iteration."""
    for model, chunk in zip(training.models, training.chunks, strict=True):
        for parameter in model.parameters():
            follow.mark(parameter, Category.PARAMETERS)
        for buffer in () if sharded(training.plan) else chunk.buffers:
            follow.mark(buffer.grad_data, Category.GRADIENTS)
        received = model.decoder.input_tensor
        if received is not None:  # the last hidden state of another stage, with its gradient
            follow.mark(received, Category.ACTIVATIONS)
            if received.grad is not None:
                follow.mark(received.grad, Category.TEMPORARIES)
    for tensor in parallel_state.get_global_memory_buffer().buffer.values():
        follow.mark(tensor, Category.COMMUNICATION_BUFFERS)
    _mark_main(training, follow)
    for optimizer in training.optimizers:
        for state in optimizer.state.values():
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor) and tensor.dim():
                    follow.mark(tensor, Category.OPTIMIZER_STATES)
    follow.suppose_all(Category.BUFFERS)


def _mark_main(training: MegatronTraining, follow: Follow) -> None:
    """Main parameters, and copies of gradients that were made for the step."""
    for parameter in training.main_parameters():
        follow.suppose(parameter, Category.MAIN_PARAMETERS)
        if parameter.grad is not None:
            follow.suppose(parameter.grad, Category.GRADIENTS)
