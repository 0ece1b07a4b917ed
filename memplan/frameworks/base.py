"""What memplan asks of a framework. Each framework has a room, a folder beside this file, whose object answers.

The core (plan, search, report, trace, validate) asks the object and compares no names: what a framework *supports* is
a table, and what it *does* differently is a method. Heavy parts of a room are imported when they are asked for, so that
an estimate imports one framework's code and no more.

NCCL's communicators as one rank has them: what a framework declares, and the device's memory is counted from.

Process groups of gloo hold nothing on a device. PyTorch makes a group's communicator with its first collective
(``ProcessGroupNCCL::initNCCLComm``), so a group that nothing runs in costs nothing, either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

from ..values import NamedTuple, dataclass

if TYPE_CHECKING:
    from ..device.facts import Cause
    from ..layers.module import Options
    from ..plan.plan import AttentionImplementation, Hardware, Layout, LossKind, Plan, Recompute, ResolvedPlan
    from ..plan.section import Dtype
    from ..result import Notice
    from ..schedules.partition import Entry
    from ..search.framework import FrameworkSearch
    from ..search.time.framework import FrameworkTime
    from ..tape.program import Program
    from ..trace.framework import FrameworkRunning


class Communicator(NamedTuple):
    """Ranks that communicate, and for what."""

    name: str
    ranks: int
    block: int = 1
    """So many of them follow each other in the order of all ranks;"""
    stride: int = 1
    """and this is the distance from one such block to the next."""
    reduces: bool = False
    """All-reduce: over rings, trees or NVLink SHARP."""
    gathers: bool = False
    """All-gather, reduce-scatter or broadcast: over rings, on one node over NVLink SHARP, too."""
    peers: int = 0
    """Ranks with which it exchanges tensors by send and receive."""
    few_bytes: bool = False
    """What it reduces are scalars: one algorithm runs, not one for each size of message."""
    certain: bool = True
    """Every run makes it; otherwise some do, and it counts in what is needed at most."""
    times: int = 1
    """So many alike."""
    in_network: bool = False
    """Switches may reduce for it (SHARP: NCCL's CollNet)."""
    blocks: tuple[int, int] = (0, 0)
    """Fewest and most channels that it is configured with (``min_ctas``, ``max_ctas``); 0: NCCL's own limits."""

    def on_node(self, gpus_per_node: int) -> int:
        """How many of its ranks share a node."""
        if self.stride >= gpus_per_node:
            return min(self.block, gpus_per_node, self.ranks)
        return min(self.block * (gpus_per_node // self.stride), self.ranks, gpus_per_node)


def world(ranks: int, *, certain: bool = True) -> Communicator:
    """PyTorch's default group: barriers, clocks, and the losses that are logged."""
    return Communicator("all ranks", ranks, ranks, ranks, reduces=True, few_bytes=True, certain=certain)


BLOCK_SIZE = 256
"""Elements per scale of bitsandbytes' 8-bit states, from its 0.44 of September 2024 (``Optimizer2State``,
``init_state``, of ``optim/optimizer.py``)."""

OLD_BLOCK_SIZE = 2048
"""The same before 0.44."""

SHARDED = ("nothing sharded", "states sharded", "gradients, states sharded", "all sharded")
"""By the stage of ZeRO."""

PYTORCH_SECTIONS = ("lora", "quantisation", "frozen", "kernels", "trainer")
"""Sections of a plan that are modelled around plain PyTorch: adapters, 4-bit and frozen parameters, kernels, the
Trainer."""


class Adaptable(NamedTuple):
    """A linear layer of the model's, which an adapter may be on."""

    part: str
    """As the recipes call it."""
    outputs: int
    inputs: int
    times: int
    """How many such layers the model has."""
    unasked: bool = True
    """It has one where nobody names any layers."""


@dataclass(frozen=True, slots=True)
class Supports:
    """What a framework has, as data. The defaults are those of plain PyTorch in one process on one GPU."""

    sizes: frozenset[str] = frozenset()
    """Sizes of the layout that may be larger than one: ``tp``, ``pp``, ``dp``, ``cp``, ``vpp``."""
    zero: tuple[int, ...] = (0,)
    """Stages of ZeRO."""
    shards_as_zero: Mapping[int, str] = field(default_factory=dict)
    """How to have what a stage of ZeRO shards, where the framework does it under another name."""
    sequence_parallel: bool = False
    mixtures: tuple[str, ...] = ("experts", "latent_kv_rank", "linear_interval")
    """Fields of a model with experts, latent attention or multi-token prediction (``checks.MIXTURES``)."""
    mixtures_refused: Mapping[str, str] = field(default_factory=dict)
    """Why it has not one of these, where there is more to say than who has."""
    tp_divides: tuple[str, ...] = ("heads", "kv_heads", "ffn", "hidden")
    """Sizes of the model that must be multiples of ``tp``, by their fields."""
    stages_without_layers: bool = True
    """May ``pp`` be larger than the number of layers?"""
    several_gpus_of_a_process: bool = False
    """One process places the model on several GPUs, which are no product of the layout's sizes."""
    decoder_lengths: bool = False
    """A decoder's sequences may have another length than its encoder's (``batch.decoder_seq``)."""
    sections: tuple[str, ...] = PYTORCH_SECTIONS
    """Sections of a plan that not every framework reads (``FrameworkSection``), and ``device_map``."""
    loops: tuple[str, ...] = (
        *("transformers", "sft", "dpo", "kto", "orpo", "cpo", "simpo", "llama-factory-dpo", "axolotl-dpo"),
        *("grpo", "rloo", "reward"),
    )
    """Training loops of transformers and trl (``trainer.loop``)."""
    environment: tuple[str, ...] = ()
    """Environment variables that it compares or reads, beside those that PyTorch reads."""
    pipeline: tuple[str, ...] = ()
    """Fields of the section ``pipeline``."""
    optimizers: tuple[str, ...] | None = None
    """``None``: all, since whole parameters are what its optimizer sees."""
    optimizers_refused: Mapping[str, str] = field(default_factory=dict)
    """Why another optimizer is not among them, where there is a reason of its own."""
    implementations: tuple[str, ...] = ("foreach", "for-loop", "fused", "bitsandbytes", "transformers")
    """Of optimizers, whichever of them an optimizer has."""
    implementations_refused: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Why an optimizer of this framework lacks one of these implementations: by the names of both."""
    default_implementations: Mapping[str, str | None] = field(default_factory=dict)
    """By the optimizer's name, where it is not the optimizer's own default; ``None``: the framework's own code."""
    optimizer_fields: frozenset[str] = frozenset(
        {"momentum", "weight_decay", "paged", "block_size", "embeddings_32bit"}
    )
    """Fields of the section ``optimizer`` that change memory here, beside name and implementation."""
    losses: tuple[str, ...] = ("plain", "liger", "cut", "chunked", "liger-cross-entropy", "unsloth")
    losses_refused: Mapping[str, str] = field(default_factory=dict)
    """Why another loss is not among them, where there is a reason of its own."""
    last_logits: bool = True
    """``loss.logits_to_keep``: logits of the last tokens alone."""
    autocast: bool = True
    """PyTorch's autocast over fp32 parameters."""
    low_precision: tuple[str, ...] = ()
    """Products of linear layers in 8 or 4 bits, by their recipes."""
    gradients_in_fp32: bool = False
    """Gradients may be accumulated in fp32 whatever the parameters' dtype."""
    code_2020: bool = True
    """transformers' GPT-2 of October 2020."""
    recompute_modules: tuple[str, ...] = ()
    """Parts of a layer that selective recompute can name."""
    reentrant: bool = True
    """transformers' layers are recomputed with reentrance, too."""
    compiled: str = "it puts hooks into the graph, which torch.compile cuts there, and such graphs are not modelled"
    """Why a model that is compiled as a whole is not modelled; empty where it is."""
    compiled_as: Literal["one graph", "buckets", "layers"] = "one graph"
    """Where torch cuts its graph into parts."""


class Parts(NamedTuple):
    """Objects of a framework's room by module and name, ``module:name`` from the room's folder on: they are loaded when
    they are asked for."""

    search: str
    time: str
    running: str
    programs: str = ".programs:programs"
    notices: str = ""
    assumptions: str = ""
    communicators: str = ""
    """The last three name functions, which take the same arguments as the methods called so; empty: nothing to say."""


class Framework:
    """One framework. A room overrides what differs; what stands here holds for plain PyTorch in one process.

    Methods take a resolved plan, except for those under "defaults", which make one.
    """

    name: str
    supports: Supports = Supports()
    configuration: str | None = None
    """The format (``memplan.formats``) that says its plans; ``None`` where that is Python alone."""

    parts = Parts("", "", "")

    def _loaded(self, part: str) -> Any:
        module, name = part.split(":")
        return getattr(import_module(module, type(self).__module__.rpartition(".")[0]), name)

    def programs(self, plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
        """One program for every stage."""
        made: tuple[Program, ...] = self._loaded(self.parts.programs)(plan, options)
        return made

    @cached_property
    def search(self) -> FrameworkSearch:
        """What a search for a layout asks."""
        return cast("FrameworkSearch", self._loaded(self.parts.search)())

    @cached_property
    def time(self) -> FrameworkTime:
        """What the time of a step asks."""
        return cast("FrameworkTime", self._loaded(self.parts.time)())

    @cached_property
    def running(self) -> FrameworkRunning:
        """What runs for its plans here."""
        return cast("FrameworkRunning", self._loaded(self.parts.running)())

    # -- defaults: what a field means that a plan leaves out ----------------------------------------

    def default_gpus(self, plan: Plan) -> int | None:
        """Number of GPUs, where that is not the product of the layout's sizes."""
        return None

    def zero_where_chosen(self, optimizer: str) -> int:
        """The stage of ZeRO of a plan that names no framework, where this is the one that trains its model."""
        return 0

    def default_layout(self, plan: Plan) -> Layout:
        """The layout, with sizes that other fields of the plan decide."""
        return plan.layout

    def runs_newest(self, plan: Plan) -> bool:
        """Whether the newest code of its configuration's models is asked for, and has a recipe."""
        return False

    def default_gradients(self, plan: Plan) -> Dtype:
        """The dtype in which gradients are accumulated."""
        return plan.precision.stored

    def no_autocast(self, plan: ResolvedPlan) -> str:
        """Behind "must be false": why a framework that has autocast lacks it in this plan; empty where it has it."""
        return ""

    def default_loss(self, plan: Plan) -> LossKind:
        return "plain"

    def default_attention(self, plan: Plan) -> AttentionImplementation | None:
        """``None``: flash, where the family and the dtype have it."""
        return None

    def default_recompute(self, plan: Plan) -> Recompute:
        """Full recompute of one layer after the other."""
        recompute = plan.recompute
        if recompute.mode == "full" and recompute.method == "uniform" and recompute.layers is None:
            return recompute.model_copy(update={"layers": 1})
        return recompute

    default_torch = "2.13"
    """The version of PyTorch whose source the recipes follow."""

    default_block_size = BLOCK_SIZE
    """Of the release of bitsandbytes that ran with this framework."""

    def default_sections(self, plan: Plan, hardware: Hardware, layout: Layout) -> dict[str, object]:
        """Further fields of the plan with this framework's defaults, by name; ``hardware`` and ``layout`` have
        theirs."""
        return {}

    # -- checks -------------------------------------------------------------------------------------

    def check(self, plan: ResolvedPlan) -> None:
        """Rules between fields that no table says. ``PlanError`` where one is broken."""

    # -- stages -------------------------------------------------------------------------------------

    def layer_list(self, plan: Plan) -> Sequence[Entry]:
        """Entries that a pipeline's stages are cut from."""
        raise NotImplementedError

    def stage_edges(self, plan: Plan) -> list[int]:
        """The first entry of every stage, and the number of entries. ``PlanError`` where they cannot be cut so."""
        raise NotImplementedError

    # -- sizes --------------------------------------------------------------------------------------

    def vocab_multiple(self, plan: Plan) -> int:
        """The embedding's rows are padded to a multiple of this."""
        return 1

    def padded_vocab(self, plan: Plan) -> int:
        """Rows of the embedding on all ranks together."""
        multiple = self.vocab_multiple(plan)
        return -(-plan.model.vocab // multiple) * multiple

    def logits_vocab(self, plan: ResolvedPlan) -> int:
        """Tokens of the vocabulary in the logits that one rank's loss takes."""
        return self.padded_vocab(plan) // plan.layout.tp

    # -- outside of PyTorch -------------------------------------------------------------------------

    measured_code = "torch"
    """Whose code must have run for its measurements of the device to hold."""
    own_streams = False
    """Its own code, not NCCL's alone, works on streams besides the current one."""
    holds_workspaces = False
    """Its recipes hold cuBLAS's workspaces themselves, stage by stage."""

    def communicators(self, plan: ResolvedPlan, stage: int) -> tuple[Communicator, ...]:
        """Those of NCCL that a rank of ``stage`` has. None in one process, whose GPUs copy to each other."""
        own = self.parts.communicators
        found: tuple[Communicator, ...] = self._loaded(own)(plan, stage) if own else ()
        return found

    def fuses_biases(self, plan: ResolvedPlan) -> bool:
        """Whether linear layers with a bias are one ``addmm``."""
        return not self.holds_workspaces

    def visiting_processes(self, plan: ResolvedPlan) -> int:
        """Other ranks' processes that have a CUDA context on a rank's GPU, too."""
        return 0

    def buffers_outside(self, plan: ResolvedPlan) -> tuple[Cause, ...]:
        """What other libraries that it calls take of a device, outside of PyTorch."""
        return ()

    # -- words --------------------------------------------------------------------------------------

    stage_word = "stage"
    """What a row of the report's table is."""

    def notices(self, plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
        """What a user should know of this framework and this plan."""
        own = self.parts.notices
        found: Iterator[Notice] = self._loaded(own)(plan, programs) if own else iter(())
        return found

    own_layers = False
    """Layers, attention and recompute are this framework's code, not transformers' or torchtitan's on PyTorch's."""

    def adapters_by(self, plan: Plan) -> str | None:
        """The library whose adapters are meant, and its release, where that is not peft."""
        return None

    def adaptable(self, plan: Plan) -> Mapping[str, tuple[Adaptable, ...]] | None:
        """Linear layers that adapters of the framework's own may be on, by the names that ``lora.targets`` gives them,
        all of which have some by default; ``None`` where adapters are peft's."""
        return None

    def adapter_dtype(self, plan: Plan) -> Dtype:
        """Of those adapters."""
        return plan.precision.dtype

    def casts_given(self, plan: ResolvedPlan) -> bool:
        """Whether hooks cast what a layer is handed to the dtype in which it computes."""
        return False

    def runs_transformers(self, plan: Plan) -> bool:
        """The model's code is transformers'."""
        return not self.own_layers

    def optimizer_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        """What an estimate takes for granted of the optimizer."""
        return plan.optimizer.algorithm.assumptions(plan.optimizer)

    def optimizers_of(self, plan: ResolvedPlan) -> tuple[str, ...]:
        """Those that the plan could name instead of one that the framework lacks."""
        return self.supports.optimizers or ()

    def attention_words(self, plan: Plan) -> str:
        """The attention as users call it; of sdpa, the kernel, where a mask does not decide it (``torch.compile``, a
        sliding window)."""
        if plan.compile and not plan.compile_regions:
            return "sdpa"
        sdpa = plan.attention == "flash" and self.runs_transformers(plan) and plan.model.has_sizes
        if not sdpa:
            return str(plan.attention)
        return "sdpa" if plan.masked_kernel else plan.sdpa_kernel

    def assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        """What an estimate takes for granted of the framework's code and of its layers; empty: as in plain PyTorch."""
        own = self.parts.assumptions
        found: tuple[str, ...] = self._loaded(own)(plan) if own else ()
        return found

    def layout_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        """What an estimate takes for granted of how the model lies on ranks or devices."""
        return ()

    def saving(self, plan: ResolvedPlan) -> str:
        """What a checkpoint takes on the device, in a few words (``Program.saving``)."""
        return "saving a checkpoint copies nothing on the device"

    def described(self, plan: Plan) -> list[str]:
        """Choices that make this another plan, in a few words each, beside the framework's name."""
        return []

    def reference(self, plan: ResolvedPlan) -> str:
        """Where the second model of a trainer of trl's is, in words."""
        return "whole on every rank"

    def scored_ahead(self, plan: ResolvedPlan) -> str:
        """What its pass before training takes, in words."""
        return "takes less than a step"

    def sharded(self, plan: ResolvedPlan) -> str:
        """What replicas share out among them, in a few words."""
        return SHARDED[plan.layout.zero] if (plan.layout.dp or 1) > 1 else SHARDED[0]

    def zero_words(self, stage: int) -> str:
        """A ZeRO stage as users of the framework call it."""
        return f"ZeRO-{stage}"

    def cut_field(self, plan: Plan, *, whole: bool) -> str:
        """The flag that says what stages hold; empty where that is the default. Long lists are cut unless ``whole``."""
        return ""
