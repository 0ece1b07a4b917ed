"""A model of transformers under ``torch.compile`` whose layers ``fully_shard`` has given hooks, learnt
(``layers.compiled_parts``).

torch 2.13.0: FSDP2's hooks are functions that Dynamo does not trace (``torch/distributed/fsdp/_fully_shard/
_fsdp_common.py``, ``_dynamo_disable``). A graph breaks at each, and none can break in the loop over layers, so that the
model's own forward runs as it is (``torch/_dynamo/symbolic_convert.py``, ``raise_loop_graph_break``), and what it calls
is compiled frame by frame: masks, rotary tables, a layer, the final norm; and the rest of the causal model's forward,
head and loss, as one. Accelerate 1.15 compiles the whole before it shards (``accelerator.py``, ``_prepare_fsdp2``), or
each module that repeats, and each beside them (``utils/other.py``, ``compile_regions_fsdp2``). Hooks of the same kind
stand here in the place of FSDP2's, on one layer and one more.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from ..layers.compiled_parts import MADE, PARAMETERS, ROLES, Begins, CompiledParts, Event, Part
from .compiled_model import FOUND, batch, fake_of, of_depth, same, short
from .inductor import Event as Happening, aot, as_fused, code_of, happened
from .job import Job
from .models import made
from .places import UntraceableError
from .step import environment

LAYERS = 2
"""Layers that are traced: the second one must be the first one's graph."""


class Found(NamedTuple):
    """One graph that Dynamo made, and what AOTAutograd made of it; without a backward where nothing is trained."""

    inputs: list[str]
    """What Dynamo calls those of the graph."""
    graph: GraphModule
    directions: dict[str, GraphModule]


def found_in(job: Job, *, regions: bool) -> tuple[list[Found], nn.Module, FakeTensorMode]:
    """Every graph of ``job``'s model, in the order of its forward pass."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    plain = replace(of_depth(job, LAYERS), fsdp=None)
    with fake:
        model = made(plain)
        ids, mask, count = batch(plain)
    found = list[Found]()
    for layer in layers_of(model):
        with_hooks(layer)

    backend = noting(found)
    torch._dynamo.reset()
    run: Any = compiled_regions(model, backend) if regions else torch.compile(model, backend=backend)
    given = {} if regions else {"attention_mask": mask}  # no token is masked, which eager code sees
    with fake, as_fused(), environment() if regions else nullcontext():
        run(input_ids=ids, labels=ids, num_items_in_batch=count, **given).loss.backward()
    return found, model, fake


def noting(found: list[Found]) -> Callable[[GraphModule, Any], Any]:
    """A backend of Dynamo's that runs graphs as they are, and keeps them."""

    def backend(graph: GraphModule, examples: Any) -> Any:
        own = Found([one.name for one in graph.graph.nodes if one.op == "placeholder"], graph, {})
        found.append(own)

        def kept(name: str) -> Callable[[GraphModule, Any], Any]:
            def compiler(graph: GraphModule, _: Any) -> Any:
                own.directions[name] = graph
                return make_boxed_func(graph.forward)

            return compiler

        return aot(kept("forward"), kept("backward"))(graph, examples)

    return backend


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of ``model``: its longest list of modules of one class, as accelerate finds what repeats."""
    lists = (one for one in model.modules() if isinstance(one, nn.ModuleList) and len({type(x) for x in one}) == 1)
    return [*max(lists, key=len)]


def with_hooks(module: nn.Module) -> None:
    """Before ``module`` and behind it functions that Dynamo leaves alone, as FSDP2's are."""
    disable: Any = torch._dynamo.disable
    module.register_forward_pre_hook(disable(lambda _, arguments, keywords: (arguments, keywords)), with_kwargs=True)
    module.register_forward_hook(disable(lambda _, arguments, output: output))


def compiled_regions(model: nn.Module, backend: Any) -> nn.Module:
    """As accelerate's ``compile_regions_fsdp2``: modules that repeat, and those that hold none."""
    children = [*model.children()]
    repeats = isinstance(model, nn.ModuleList) and len({type(one) for one in children}) == 1
    if repeats:
        for one in children:
            one.compile(backend=backend)
    elif any(isinstance(one, nn.ModuleList) for one in model.modules()):
        for one in children:
            compiled_regions(one, backend)
    else:
        model.compile(backend=backend)
    return model


def learnt(job: Job, *, regions: bool) -> CompiledParts:
    """``UntraceableError`` where the model is not one layer's graph after another."""
    return code_of_parts(*parts_in(job, regions=regions))


def code_of_parts(found: Mapping[str, Found], model: nn.Module, mode: FakeTensorMode) -> CompiledParts:
    """What Inductor's code of the parts ``found`` of ``model`` does."""
    names = {"layer": [name for name, _ in layers_of(model)[0].named_parameters()]}
    return CompiledParts({name: part_of(one, mode, names.get(name, ())) for name, one in found.items()})


def parts_in(job: Job, *, regions: bool) -> tuple[dict[str, Found], nn.Module, FakeTensorMode]:
    """The graphs of ``job``'s model that have parameters and decide its memory, by ``CompiledParts``' names."""
    found, model, fake = found_in(job, regions=regions)
    return named_parts(found, model, regions=regions), model, fake


