"""What Megatron-Bridge's launchers write into a recipe once overrides are laid over it (``scripts/training`` of August
2026: ``run_recipe.py``, ``recipe_runner.py``; ``scripts/performance/run_script.py`` alike).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...plan.errors import Node, PlanError
from ...plan.megatron_layout import written_out
from ...plan.notes import Note
from ...values import dataclass
from ..launch import Asked
from . import table
from .recipes import LAYOUT, Recipe, runs_backend

_SIZES = {
    "tp": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "vpp": "model.virtual_pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "ep": "model.expert_model_parallel_size",
    "etp": "model.expert_tensor_parallel_size",
}
"""Fields that memplan has flags for and a recipe's layout of stages, batch or loss depends on."""
_STAGES, _VIRTUAL = _SIZES["pp"], _SIZES["vpp"]
_ENDS = tuple(f"model.num_layers_in_{one}_pipeline_stage" for one in ("first", "last"))
_BENCHMARK = re.compile(
    r"_(pretrain|sft|peft)_([1-9][0-9]*)gpu_[a-z0-9]+_(bf16|fp8cs|fp8ds|fp8mx|fp8sc|nvfp4)(?:_[a-z0-9_]+)?_config$"
)
"""Names of ``perf_recipes`` (``recipe_metadata.py``: ``BENCHMARK_RECIPE_PATTERN``)."""
_BUCKET = 128 * 1024 * 1024
"""``CommOverlapConfig._get_optimizer_overlap_cfgs`` (``training/comm_overlap.py``)."""
_GBS, _AWARE = "train.global_batch_size", "optimizer.use_precision_aware_optimizer"
_SHARDED = ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer")
_PACKING = ("enable_offline_packing", "enable_in_batch_packing")
_TUNES = re.compile(r"SFT|Finetuning")
"""Of the names of datasets' classes that have ``_PACKING`` as fields."""
_DISPATCHER, _BACKEND = "model.moe_token_dispatcher_type", "model.moe_flex_dispatcher_backend"


@dataclass(frozen=True, slots=True)
class Job:
    """What the command line says of a run, beside overrides."""

    sizes: Mapping[str, Node]
    """``tp``, ``pp``, ``vpp`` …, as flags give them."""
    gpus: int | None
    dp: int | None
    gpu: str | None
    batched: bool
    """Whether a flag says the global batch size."""

    @staticmethod
    def asked(asked: Asked, gpu: str | None) -> Job:
        sizes = {name: node for name in _SIZES if (node := asked.whole(name)) is not None}
        gpus, dp = (one.whole if one is not None else None for one in (asked.gpus, asked.whole("dp")))
        return Job(sizes, gpus, dp, gpu, "gbs" in asked.names)

    def over(self, root: Node) -> Node:
        """``root`` with the sizes as the overrides that say the same."""
        for name, node in self.sizes.items():
            one_chunk = name == "vpp" and node.value == 1
            root = root.put(_SIZES[name], Node(None, node.origin) if one_chunk else node)
        return root


def in_step(recipe: Recipe, root: Node) -> Node:
    """``root``, which has overrides over ``recipe``, with stages that fit where these say other numbers of them: the
    recipe's own layout where it has a function for that, else no longer its own numbers of layers at the ends, if the
    stages between cannot share the others (``sync_model_pipeline_layout``). A layout that it writes out has to fit."""
    before = recipe.root
    if all(_plain(root, path) == _plain(before, path) for path in (_STAGES, _VIRTUAL)):
        return root
    stages, virtual = (_whole(root, path) for path in (_STAGES, _VIRTUAL))
    layout = root.at(LAYOUT)
    if stages is None or layout is not before.at(LAYOUT):
        return root
    if recipe.layout is not None:
        return root.put(LAYOUT, recipe.layout(stages, virtual))
    if layout is not None and layout.value:
        chunks = _chunks(layout)
        if chunks % stages or chunks // stages != (virtual or chunks // stages):
            sizes = f"pp {stages}" + (f" and vpp {virtual}" if virtual else "")
            problem = (
                f"is the recipe's own, of {chunks} chunks, which {sizes} does not have: say {LAYOUT}=null, or another"
            )
            raise PlanError(LAYOUT, layout.plain(), problem, origin=layout.origin)
        return root
    return _shared(root, before, stages)


def _chunks(layout: Node) -> int:
    """Of a layout of letters, of which a part may be repeated, or of lists of names."""
    if isinstance(layout.value, str):
        return written_out(layout.value).count("|") + 1
    return len(layout.value) if isinstance(layout.value, list) else 0


def _shared(root: Node, before: Node, stages: int) -> Node:
    ends = {path: size for path in _ENDS if (size := _whole(root, path)) is not None}
    layers = _whole(root, "model.num_layers")
    if not ends or layers is None:
        return root
    between, left = stages - len(ends), layers - sum(ends.values())
    fits = between >= 0 and left >= 0 and bool(between) == bool(left) and (not between or left % between == 0)
    for path in () if fits else ends:
        if root.at(path) is before.at(path):
            root = root.put(path, Node(None, root.origin))
    return root


def as_it_starts(recipe: Recipe, root: Node, job: Job) -> tuple[Node, tuple[Note, ...]]:
    """``root``, which has overrides over ``recipe``, as the run that starts has it, and what to tell of it."""
    benchmark = _BENCHMARK.search(recipe.name) if recipe.benchmark else None
    notes: tuple[Note, ...] = ()
    if benchmark is not None:
        root = _as_benchmark(recipe, root, task=benchmark[1], precision=benchmark[3])
        root, notes = _scaled(recipe, root, job, canonical=int(benchmark[2]))
    return _with_buckets(_with_loss(_with_length(recipe, _with_vocabulary(_dispatched(root, job))))), notes


