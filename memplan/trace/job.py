"""What is traced, as plain data that goes to the worker as JSON, and how it follows from a resolved plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal

from ..families import family as family_of
from ..layers.coverage import TRANSFORMERS, covered
from ..optimizers import algorithm, algorithms
from ..plan.block_configs import KEY as BLOCKS, written
from ..plan.config_layers import MIXED
from ..plan.errors import PlanError, wrong_at
from ..plan.huggingface import ACTIVATIONS, ROTARY_FEATURES, known_types
from ..plan.plan import ResolvedPlan
from ..plan.spec import ModelSpec
from ..plan.tuning_checks import is_tuned
from ..values import dataclass


def config_of_spec(spec: ModelSpec) -> dict[str, Any]:
    """Keys and values of a ``config.json``; ``PlanError`` where the family has none that says the same."""
    family = family_of(spec.family).config
    if family is None:
        raise spec.wrong("family", f"has no Hugging Face configuration; these have: {', '.join(known_types())}")
    config: dict[str, Any] = {"model_type": family.model_type or spec.family}
    for name, value in family.constants.items():
        if getattr(spec, name) != value and not _of_experts_alone(spec, name):
            raise spec.wrong(
                name, f"must be {str(value).lower()}: a configuration of {spec.family} cannot say otherwise"
            )
    for name, key in family.keys.items():
        if _of_experts_alone(spec, name):
            continue
        _put(config, key.names[0], _NAMED[key.names[0]](spec) if key.names[0] in _NAMED else _written(spec, name))
    for name, modelled in family.wanted.items():
        config[name] = _NAMED[name](spec) if name in _NAMED else modelled[0]
    if family.layers_differ:
        config[BLOCKS] = written(spec.layer_blocks, spec.heads)
    if family.activation is not None:
        wanted = "gelu" if spec.activation == "geglu" else spec.activation
        known = [given for given in family.activations if ACTIVATIONS[given] == wanted]
        if not known:
            raise spec.wrong("activation", f"must be one that {spec.family} has")
        config[family.activation.names[0]] = known[0]
    return config


_NAMED: Mapping[str, Callable[[ModelSpec], object]] = {
    ROTARY_FEATURES: lambda spec: spec.rotary_features,
    "layer_types": lambda spec: [
        "full_attention" if spec.sliding_window is None or spec.sees_all(i) else "sliding_attention"
        for i in range(spec.layers)
    ],
}
"""Settings that say a field otherwise than others do, by their own names."""


def _of_experts_alone(spec: ModelSpec, name: str) -> bool:
    """Whether a hybrid without experts has no use for the field ``name``."""
    return bool(spec.layer_pattern) and not spec.experts and name.startswith(("router_", "expert", "shared_expert"))


def _written(spec: ModelSpec, name: str) -> object:
    if name in _TURNED:
        return _TURNED[name](spec)
    value: object = getattr(spec, name)
    return value


def _first_dense(spec: ModelSpec) -> int:
    first = len(spec.dense_layers)
    if spec.dense_layers != tuple(range(first)):
        problem = f"must be the first layers: a configuration of {spec.family} cannot say otherwise"
        raise PlanError("model.dense_layers", ",".join(map(str, spec.dense_layers)), problem)
    return first


_TURNED: Mapping[str, Callable[[ModelSpec], object]] = {
    "blocks": lambda spec: spec.blocks == "parallel",
    "first_dense": _first_dense,
    "router_normalises": lambda spec: not spec.router_score_first,
    "mixed": lambda spec: spec.experts > 0,
    "expert_layers": lambda spec: [i for i in range(spec.layers) if spec.has_experts(i)],
    "mlp_kinds": lambda spec: [MIXED if spec.has_experts(i) else "dense" for i in range(spec.layers)],
    "shared_experts": lambda spec: spec.shared_expert_ffn // spec.expert_ffn,
    "router_method": lambda spec: "group_limited_greedy" if spec.router_groups else "greedy",
    "router_groups": lambda spec: spec.router_groups or 1,
    "router_group_top_k": lambda spec: spec.router_group_top_k or 1,
    "latent_q_rank": lambda spec: spec.latent_q_rank or None,
    "expert_latent": lambda spec: spec.expert_latent or None,
    "mtp_pattern": lambda spec: spec.mtp_pattern or None,
}
"""Settings of a configuration that are not the spec's own value, by the names of families."""


def _put(config: dict[str, Any], name: str, value: object) -> None:
    """``section.name`` is in a mapping of its own; rotary parameters name their type."""
    section, _, rest = name.partition(".")
    if not rest:
        config[name] = value
        return
    inner = config.setdefault(section, {})
    if section == "rope_parameters":
        inner |= {"rope_type": "default", "rope_theta": 10_000.0}
    inner[rest] = value


