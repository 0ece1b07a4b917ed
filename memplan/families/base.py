"""What memplan asks of a model family: how its ``config.json`` reads, how its layers run, how modules are called.

Everything about a family is one value, ``Family``, in a file beside this one. Names are those of transformers 5.23
(``models/*/configuration_*.py`` and ``modeling_*.py``), but for parts of a layer, which have the names of its recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from ..plan.releases import LIBRARIES, Version
from ..values import dataclass

if TYPE_CHECKING:
    from ..layers.autograd import Recorder, Tensor
    from ..layers.coverage import Allowed
    from ..layers.ends import Embedding
    from ..layers.experts import Mixed
    from ..layers.huggingface import Layer, LayerShape, Shared
    from ..plan.errors import Scalar
    from ..plan.spec import ModelSpec
    from .llama import Projecting

REQUIRED = object()
"""The default of a size that every saved configuration carries: another default would silently be another model."""


@dataclass(frozen=True, slots=True)
class Key:
    """Where a spec's field is found: names in order of precedence, and the default of transformers' class."""

    names: tuple[str, ...]
    default: object = REQUIRED


def key(*names: str, default: object = REQUIRED) -> Key:
    """``section.name`` is in a mapping of its own."""
    return Key(names, default)


@dataclass(frozen=True, slots=True)
class Config:
    """How configurations of one ``model_type`` are read."""

    keys: Mapping[str, Key]
    constants: Mapping[str, Scalar]
    """Fields of the spec that no configuration of the family says."""
    activation: Key | None = None
    activations: tuple[str, ...] = ()
    gated_gelu: bool = False
    """The activation is that of a gate."""
    refused: Mapping[str, Scalar] = field(default_factory=dict)
    """Settings that change the model in ways that are not modelled, with the value that is."""
    wanted: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    """Settings whose default is not modelled, with what of them is; where they are lists, of each item."""
    published_in: tuple[str, ...] = ()
    """Low precisions in which its makers publish weights (``quantization_config.quant_method``): training casts them
    back to 16 bits."""
    layers_differ: bool = False
    """Each layer has sizes of its own (``block_configs``)."""
    text_part: str = ""
    """It is a model of text and images, whose ``text_config`` is read as this family's."""
    model_type: str = ""
    """What transformers calls it, if not by the family's name."""


NO_BIASES: Mapping[str, Scalar] = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), False)
ROUTER_LOSS: Mapping[str, Key] = {"router_loss": key("output_router_logits", default=False)}
"""Of families whose class can add the routers' loss to its own (``load_balancing_loss_func``)."""
PLAIN_ROTARY: Mapping[str, Scalar] = {"rope_scaling": None, "rope_parameters.rope_type": "default"}
"""Refused where a family's rotary positions are modelled without scaling."""


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Modules that a device map places: of the class with a language-modelling head, every submodule that has
    parameters or buffers of its own (``accelerate/utils/modeling.py``, ``check_device_map``)."""

    embedding: tuple[str, ...]
    """With rotary tables, which are made once for all layers."""
    layers: str
    norm: tuple[str, ...]
    head: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Submodules:
    """Submodules without parameters, for which DeepSpeed's hooks run too: containers (the model, a layer, its
    attention and feed-forward), activations, dropouts and rotary embeddings. ZeRO-3 prefetches at each, and each counts
    as a step of its trace. How many run, by the submodule with parameters that they run directly before or behind."""

    before_forward: Mapping[str, int] = field(default_factory=dict)
    after_forward: Mapping[str, int] = field(default_factory=dict)
    before_backward: Mapping[str, int] = field(default_factory=dict)
    after_backward: Mapping[str, int] = field(default_factory=dict)
    at: Mapping[str, int] = field(default_factory=dict)
    """How many run directly before a tensor of that name begins."""
    leaf: str = ""
    """A submodule of several parameters that ZeRO-3 takes as one (``zero/leaf_module_config.py``,
    ``DEFAULT_LEAF_MODULE_CLASSES``): it gathers all of them at once, and reduces their gradients behind it."""
    parts: tuple[str, ...] = ()
    """Submodules that have several operators, and their hooks at the ends of what a recipe calls so
    (``Recorder.entered``)."""
    own: tuple[str, ...] = ()
    """Parameters of containers themselves, which come before those of submodules in ``parameters()``,"""
    own_before: str = ""
    """and before which of these, if not the first."""
    products_of_leaves: bool = False
    """Products of parts take stacked weights themselves, not views of them: autograd keeps the variable, whose data
    ends with its release."""
    base_begins: str = ""
    """The submodule with which the base model begins, where its own forward reads the embedding's weight (for the
    device of its input): ZeRO-3 takes that for the base model's, too (``register_external_parameter``),"""
    base_ends: str = ""
    """and the one with which it ends."""
    not_recomputed: str = ""
    """The submodule before which one fewer runs when the layer is recomputed: the layer itself."""

    def before(self, weight: str, *, backward: bool, recomputing: bool) -> int:
        """Before the submodule that has ``weight``."""
        name = weight.removesuffix(".weight")
        if backward:
            return self.before_backward.get(name, 0)
        return self.before_forward.get(name, 0) - int(recomputing and name == self.not_recomputed)

    def behind(self, weight: str, *, backward: bool) -> int:
        """Behind the submodule that has ``weight``."""
        return (self.after_backward if backward else self.after_forward).get(weight.removesuffix(".weight"), 0)