def _as_benchmark(recipe: Recipe, root: Node, *, task: str, precision: str) -> Node:
    """In bf16 Adam is the precision-aware one, whatever the recipe says (``_apply_benchmark_runtime_defaults``), and
    the data of fine-tuning is made up, of whole sequences (``_apply_benchmark_dataset_defaults``)."""
    adam = root.at("optimizer.optimizer")
    if precision == "bf16" and adam is not None and adam.value == "adam" and root.at(_AWARE) is recipe.root.at(_AWARE):
        root = root.put(_AWARE, Node(True, root.origin))
    data = root.mapping.get("dataset")
    if task != "pretrain" and data is not None:
        whole_ones = data.without(*_PACKING, "offline_packing_specs", "_target_")
        root = root.with_items({"dataset": whole_ones})
    return root


def _scaled(recipe: Recipe, root: Node, job: Job, *, canonical: int) -> tuple[Node, tuple[Note, ...]]:
    """As many sequences for each data-parallel rank as the recipe has on the GPUs of its name
    (``_apply_benchmark_weak_scaling``), unless a global batch size is said."""
    said = root.at(_GBS)
    own, now = _ranks(recipe.root), _ranks(root)
    gpus = job.dp * now if job.dp is not None else job.gpus
    if job.batched or gpus is None or said is None or said is not recipe.root.at(_GBS):
        return root, ()
    if not isinstance(said.value, int) or canonical % own or gpus % now:
        return root, ()  # refused later, with the sizes' own names
    base, dp = canonical // own, gpus // now
    if dp == base:
        return root, ()
    if said.value * dp % base:
        problem = f"is of {base} data-parallel ranks, and does not scale to {dp} as a whole number: say --gbs"
        raise PlanError(_GBS, said.value, problem, origin=said.origin)
    scaled = said.value * dp // base
    told = (
        f"{scaled} sequences a step: the recipe has {said.value} for dp {base}, and its launcher scales them to dp {dp}"
    )
    return root.put(_GBS, Node(scaled, said.origin)), (Note("batch-scaled", told),)


def _ranks(root: Node) -> int:
    """GPUs that one replica takes."""
    sizes = [_whole(root, _SIZES[one]) or 1 for one in ("tp", "pp", "cp")]
    return sizes[0] * sizes[1] * sizes[2]


def _dispatched(root: Node, job: Job) -> Node:
    """``flex`` without a backend is ``alltoall``; a backend that the GPU has not stops the run
    (``training/flex_dispatcher_backend.py``: ``validate_flex_dispatcher_backend``)."""
    said, backend = root.at(_DISPATCHER), root.at(_BACKEND)
    if said is None or said.value != "flex" or backend is None:
        return root
    if backend.value is None:
        return root.put(_DISPATCHER, Node("alltoall", said.origin))
    if not runs_backend(str(backend.value), job.gpu):
        problem = f"must be hybridep on {job.gpu}, or {_DISPATCHER} alltoall: Megatron-Bridge stops"
        raise backend.wrong(_BACKEND, problem)
    return root


def _with_vocabulary(root: Node) -> Node:
    """With the tokenizer's vocabulary, where that counts (``training/setup.py``: ``_validate_and_set_vocab_size``)."""
    size, counts = (root.at(f"tokenizer.{one}") for one in ("vocab_size", "use_tokenizer_vocab_size"))
    if size is None or not isinstance(size.value, int) or counts is None or counts.value is not True:
        return root
    given = {"vocab_size": size, "should_pad_vocab": Node(True, size.origin)}
    return root.with_items({"model": root.mapping["model"].with_items(given)})


def _with_length(recipe: Recipe, root: Node) -> Node:
    """The data's length of a sequence in the model (``sync_model_dataset_sequence_length``); one that overrides give
    the model alone is undone there, and left here to be refused."""
    *of_data, of_model = table.LENGTHS
    length = next((one for path in of_data if (one := root.at(path)) is not None), None)
    if length is not None and length.value is not None and root.at(of_model) is recipe.root.at(of_model):
        root = root.put(of_model, length)
    return root


def _with_loss(root: Node) -> Node:
    """The loss is summed over tokens where fine-tuning has context parallelism: a rank may have nothing but masked
    ones (``sync_finetuning_cp_invariants``)."""
    fields = root.mapping["dataset"].mapping if "dataset" in root.mapping else {}
    tunes = any(name in fields for name in _PACKING) or _TUNES.search(str(_plain(root, "dataset._target_")))
    if not tunes or (_whole(root, _SIZES["cp"]) or 1) == 1:
        return root
    return root.put("model.calculate_per_token_loss", Node(True, root.origin)).put(
        "ddp.average_in_collective", Node(False, root.origin)
    )


def _with_buckets(root: Node) -> Node:
    """With what ``CommOverlapConfig.setup`` says of the gradients' buckets."""
    overlap = root.mapping.get("comm_overlap")
    sharded = any(_plain(root, path) is True for path in _SHARDED)
    if overlap is None or not overlap.mapping or not sharded:
        return root
    set_up = {"bucket_size": _BUCKET, "overlap_grad_reduce": True, "overlap_param_gather": True}
    given = {name: Node.of(value, overlap.origin) for name, value in set_up.items()}
    said = {name: node for name, node in overlap.mapping.items() if name in set_up and node.value is not None}
    ddp = root.mapping.get("ddp", Node({}, overlap.origin))
    return root.with_items({"ddp": ddp.with_items({**given, **said})})


def _whole(root: Node, path: str) -> int | None:
    value = _plain(root, path)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _plain(root: Node, path: str) -> object:
    found = root.at(path)
    return found.value if found is not None else None
