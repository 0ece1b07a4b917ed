"""What the user says: a plan, one immutable value that every later step reads.

Section by section as in a plan file. Each field's description is what ``memplan init`` and ``--help``
print, and the JSON Schema carries. A field's flag is its name with hyphens, ``--block-size``, unless
``json_schema_extra["flag"]`` says otherwise.

A plan whose defaults are all filled in, as a type: ``resolve`` returns it, and every figure is derived from it.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from ..frameworks import ROOMS as FRAMEWORKS
from ..optimizers import ROOMS as OPTIMIZERS, algorithm
from .errors import PlanError
from .framework_sections import Ddp, Deepspeed, Experts, Fsdp, Trainer
from .megatron_section import Megatron
from .releases import masked_kernel, parsed, sdpa_kernel
from .section import Count, Degree, Dtype, Later, OneOf, Section, Stages
from .spec import MOST_LAYERS, LayerCount, ModelSpec
from .training_loops import TrainingLoop
from .tuning_sections import Frozen, Kernels, Lora, Quantisation

if TYPE_CHECKING:
    from ..optimizers.base import Algorithm


FrameworkName = Annotated[str, OneOf(FRAMEWORKS)]
OptimizerName = Annotated[str, OneOf(OPTIMIZERS)]
StateDtype = Literal["fp32", "bf16", "fp16", "fp8"]
Fp8Recipe = Literal["delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
OptimizerImplementation = Literal["foreach", "for-loop", "fused", "apex", "bitsandbytes", "transformers"]
RecomputeModule = Literal[
    "core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "gdn_norm_out"
]
RecomputeMode = Literal["none", "selective", "full"]
AttentionImplementation = Literal[
    "eager", "flash", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"
]
LossKind = Literal[
    "plain", "vocab-parallel", "adaptive-softmax", "liger", "cut", "chunked", "liger-cross-entropy", "unsloth"
]
ScheduleName = Literal["1f1b", "gpipe"]


class Hardware(Section):
    gpu: str | None = Field(None, description="GPU model, as `memplan gpus` lists them")
    gpus: Degree | None = Field(None, description="number of GPUs in the job; default: tp x pp x dp x cp")
    gpus_per_node: Degree = Field(8, description="GPUs in one node")
    capacity: int | None = Field(
        None, ge=2**20, le=2**50, description="device memory in bytes, or as 31.7GiB; default: the GPU table's"
    )
    network: float | None = Field(
        None,
        gt=0.0,
        le=1e6,
        description="network bandwidth of one GPU in one direction, in GB/s; default: the bandwidth in the DGX system "
        "with this GPU",
    )
    price: float | None = Field(None, ge=0.0, le=1e9, description="price of one GPU for one hour, in any currency")


class Layout(Section):
    unsaid: ClassVar[frozenset[str]] = frozenset({"etp"})

    tp: Degree = Field(1, description="tensor-parallel size")
    pp: Stages = Field(1, description="pipeline-parallel size (number of stages)")
    dp: Degree | None = Field(None, description="data-parallel size; default: gpus / (tp x pp x cp)")
    cp: Degree = Field(1, description="context-parallel size")
    ep: Degree = Field(1, description="expert-parallel size")
    etp: Degree | None = Field(None, description="expert-tensor-parallel size; default: tp")
    vpp: Degree = Field(1, description="virtual stages (chunks) per pipeline stage")
    zero: int = Field(0, ge=0, le=3, description="ZeRO stage")
    sequence_parallel: bool = Field(False, description="shard norms and dropouts along the sequence (needs tp > 1)")


DEFAULT_SEQ = 4096
"""Tokens of a sequence that nobody gave, where the model's longest is more."""


class Batch(Section):
    unsaid: ClassVar[frozenset[str]] = frozenset({"decoder_seq", "padding"})

    mbs: Count = Field(1, description="micro-batch size (sequences per forward pass on one rank)")
    gbs: Count | None = Field(None, description="global batch size; default: mbs x dp x pp")
    accumulation: Count | None = Field(
        None, description="micro-batches of one rank before a step; default: gbs / (mbs x dp)"
    )
    seq: Count | None = Field(
        None, description="sequence length in tokens; default: 4096, or the model's maximum if it is less"
    )
    decoder_seq: Count | None = Field(
        None, description="tokens of the decoder's sequence, where the model has an encoder, whose sequence is seq"
    )
    multiply_by_visible_gpus: bool = Field(
        False,
        description="the Trainer's DataParallel default: multiply the batch by the number of visible GPUs",
    )
    padding: bool = Field(
        False,
        description="sequences of a micro-batch have different lengths and are padded to seq: transformers' sdpa is "
        "handed a mask in every layer; nothing changes with mbs 1; default: sequences are full",
    )