NORM = Submodules(before_backward={"final_norm": 1})
HEAD = Submodules(before_backward={"head": 1, "word": 1})


def always(r: Recorder) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Family:
    """One family; what stands here holds for a Llama-like model of transformers whose kernels are all there."""

    name: str
    config: Config | None = None

    # -- the recipe of transformers' layer and embedding

    covers: Allowed | None = None
    """Values of a spec's fields that the recipe is written for; ``None`` where there is no recipe."""
    layer: Layer | None = None
    embedding: Embedding | None = None
    needs: tuple[str, ...] = ()
    """Fields of a spec that the recipe cannot do without."""
    older: tuple[Layer, Embedding] | None = None
    """Layer and embedding of October 2020 (``code: 2020``)."""
    mixture: Callable[[Recorder, Tensor, LayerShape], Mixed] | None = None
    """What a layer with experts has in place of an MLP."""
    experts_in: str = "mlp"
    """What a layer calls the module that has router and experts."""
    mlp_beside_experts: bool = False
    """Layers with experts have an MLP, too, norms of both outputs and of what experts take, and a router with a scale
    of each feature and of each expert."""
    norm: Callable[[Recorder, Tensor, str], Tensor] | None = None
    """Where it is not plain LayerNorm or RMSNorm."""
    projecting: Projecting | None = None
    """In which order queries, keys and values are made, if not as Llama's."""
    rotary: Callable[[Recorder, Tensor, Tensor, Shared], tuple[Tensor, Tensor]] | None = None
    """How queries and keys turn, if not as Llama's: they are laid out head by head then,"""
    rotary_keeps_layout: bool = False
    """or as they were before."""
    scaled_queries: Callable[[Recorder, Tensor, Shared], Tensor] | None = None
    """What becomes of queries once they have turned, in a layer like Llama's."""
    tables: Literal["whole", "half", "complex"] = "whole"
    """Rotary tables have an angle for each feature, for two, or are complex numbers,"""
    wide_tables: bool = False
    """and stay in fp32, whatever the dtype of hidden states."""
    attention: Callable[[Recorder, Tensor, Shared, LayerShape], tuple[Tensor, Tensor | None]] | None = None
    """What a layer like Llama's or GPT-2's has in place of its attention."""
    mlp: Callable[[Recorder, Tensor, ModelSpec], Tensor] | None = None
    """What a layer like Llama's has in place of its MLP."""
    as_llama_since: Version = ()
    """Releases before have a rotary embedding in every layer, and repeat keys and values for the package's kernel."""
    multi_head: bool = False
    """As many key heads as query heads."""
    heads_fill_hidden: bool = False
    """Heads make up the hidden size."""
    softmax_in_dtype: bool = False
    """Eager attention takes the softmax in the scores' dtype, not in fp32,"""
    casts_probabilities: bool = False
    """and casts it to the dtype of values then."""
    tables_of_each: bool = False
    """Rotary tables are of every sequence: (b, s, d), not (1, s, d)."""
    takes_positions: Callable[[Recorder], bool] = always
    """Layers are handed position ids."""
    positions_of_each: bool = False
    """These are of every sequence: (b, s), not (1, s)."""
    tables_in_layers: bool = False
    """Every layer has a rotary table of its own, of all positions."""
    caps_in_head: bool = False
    """The head itself caps its logits, of whatever part of the tokens."""
    keeps_embedding: bool = False
    """The model has the embedding's output in a variable while its layers run."""
    logits_to_keep: Version = (4, 45)
    """The first release that is followed whose head takes ``hidden_states[:, -logits_to_keep:, :]``, 0 being all."""
    alone_before: Version = ()
    """Releases before take the loss of shifted logits in these' own dtype, and have classes of attention of their own,
    of which the package's kernel alone is followed."""
    mask_buffer: bool = False
    """The model has a causal mask of all positions as a buffer."""
    padded: bool = False
    """Its masks are compared with transformers' for batches with padding, too."""
    scale_in_embedding: bool = False
    """The embedding multiplies its output itself, by a buffer; else the model does."""
    scales_layers: bool = False
    """Every layer multiplies its output by a buffer of one number."""
    returns_weights: bool = False
    """Layers return their attention weights, which the model holds while the next layer runs: a recomputed layer
    leaves more than its output behind, which is not modelled."""
    kernels: tuple[str, ...] = ()
    """Whose kernels its layers can have."""
    classifies: bool = True
    """transformers has a class of it for sequence classification: one linear layer, and the last token's scores."""
    scores: Callable[[Recorder, Tensor, LayerShape], Tensor] | None = None
    """Another head of that class, which has weights of its own beside the scores'."""
    dropout_functions: tuple[str, ...] = ("attention_dropout",)
    """Dropouts that no ``nn.Dropout`` does, so that trl's trainers do not turn them off (``trainer/utils.py``,
    ``disable_dropout_in_model``)."""
    loss_alone: tuple[str, ...] = ()
    """Sets of kernels that change nothing but its loss."""
    conv1d: bool = False
    """Linear layers are transformers' ``Conv1D``, whose weights are transposed."""
    since: Version = LIBRARIES["transformers"].newest
    """The first release of transformers whose layers are the recipe's, but for what ``plan.releases`` names."""
    not_followed: tuple[Version, Version] | None = None
    """Releases of transformers, from the first up to the second, whose layers nobody has compared with the recipe's."""
    no_flash: str = ""
    """Why its attention does not run in PyTorch's flash kernel."""
    no_package: str = ""
    """Why transformers refuses a package's flash attention for it."""
    no_4bit: str = ""
    """Why bitsandbytes' 4-bit weights are not modelled for it."""
    no_autocast: str = ""
    """Why autocast is not modelled for it."""
    idle: str = ""
    """Which parameters it has that want gradients and never get any."""
    no_zero3: str = ""
    """Why ZeRO-3 is not modelled for it,"""
    no_zero3_of_experts: str = ""
    """or for those of its models that have experts."""

    # -- Megatron's own layers

    megatron: Allowed | None = None
    """Values of a spec's fields for which Megatron-LM's GPT of 2021 is the model."""
    megatron_core: Allowed | None = None
    """The same of Megatron-Core's GPT, which is made of options, or of its BERT."""
    no_transformers: str = ""
    """Why transformers has no such model."""
    no_megatron_core: str = ""
    """Why Megatron-Core has no such model."""
    assumptions: tuple[str, ...] = ()
    """What a plan takes for granted where transformers' layers run."""
    other_code: str = ""
    """Which code of a framework has a recipe, where transformers' layers have none."""

    # -- names and orders

    modules: ModuleNames | None = None
    score_layers: Mapping[str, str] = field(default_factory=dict)
    """Linear layers of a classifier's own head, whose last one apart, in the place of ``word_layers``."""
    word_layers: tuple[str, ...] = ()
    """Which of ``linear_layers`` belong to the vocabulary's head."""
    linear_layers: Mapping[str, str] = field(default_factory=dict)
    """Linear layers as the recipe names them, and the ends of their names."""
    all_linear_of_attention: bool = False
    """Experts and router have no linear layers, and peft's ``all-linear`` finds those of attention alone, with
    transformers 5; of other families with experts it wraps stacks of experts and routers, too."""
    lora_targets: tuple[str, ...] | None = None
    """peft's own (``utils/constants.py``, ``TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING``)."""
    registered: tuple[str, ...] = ()
    """Modules of a layer in the order in which they register their parameters (``named_parameters()``: that in which
    ``__init__`` makes them), where it is not that in which they run. It decides how parameters lie in the buffers of a
    framework that flattens or shards them."""
    norm_before_layers: bool = False
    """The final norm registers before the layers."""
    no_base: bool = False
    """``base_model_prefix`` of its class names no module of it."""
    shards: bool = True
    """``fully_shard``'s units of it are modelled."""
    submodules: Mapping[str, Submodules] | None = None
    """By module: embedding, layer, final_norm, head; ``None`` where nobody has counted them."""

    @property
    def sharded(self) -> Allowed | None:
        """``covers``, where units of it are modelled."""
        return self.covers if self.shards else None


def place(name: str, registered: tuple[str, ...]) -> int:
    """Where the parameter called ``name`` is among those of its layer, or of all that no layer holds, where a tied
    head's weight is the embedding's. Those of one place, an adapter's behind its layer's, are in the order in which
    they are named."""
    order = ("word", *registered)
    module = name.rpartition(".")[0]
    own = module if module in order else module.rpartition(".")[0]
    return order.index(own) if own in order else len(order)