Checkpointing = Literal["none", "full", "op"]


@dataclass(frozen=True, slots=True)
class Part:
    """A stage's part of the model, or all of it: layers from ``low`` up to ``high``."""

    low: int
    high: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Stages:
    """A rank of a pipeline, and what it runs."""

    rank: int
    ranks: int
    chunks: int
    """Stages of a rank: number k of rank r is stage ``r + k · ranks``."""
    edges: tuple[int, ...]
    """First layer of every stage, and the number of layers."""
    schedule: str
    """``gpipe`` or ``1f1b``; with several chunks, interleaved 1F1B."""
    microbatches: int
    """Of one iteration: all of them."""
    return_outputs: bool

    @property
    def count(self) -> int:
        """Stages of the pipeline."""
        return self.ranks * self.chunks

    @property
    def numbers(self) -> tuple[int, ...]:
        """This rank's stages."""
        return tuple(range(self.rank, self.count, self.ranks))

    def part(self, stage: int) -> Part:
        low, high = self.edges[stage : stage + 2]
        return Part(low, high, not stage, stage == self.count - 1)


@dataclass(frozen=True, slots=True)
class Torchtitan:
    """Sizes of the model (b, s and dtypes are the job's), and how it is recomputed and cut."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    layers: int
    recompute: Checkpointing
    """Of a layer: nothing, all of it, or all but attention and every second product."""
    every: int
    """With ``full``: every n-th layer of a rank."""
    tensor: int
    """Tensor-parallel size."""
    parallel_loss: bool
    """Logits stay in parts (``loss_parallel``)."""
    ends_apart: bool
    """The embedding is a unit, and norm and head are another."""
    stages: Stages | None = None

    @property
    def scores(self) -> int:
        """Logits of one token that a rank has."""
        return self.vocab // (self.tensor if self.parallel_loss else 1)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Torchtitan:
        given = data["stages"]
        stages = Stages(**{**given, "edges": tuple(given["edges"])}) if given is not None else None
        return Torchtitan(**{**data, "stages": stages})


@dataclass(frozen=True, slots=True)
class Replicated:
    """``DistributedDataParallel`` around the model, as rank ``rank`` of ``ranks`` sees it."""

    ranks: int
    rank: int
    """The one whose share of optimizer states needs most; 0 where all are alike."""
    bucket_cap_mb: float | None
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    broadcast_buffers: bool
    syncs_each: bool
    """Every micro-batch reduces its gradients; else the last one alone (``no_sync``)."""
    zero: bool
    """The optimizer is a ``ZeroRedundancyOptimizer``."""
    parameters_as_bucket_view: bool


@dataclass(frozen=True, slots=True)
class FourBitWeights:
    """bitsandbytes' quantisation of linear layers."""

    kind: str
    """``nf4`` or ``fp4``."""
    double: bool
    compute: str
    """Dtype in which quantised layers compute."""
    prepared: bool
    """``prepare_model_for_kbit_training``."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """A model of which some parameters are frozen."""

    rank: int | None
    """Of LoRA adapters; ``None`` without them."""
    targets: list[str]
    """Linear layers that have one, as peft takes them."""
    dropout: float
    adapters: str
    """Dtype of adapters."""
    dora: bool
    saved: list[str]
    """Modules that are trained whole."""
    parameters: list[str]
    """Weights of stacked experts that have an adapter."""
    alpha: float
    rslora: bool
    embedding: bool
    """The embedding's tables and norm are frozen."""
    layers: int
    """So many layers from the first are frozen."""
    four_bit: FourBitWeights | None = None

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Tuned:
        four_bit = data["four_bit"]
        return Tuned(**{**data, "four_bit": FourBitWeights(**four_bit) if four_bit is not None else None})

    @property
    def packages(self) -> tuple[str, ...]:
        """Those that a trace needs besides."""
        return (*(("peft",) * (self.rank is not None)), *(("bitsandbytes",) * (self.four_bit is not None)))


def tuned_of(plan: ResolvedPlan) -> Tuned | None:
    """``None`` where everything is trained."""
    if not is_tuned(plan):
        return None
    lora, frozen = plan.lora, plan.frozen
    return Tuned(
        rank=lora.rank,
        targets=list(lora.targets or ()),
        dropout=lora.dropout,
        adapters=lora.dtype or "fp32",
        dora=lora.dora,
        saved=list(lora.modules_to_save or ()),
        parameters=list(lora.target_parameters or ()),
        alpha=8.0 if lora.alpha is None else lora.alpha,
        rslora=lora.rslora,
        embedding=frozen.embedding,
        layers=frozen.layers,
        four_bit=_four_bit(plan),
    )