class Precision(Section):
    shorthand = "dtype"
    unsaid: ClassVar[frozenset[str]] = frozenset(
        {"fp8", "fp8_format", "fp4", "fp8_parameters", "first_16bit_layers", "last_16bit_layers", "amax_history"}
    )

    dtype: Dtype = Field("bf16", description="dtype of parameters and activations")
    autocast: bool = Field(
        False, description="PyTorch's autocast: compute in dtype with fp32 parameters (the Trainer's bf16=True)"
    )
    parameters: Dtype | None = Field(
        None,
        description="autocast: dtype of parameters; default: fp32 (transformers 5 loads parameters in their saved "
        "dtype)",
        json_schema_extra={"flag": "--autocast-parameters"},
    )
    gradients: Dtype | None = Field(
        None,
        description="dtype of accumulated gradients; default: the parameters' dtype (megatron: fp32)",
    )

    fp8: Fp8Recipe | None = Field(
        None,
        description="products of linear layers in 8 bits: how operands are scaled (tensorwise: current scaling); "
        "default: in dtype",
    )
    fp8_format: Literal["e4m3", "hybrid"] = Field(
        "hybrid", description="8-bit format: E4M3, or E5M2 for gradients (hybrid); memory is the same"
    )
    fp4: Literal["nvfp4"] | None = Field(None, description="products of linear layers in 4 bits")
    fp8_parameters: bool = Field(
        False, description="weights of these layers are stored only in 8 or 4 bits (fp8-param-gather)"
    )
    first_16bit_layers: int = Field(
        0, ge=0, le=MOST_LAYERS, description="layers at the start that keep products in dtype"
    )
    last_16bit_layers: int = Field(0, ge=0, le=MOST_LAYERS, description="layers at the end that keep products in dtype")
    amax_history: Count = Field(1, description="delayed scaling: maxima kept of each tensor")

    @property
    def low(self) -> str | None:
        """How operands of products are quantised, if they are."""
        return self.fp4 or self.fp8

    @property
    def wide_layers(self) -> tuple[int, int]:
        """Layers at the start and at the end of a model whose products keep ``dtype``."""
        return self.first_16bit_layers, self.last_16bit_layers

    @property
    def named(self) -> str:
        """``bf16``, ``bf16 autocast``, ``bf16, fp8 tensorwise``, ``bf16, nvfp4``."""
        recipe = self.fp4 or (f"fp8 {self.fp8}" if self.fp8 else "")
        return f"{self.dtype}{' autocast' * self.autocast}{f', {recipe}' if recipe else ''}"

    @property
    def stored(self) -> Dtype:
        """The dtype of parameters, where a framework has no other."""
        return self.parameters or ("fp32" if self.autocast else self.dtype)