def named_parts(found: Sequence[Found], model: nn.Module, *, regions: bool) -> dict[str, Found]:
    """Those among ``found`` of ``model``."""
    norms = (one for name, one in model.named_parameters() if name.endswith("norm.weight") and one.dim() == 1)
    hidden = max(tuple(one.shape) for one in norms)  # norms of heads are smaller
    trained = [one for one in found if "backward" in one.directions]
    parts = {
        "layer": [one for one in trained if any("position_embeddings" in name for name in one.inputs)],
        "norm": [one for one in trained if _parameters(one) == [hidden]],
        "head": [one for one in trained if any("labels" in name for name in one.inputs)],
    }
    counts = {name: len(ones) for name, ones in parts.items()}
    if counts != {"layer": 1, "norm": 1, "head": 0 if regions else 1}:
        told = ", ".join(f"{count} of its {name}" for name, count in counts.items())
        raise UntraceableError(f"hooks cut the model into other graphs than one of each part: {told}")
    return {name: one for name, ones in parts.items() for one in ones}


def _parameters(one: Found) -> list[tuple[int, ...]]:
    nodes = [node for node in one.graph.graph.nodes if node.op == "placeholder" and "parameters" in node.name]
    return [tuple(node.meta["example_value"].shape) for node in nodes]


def numbers_of(found: Found) -> list[int]:
    """Of its inputs, as ``layers.compiled_parts`` numbers them."""
    parameter, result, inputs = PARAMETERS, list[int](), 0
    for node in (one for one in found.graph.graph.nodes if one.op == "placeholder"):
        value = node.meta["example_value"]
        role = next((role for word, role in WORDS if word in node.name), "")
        if "parameters" in node.name:
            result.append(parameter)
            parameter += 1
        elif role:
            result.append(ROLES[role])
        elif isinstance(value, torch.Tensor) and value.dim() == 3 and value.requires_grad:
            inputs += 1
            result.append(ROLES["input"])
        else:
            raise UntraceableError(f"a compiled part is given {node.name}, which nothing here makes")
    if inputs != 1:
        raise UntraceableError(f"a compiled part has {inputs} inputs")
    return result


WORDS = (
    ("position_embeddings_0", "cos"),
    ("position_embeddings_1", "sin"),
    ("attention_mask", "mask"),
    ("labels", "labels"),
    ("num_items_in_batch", "count"),
)
"""What names of a graph's inputs have in them."""


def part_of(found: Found, mode: FakeTensorMode, names: Sequence[str] = ()) -> Part:
    """What Inductor's code of ``found`` does; its parameters in the order of ``names``."""
    forward, backward = found.directions["forward"], found.directions["backward"]
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    (out,) = [node for node in forward.graph.nodes if node.op == "output"]
    values = [*out.args[0]]
    numbers = numbers_of(found)
    given_back = [node for node in backward.graph.nodes if node.op == "placeholder"]
    tangents = [node.name for node in given_back if "tangent" in node.name]
    outputs = len(tangents)
    with mode:
        ran = happened(code_of(forward, is_backward=False), [fake_of(one) for one in inputs], numbers, {}, above=MADE)
        kept = {node.name: number for node, number in zip(values, ran.returned, strict=True) if number is not None}
        kept |= dict(zip(tangents, (ROLES["gradient"], ROLES["zeros"]), strict=False))
        largest = max([MADE, *(one[0] for one in ran.events if isinstance(one, list))])
        again, seen = [kept[node.name] for node in given_back], dict[int, torch.Tensor]()
        given = [same(seen, number, fake_of(node)) for node, number in zip(given_back, again, strict=True)]
        seen.clear()
        back = happened(code_of(backward, is_backward=True), given, again, {}, above=largest)
    gradients = dict(zip(numbers, back.returned, strict=True))
    parameters = {path_of(name): at for name, at in zip(found.inputs, numbers, strict=True) if at >= PARAMETERS}
    shapes = {at: tuple(map(int, node.meta["val"].shape)) for at, node in zip(numbers, inputs, strict=True)}
    named = []
    for path in names or parameters:
        at = parameters.get(path)
        gradient = None if at is None else gradients[at]
        if at is None or gradient is None:
            raise UntraceableError(f"{path} has no gradient in its compiled part")
        named.append((path, shapes[at], gradient))
    second = _like(values[1]) if outputs > 1 else None
    own_gradient = gradients[ROLES["input"]]
    assert own_gradient is not None
    return Part(
        _events(ran.events),
        tuple(number for number in ran.returned[:outputs] if number is not None),
        tuple({number: None for number in ran.returned[outputs:] if number is not None and not _held(number)}),
        _events(back.events),
        own_gradient,
        tuple(named),
        second,
    )


_PLACE = re.compile(r"_(?:modules|parameters)_")


def path_of(name: str) -> str:
    """``mlp.up_proj.weight`` of Dynamo's ``l_self_modules_mlp_modules_up_proj_parameters_weight_``."""
    return ".".join(_PLACE.split(name)[1:]).removesuffix("_")


def _held(number: int) -> bool:
    """A parameter."""
    return PARAMETERS <= number <= MADE


def _events(events: Sequence[Happening]) -> tuple[Event, ...]:
    return tuple(_event(one) for one in events if isinstance(one, list) or not _held(one))


def _event(one: Happening) -> Event:
    if isinstance(one, int):
        return one
    number, shape, *words = one
    dtype, name = map(str, words)
    return Begins(int(number), tuple(map(int, shape)), FOUND.get(dtype, dtype), short(name))


def _like(node: Any) -> tuple[tuple[int, ...], str]:
    value = node.meta["val"]
    return tuple(map(int, value.shape)), FOUND[str(value.dtype)[6:]]