def _four_bit(plan: ResolvedPlan) -> FourBitWeights | None:
    given = plan.quantisation
    if given.kind == "none":
        return None
    return FourBitWeights(given.kind, given.double, given.compute or plan.precision.dtype, given.prepared)


IMPLEMENTATIONS = (None, "foreach", "for-loop", "fused")
MOST_MICROBATCHES = 2
"""The first leaves gradients, a later one adds to them; further ones are like the second."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """``fully_shard`` on every layer and on the model, as rank 0 of ``replicas`` x ``shards`` sees it."""

    shards: int
    replicas: int
    reshard: bool | int
    """``reshard_after_forward`` of the layers."""
    reshard_root: bool
    parameters: str
    reduce: str
    """Dtypes of shards and of the reduction of gradients."""
    syncs_each: bool
    """Every micro-batch reduces its gradients; else the last one alone."""
    offload: bool = False
    """Shards, their gradients and the optimizer are on the host (``CPUOffloadPolicy``)."""


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's training step."""

    config: dict[str, Any]
    """A Hugging Face configuration, ``model_type`` among its keys."""
    b: int
    s: int
    dtype: str
    """``fp32``, ``fp16`` or ``bf16``, of parameters and, without autocast, activations."""
    attention: str
    """``eager``, or ``flash``: transformers' ``sdpa``."""
    recompute: bool
    optimizer: str
    implementation: str
    """``foreach``, ``for-loop`` or ``fused``."""
    momentum: float
    weight_decay: float
    microbatches: int
    fsdp: Sharded | None = None
    torchtitan: Torchtitan | None = None
    """torchtitan's Llama, instead of a model of transformers'."""
    ddp: Replicated | None = None
    autocast: str | None = None
    """The dtype that autocast computes in."""
    tuned: Tuned | None = None
    """What is trained, where it is not everything."""
    embeddings_32bit: bool = False
    """Of an optimizer with 8-bit states: those of embeddings have 32."""
    trainer: int | None = None
    """Micro-batches whose inputs are on the device at once where transformers' Trainer runs the model."""
    casts: bool = False
    """Every layer casts what it is handed to ``dtype``, as ``fully_shard`` does, though nothing is sharded."""
    gathers: bool = False
    """Modules have ZeRO-3's hooks and its linear function (``gathering``), though nothing is sharded."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Those that its trace needs besides torch and transformers."""
        found = self.tuned.packages if self.tuned is not None else ()
        if algorithm(self.optimizer).eight_bit:
            found = (*found, "bitsandbytes")
        return tuple(dict.fromkeys((*found, *(("accelerate",) * (self.trainer is not None)))))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Job:
        made = {name: make(data[name]) for name, make in PARTS if data.get(name) is not None}
        return Job(**{**data, **made})


PARTS: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("fsdp", lambda data: Sharded(**data)),
    ("torchtitan", Torchtitan.from_json),
    ("ddp", lambda data: Replicated(**data)),
    ("tuned", Tuned.from_json),
)
"""Fields of a job that are mappings in JSON."""


def transformers_job(
    plan: ResolvedPlan, config: dict[str, Any] | None, *, fsdp: Sharded | None, ddp: Replicated | None
) -> Job:
    """The step of transformers' model that a resolved plan's rank runs; ``config`` in place of its model's.
    ``PlanError`` where a trace cannot follow it yet."""
    _check(plan)
    optimizer, loss = plan.optimizer, plan.loss
    if optimizer.algorithm.eight_bit:
        shares = (
            "fully_shard" if fsdp is not None else "ZeroRedundancyOptimizer" if ddp is not None and ddp.zero else ""
        )
        _check_eight_bit(plan, shares)
    else:
        check_optimizer(plan)
    if loss.kind != "plain" or loss.logits_to_keep is not None:
        raise plan.wrong("loss.kind", "must be plain, of all tokens: a trace runs the model's own loss")
    microbatches = plan.microbatches
    return Job(
        config=config_of_spec(plan.model) if config is None else decoded(config),
        b=plan.batch.mbs,
        s=plan.batch.seq,
        dtype=plan.precision.stored,
        attention=plan.attention,
        recompute=plan.recompute.mode == "full",
        optimizer=optimizer.name,
        implementation=optimizer.implementation or "foreach",
        momentum=optimizer.momentum,
        weight_decay=optimizer.weight_decay or 0.0,
        microbatches=min(microbatches, MOST_MICROBATCHES),
        fsdp=fsdp,
        ddp=ddp,
        autocast=plan.precision.dtype if plan.precision.autocast else None,
        tuned=tuned_of(plan),
        embeddings_32bit=optimizer.algorithm.eight_bit and optimizer.embeddings_32bit,
        trainer=microbatches if plan.trainer.loop == "transformers" else None,
    )