class Optimizer(Section):
    shorthand = "name"

    name: OptimizerName = Field("adamw", description="optimizer", json_schema_extra={"flag": "--optimizer"})
    implementation: OptimizerImplementation | None = Field(
        None,
        description="foreach, for-loop, fused: PyTorch's; apex: FusedAdam; bitsandbytes: with 32-bit states; "
        "transformers: Adafactor; default: the framework's",
        json_schema_extra={"flag": "--optimizer-implementation"},
    )
    block_size: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description="8-bit states: elements that share one scale; default: 256, or 2048 for code with bitsandbytes "
        "before 0.44",
        json_schema_extra={"flag": "--optimizer-block-size"},
    )
    embeddings_32bit: bool = Field(
        True, description="8-bit optimizers: keep 32-bit states for embeddings (bitsandbytes' rule)"
    )
    paged: bool = Field(
        False,
        description="bitsandbytes: keep states of 100,000 or more elements in CUDA's unified memory",
        json_schema_extra={"flag": "--paged-optimizer"},
    )
    momentum: float = Field(
        0.0, ge=0.0, lt=1.0, description="SGD: momentum; above 0, every parameter has a momentum buffer"
    )
    weight_decay: float | None = Field(
        None,
        ge=0.0,
        le=100.0,
        description="weight decay; default: the optimizer's own (AdamW 0.01, Muon 0.1, else 0)",
    )
    precision_aware: bool = Field(
        False,
        description="megatron: Transformer Engine's FusedAdam, with a choice of dtypes for main parameters and states",
        json_schema_extra={"flag": "--precision-aware-optimizer"},
    )
    main_parameters: StateDtype = Field(
        "fp32",
        description="dtype of main parameters (precision-aware)",
        json_schema_extra={"flag": "--main-params-dtype"},
    )
    exp_avg: StateDtype = Field(
        "fp32", description="dtype of the first moment (precision-aware)", json_schema_extra={"flag": "--exp-avg-dtype"}
    )
    exp_avg_sq: StateDtype = Field(
        "fp32",
        description="dtype of the second moment (precision-aware)",
        json_schema_extra={"flag": "--exp-avg-sq-dtype"},
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = Field(
        None,
        description="precision-aware: fp8 recipe that the optimizer is told of (Megatron-Bridge: tensorwise even in "
        "bf16); but with delayed, fp32 main parameters and gradients are Megatron's own; default: precision.fp8's",
        json_schema_extra={"flag": "--optimizer-fp8-recipe"},
    )

    @property
    def algorithm(self) -> "Algorithm":
        """The optimizer's object, which knows what is the same in every plan."""
        return algorithm(self.name)

    @property
    def called(self) -> str:
        """Its name, and the Trainer's where its states are paged."""
        paged = [word for word, fields in self.algorithm.trainer.items() if fields.get("paged")]
        return f"{self.name} ({paged[0]})" if self.paged and paged else self.name

    @property
    def of_bitsandbytes(self) -> bool:
        """bitsandbytes' kernels step."""
        return self.algorithm.eight_bit or self.implementation == "bitsandbytes"


class Recompute(Section):
    shorthand = "mode"

    mode: RecomputeMode = Field(
        "none",
        description="activations that backward recomputes: none, those of selected modules, or those of full layers",
        json_schema_extra={"flag": "--recompute"},
    )
    method: Literal["uniform", "block"] = Field(
        "uniform",
        description="full recompute: of every group of layers (uniform), or of each stage's first layers (block)",
        json_schema_extra={"flag": "--recompute-method"},
    )
    layers: LayerCount | None = Field(
        None,
        description="uniform: layers per recomputed group (default: 1); block: recomputed layers per stage (default: "
        "all)",
        json_schema_extra={"flag": "--recompute-layers"},
    )
    reentrant: bool | None = Field(
        None,
        description="transformers, full recompute: torch.utils.checkpoint's use_reentrant; default: the release's "
        "(transformers before 5, without trl from 0.27: true)",
        json_schema_extra={"flag": "--use-reentrant"},
    )
    modules: tuple[RecomputeModule, ...] | None = Field(
        None,
        max_length=8,
        description="megatron, selective recompute: modules to recompute (core_attn, layernorm, mlp; of experts moe, "
        "moe_act, shared_experts; of latent attention mla_up_proj; of gated delta nets gdn_norm_out); "
        "default: core_attn",
        json_schema_extra={"flag": "--recompute-modules"},
    )


class Loss(Section):
    shorthand = "kind"

    kind: LossKind | None = Field(
        None,
        description="loss: plain, vocabulary-parallel or adaptive softmax; Liger's fused linear, Apple's cut or "
        "torchtitan's chunked cross entropy; Liger's or Unsloth's cross entropy on all logits; default: the set of "
        "kernels' or the framework's",
        json_schema_extra={"flag": "--loss"},
    )
    cutoffs: tuple[Count, ...] | None = Field(
        None, max_length=64, description="adaptive softmax: first token id of each tail cluster, as 20000,80000"
    )
    div_value: float = Field(
        4.0,
        ge=1.0,
        le=1e6,
        description="adaptive softmax: each tail cluster is narrower than the one before by this factor",
    )
    chunks: Count = Field(
        8,
        description="chunked: number of equal parts of a micro-batch's tokens (num_chunks)",
        json_schema_extra={"flag": "--loss-chunks"},
    )
    fp32_accumulators: bool = Field(
        False,
        description="accumulate in fp32 (liger: accum_dtype=torch.float32; cut: accum_e_fp32 and accum_c_fp32)",
        json_schema_extra={"flag": "--loss-fp32-accumulators"},
    )
    liger: str = Field(
        "0.8.5",
        pattern=r"^\d{1,3}\.\d{1,3}\.\d{1,3}$",
        description="version of Liger",
        json_schema_extra={"flag": "--liger-version"},
    )
    logits_to_keep: Count | None = Field(
        None, description="plain: compute logits and loss of this many last tokens of each sequence; default: all"
    )


class Pipeline(Section):
    schedule: ScheduleName = Field("1f1b", description="pipeline schedule")
    partition: str | tuple[int, ...] | tuple[str, ...] = Field(
        "type:transformer",
        description="uniform, parameters, type:REGEX, type:REGEX:W|REGEX:W, or the number of each stage's first entry "
        "and, last, the number of all entries, as 0,4,6,…",
    )
    first_layers: LayerCount | None = Field(
        None, description="megatron: layers of the first stage (decoder-first-pipeline-num-layers)"
    )
    last_layers: LayerCount | None = Field(
        None, description="megatron: layers of the last stage (decoder-last-pipeline-num-layers)"
    )
    count_embedding: bool = Field(
        False, description="megatron: count the embedding as a layer when layers are split into stages"
    )
    count_loss: bool = Field(False, description="megatron: count the loss as a layer when layers are split into stages")
    layout: str | None = Field(
        None,
        max_length=10_000,
        description="megatron: pipeline-model-parallel-layout, as Et*3|(tt|)*29,m|L",
        json_schema_extra={"flag": "--pipeline-layout"},
    )
    group: Count | None = Field(
        None,
        description="megatron: consecutive micro-batches of one virtual stage; default: pp",
        json_schema_extra={"flag": "--microbatch-group-size"},
    )
    overlap_p2p: bool = Field(True, description="megatron: overlap sends and receives in the interleaved schedule")
    overlap_p2p_warmup: bool = Field(
        False,
        description="megatron: also overlap sends and receives in warmup and flush "
        "(overlap-p2p-communication-warmup-flush)",
    )


class Plan(Section):
    """A training job: the whole input of an estimate."""

    unsaid: ClassVar[frozenset[str]] = frozenset({"experts", "kernels", "compile", "compile_regions"})

    model: SerializeAsAny[ModelSpec]
    framework: FrameworkName = Field("single", description="training framework")
    hardware: Later[Hardware] = Hardware.model_construct()
    layout: Later[Layout] = Layout.model_construct()
    batch: Later[Batch] = Batch.model_construct()
    precision: Later[Precision] = Precision.model_construct()
    optimizer: Later[Optimizer] = Optimizer.model_construct()
    recompute: Later[Recompute] = Recompute.model_construct()
    attention: AttentionImplementation | None = Field(
        None,
        description="implementation of attention: eager, which stores the scores; flash, the framework's flash "
        "attention, with transformers that of PyTorch's sdpa; flash_attention_2, 3 and 4, the package's, which keep "
        "their kernel with sliding windows; default: flash where framework and dtype support it",
    )
    code: Literal["current", "2020"] = Field(
        "current",
        description="version of the model's code: today's transformers, or transformers of October 2020 (GPT-2 only)",
    )
    compile: bool = Field(
        False,
        description="the whole model runs by torch.compile (transformers' torch_compile) with Inductor as by default; "
        "torchtitan's layers: fsdp.compile",
        json_schema_extra={"flag": "--torch-compile"},
    )
    compile_regions: bool = Field(
        False,
        description="with compile: every layer, and each module beside them, by itself (Accelerate's "
        "use_regional_compilation)",
    )
    loss: Later[Loss] = Loss.model_construct()
    lora: Later[Lora] = Lora.model_construct()
    quantisation: Later[Quantisation] = Quantisation.model_construct()
    frozen: Later[Frozen] = Frozen.model_construct()
    kernels: Later[Kernels] = Kernels.model_construct()
    pipeline: Later[Pipeline] = Pipeline.model_construct()
    megatron: Later[Megatron] = Megatron.model_construct()
    experts: Later[Experts] = Experts.model_construct()
    ddp: Later[Ddp] = Ddp.model_construct()
    fsdp: Later[Fsdp] = Fsdp.model_construct()
    deepspeed: Later[Deepspeed] = Deepspeed.model_construct()
    trainer: Later[Trainer] = Trainer.model_construct()
    device_map: dict[int, tuple[int, ...]] | None = Field(
        None,
        description="device-map: layers on each device, as {0: 0-11, 1: 12-23}, or Accelerate's map of modules to "
        "devices; default: an equal share on each device",
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="environment variables that change memory, as PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True",
        json_schema_extra={"flag": "--env"},
    )
    versions: dict[str, str] = Field(
        default_factory=dict,
        description="releases of the libraries around a model of transformers, as transformers=4.48.1,peft=0.13.2; "
        "trl: its SFTTrainer runs the model; default: the newest that are followed, and no trl",
        json_schema_extra={"flag": "--versions"},
    )
    torch: str | None = Field(
        None,
        pattern=r"^\d{1,3}\.\d{1,3}(\.\d{1,3})?$",
        description="version of PyTorch; default: 2.13, or the version of older code",
    )
    headroom: str = Field("0", description="memory kept free: bytes, 2GiB, or 5%")

    def at(self, path: str) -> Any:
        """The value of the field with the dotted ``path``."""
        section, _, name = path.partition(".")
        value = getattr(self, section)
        if not name:
            return value
        return value[name] if isinstance(value, Mapping) else getattr(value, name)

    def wrong(self, path: str, problem: str, *, known: Iterable[str] = ()) -> PlanError:
        """What is wrong with the value of the field with the dotted ``path``."""
        value = self.at(path)
        return PlanError(path, list(value) if isinstance(value, tuple) else value, problem, known=known)

    def refuse_for(self, path: str, reasons: Mapping[str, object]) -> None:
        """As ``refuse``, for one field: ``reasons`` are what it must be, and whether that is broken."""
        self.refuse(*((path, applies, problem) for problem, applies in reasons.items()))

    @property
    def loop(self) -> TrainingLoop:
        """The training loop, around a classifier where the model has labels and takes its own loss of them."""
        trl = self.versions.get("trl")
        kind = self.trainer.kind.released(parsed(trl) if trl is not None else None)
        return kind.of_labels() if self.model.labels and not kind.own_loss else kind

    @property
    def runs_reference(self) -> bool:
        """A reference's forward pass is part of a step."""
        return self.loop.reference == "in-step" and self.trainer.has_reference

    @property
    def sdpa_kernel(self) -> str:
        """As ``releases.sdpa_kernel``."""
        return sdpa_kernel(self)

    @property
    def masked_kernel(self) -> str:
        """As ``releases.masked_kernel``, of transformers' layers."""
        from ..frameworks import framework

        return masked_kernel(self) if framework(self.framework).runs_transformers(self) else ""

    @property
    def masks_windows(self) -> bool:
        """That mask is of layers with a sliding window alone, not of all as in a batch with padding."""
        return self.masked_kernel != "" and not self.padded and not self.model.index_heads

    @property
    def padded(self) -> bool:
        """Micro-batches have padding: a single sequence has nothing to be padded to."""
        return self.batch.padding and self.batch.mbs > 1


# -- resolved ------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    # The sections' own types, told apart for the type checker alone: at run time they are those of ``Plan``.
    class ResolvedHardware(Hardware):
        gpus: int

    class ResolvedLayout(Layout):
        dp: int

    class ResolvedBatch(Batch):
        gbs: int
        seq: int

    class ResolvedPrecision(Precision):
        gradients: Dtype

    class ResolvedLoss(Loss):
        kind: LossKind


class ResolvedPlan(Plan, defer_build=True):
    """A plan without contradictions whose sizes are all numbers, and what follows from them.

    The JSON is that of ``Plan``. A copy with other values (``model_copy``) has to be resolved again.
    """

    if TYPE_CHECKING:
        hardware: ResolvedHardware
        layout: ResolvedLayout
        batch: ResolvedBatch
        precision: ResolvedPrecision
        loss: ResolvedLoss
        attention: AttentionImplementation
        torch: str

    @property
    def flash(self) -> bool:
        """Attention runs in a fused kernel, which never holds all scores."""
        return self.attention != "eager"

    @property
    def samples(self) -> int:
        """Samples in one micro-batch of a rank; the Trainer's DataParallel default multiplies ``mbs``."""
        return self.batch.mbs * (self.hardware.gpus if self.batch.multiply_by_visible_gpus else 1)

    @property
    def sequences(self) -> int:
        """Sequences in one micro-batch of a rank: two of each sample that is a pair."""
        return self.samples * self.trainer.kind.sequences

    @property
    def tokens_of_step(self) -> int:
        """Tokens in one step of all ranks, those of both sequences of a pair."""
        return self.batch.gbs * self.trainer.kind.sequences * self.batch.seq

    @property
    def tokens(self) -> int:
        """Tokens in one micro-batch of a rank, before context parallelism splits them."""
        return self.sequences * self.batch.seq

    @property
    def microbatches(self) -> int:
        """Micro-batches of a rank in one iteration."""
        return self.batch.gbs // (self.samples * self.layout.dp)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding on all ranks together, as the framework pads the vocabulary."""
        from ..frameworks import framework

        return framework(self.framework).padded_vocab(self)