def decoded(value: Any) -> Any:
    """``value`` of a configuration with numbers where transformers writes what JSON has no number for
    (``configuration_utils.py``, ``_encode_special_floats``)."""
    match value:
        case {"__float__": "Infinity" | "-Infinity" | "NaN" as number}:
            return float(number)
        case dict():
            return {name: decoded(one) for name, one in value.items()}
        case list():
            return list(map(decoded, value))
    return value


def _check_code(plan: ResolvedPlan) -> None:
    """A trace runs what is installed, without the packages of kernels, and recomputes as today's transformers does."""
    if plan.compile:
        raise plan.wrong(
            "compile",
            "must be false here, where the model runs as it stands; `memplan trace --learn` runs the compiler",
        )
    for name, version in plan.versions.items():
        raise PlanError(f"versions.{name}", version, "must be left out: a trace runs the releases that are installed")
    if plan.attention not in ("eager", "flash"):
        problem = "must be eager or flash, PyTorch's own: memplan runs this code without a GPU, where no other does"
        if plan.model.sliding_window is not None:
            problem += f"; --seq {plan.model.sliding_window - 1} is below the sliding window"
        raise plan.wrong("attention", problem)
    for name, value in plan.kernels.changed():
        if value == "eager":
            continue
        raise PlanError(f"kernels.{name}", value, "must be left out: Triton's kernels need a GPU")
    plan.refuse(
        (
            "quantisation.kind",
            plan.quantisation.kind not in ("none", "nf4", "fp4"),
            "must be nf4 or fp4 in a trace: the kernels of other weights need a GPU",
        ),
        ("trainer.loop", plan.trainer.kind.own_loss, "must be none or transformers in a trace, which runs no trl"),
        ("model.labels", plan.model.labels, "must be left out in a trace, which runs language models"),
        ("recompute.reentrant", plan.recompute.reentrant, "must be false: a trace recomputes without reentrance"),
    )


def _check(plan: ResolvedPlan) -> None:
    _check_code(plan)
    if family_of(plan.model.family).covers is None:
        raise plan.wrong(
            "model.family", f"must be one of {', '.join(covered(TRANSFORMERS))}: those that transformers runs"
        )
    if plan.trainer.evaluation_batches is not None:
        raise plan.wrong(
            "trainer.evaluation_batches", "must be left out: a trace is of a training step, without evaluation"
        )
    if plan.code != "current":
        raise plan.wrong("code", "must be current: a trace runs the installed transformers")
    if plan.model.index_heads:
        raise plan.wrong(
            "model.index_heads", "must be 0: a trace gives every parameter a gradient, and an indexer has none"
        )
    if plan.recompute.mode == "selective":
        raise PlanError("recompute.mode", "selective", "must be none or full: transformers recomputes whole layers")


BLOCK_SIZE = 256
"""Elements that share a scale in the releases of bitsandbytes that are run (``optimizer_update_8bit_blockwise``)."""


def _check_eight_bit(plan: ResolvedPlan, shares: str) -> None:
    """Refuses what is not run of bitsandbytes' 8-bit optimizers; ``shares``: what keeps a rank's part of the states."""
    optimizer = plan.optimizer
    if shares:
        raise plan.wrong(
            "optimizer.name", f"must be one of {_torchs()}: bitsandbytes' optimizers are not run under {shares}"
        )
    if optimizer.paged:
        raise plan.wrong(
            "optimizer.paged",
            "must be false: states in CUDA's unified memory are not seen by PyTorch's allocator, nor by a trace",
        )
    if optimizer.block_size != BLOCK_SIZE:
        raise plan.wrong(
            "optimizer.block_size", f"must be {BLOCK_SIZE}, as in the releases of bitsandbytes that are run"
        )


def _torchs() -> str:
    return ", ".join(one.name for one in algorithms() if one.torch)


def check_optimizer(plan: ResolvedPlan) -> None:
    """Refuses optimizers that are not torch's."""
    optimizer = plan.optimizer
    if optimizer.algorithm.torch is None:
        raise plan.wrong("optimizer.name", f"must be one of {_torchs()}: a trace runs torch's own")
    if optimizer.implementation not in IMPLEMENTATIONS:
        raise plan.wrong(
            "optimizer.implementation",
            "must be foreach, for-loop or fused, which are torch's own (--optimizer-implementation)",
        )


STAGE = "--stage"


def check_stage(stage: int, stages: int) -> None:
    """Refuses a stage that no rank of the pipeline has."""
    if not 0 <= stage < stages:
        ranks = f"from 0 to {stages - 1}" if stages > 1 else "0: there is no pipeline (pp 1)"
        raise wrong_at(STAGE, f"must be {ranks}, not {stage}")
