"""Which linear layers of a model there are, under the names that transformers gives them, and which LoRA targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..families import family
from .errors import PlanError
from .plan import Plan
from .spec import ModelSpec

ALL_LINEAR = "all-linear"
"""Every linear layer but the head (peft ``tuners_utils.py``, ``_maybe_include_all_linear_layers``)."""

NOT_ADAPTED = ("lm_head", "embed_tokens", "wte", "wpe", "embed_in", "embed_out", "word_embeddings", "decoder")
"""What targets may name in peft and is not modelled: embeddings and heads."""


OF_EXPERTS = ("gate", "up", "gate_up", "down", "shared_gate", "shared_up", "shared_down")
"""Linear layers of a feed-forward network, which experts have in place of a dense layer."""


OF_TYPES: Mapping[str, tuple[str, ...]] = {
    "t5": ("q", "v"),
    "mt5": ("q", "v"),
    "bart": ("q_proj", "v_proj"),
    "roberta": ("query", "value"),
    "xlm-roberta": ("query", "value"),
    "electra": ("query", "value"),
    "stablelm": ("q_proj", "v_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "gemma": ("q_proj", "v_proj"),
    "gemma3_text": ("q_proj", "v_proj"),
}
"""peft's targets of architectures that traces know (peft 0.21, ``utils/constants.py``,
``TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING``)."""


def default_targets(spec: ModelSpec) -> tuple[str, ...] | None:
    """peft's, where nobody names any."""
    return family(spec.family).lora_targets if spec.has_sizes else OF_TYPES.get(spec.family)


def linear_layers(spec: ModelSpec) -> dict[str, str]:
    """Those of the family that the model has, and the ends of their names."""
    sizes, known = linear_sizes(spec), family(spec.family).linear_layers
    return {part: name for part, name in known.items() if part in sizes or part in OF_EXPERTS}


def last_names(spec: ModelSpec) -> dict[str, None]:
    """What targets may be called: adapters of experts are refused."""
    names = linear_layers(spec).items()
    return dict.fromkeys(name.rpartition(".")[2] for part, name in names if not spec.experts or part not in OF_EXPERTS)


def adapted(plan: Plan) -> frozenset[str]:
    """Linear layers that ``lora.targets`` names, as the recipes call them; empty without LoRA.

    A target names the layers whose name it is or ends with behind a dot (peft ``tuners_utils.py``,
    ``check_target_module_exists``).
    """
    if plan.lora.rank is None or not plan.model.has_sizes:
        return frozenset()
    names = linear_layers(plan.model)
    found: set[str] = set()
    targets = plan.lora.targets or ()
    if ALL_LINEAR in targets and len(targets) > 1:
        raise PlanError("lora.targets", list(targets), f"must be {ALL_LINEAR} alone, or names of linear layers")
    if plan.model.experts:
        _check_experts(targets, plan.model)
    for target in targets:
        matched = {part for part, name in names.items() if target == ALL_LINEAR or f".{name}".endswith(f".{target}")}
        found |= matched
        if target in NOT_ADAPTED and not matched:
            problem = f"must be a linear layer of a block: embedding and head are not modelled; {_named(plan)}"
            raise PlanError("lora.targets", target, problem)
    if targets and not found:
        wrong, problem = ", ".join(targets), f"matches nothing in {plan.model.name}; {_named(plan)}"
        raise PlanError("lora.targets", wrong, problem, known=(*last_names(plan.model), ALL_LINEAR))
    return frozenset(found)


def _named(plan: Plan) -> str:
    named = f"its linear layers are {', '.join(last_names(plan.model))}"
    return named if plan.model.experts else f"{named}; {ALL_LINEAR} names them all"


def left_out(plan: Plan) -> list[str]:
    """Targets beside others that match nothing, which peft leaves out (``tuners_utils.py``, ``inject_adapter``)."""
    if not plan.model.has_sizes:
        return []
    names = linear_layers(plan.model).values()
    targets = plan.lora.targets or () if plan.lora.rank is not None else ()
    return [one for one in targets if one != ALL_LINEAR and not any(f".{name}".endswith(f".{one}") for name in names)]


def saved(plan: Plan) -> frozenset[str]:
    """Tables of embedding and head that ``lora.modules_to_save`` names, as the recipes call them (peft
    ``utils/other.py``, ``ModulesToSaveWrapper``)."""
    names = family(plan.model.family).modules
    known = {names.embedding[0]: "word.weight", names.head[-1]: "head.weight"} if names is not None else {}
    found = set()
    for module in plan.lora.modules_to_save or ():
        matched = {table for name, table in known.items() if f".{name}".endswith(f".{module}")}
        if not matched or plan.model.mlm_head or plan.model.head_bias:
            last = [name.rpartition(".")[2] for name in known]
            problem = f"is not modelled of {plan.model.name}; {' and '.join(last)} are, of heads without a bias"
            raise PlanError("lora.modules_to_save", module, problem)
        found |= matched
    if found and plan.model.tied_embeddings:
        problem = f"is not modelled of {plan.model.name}, whose head and embedding share one table"
        raise PlanError("lora.modules_to_save", list(plan.lora.modules_to_save or ()), problem)
    return frozenset(found)


def saved_parameters(plan: Plan) -> int:
    """Elements of the copies that are trained whole."""
    return len(saved(plan)) * plan.model.vocab * plan.model.hidden


def _check_experts(targets: Sequence[str], spec: ModelSpec) -> None:
    """Refuses targets that name experts, whose adapters peft puts on whole stacks of weights (``ParamWrapper``)."""
    experts = [name for part, name in linear_layers(spec).items() if part in OF_EXPERTS]
    for target in targets:
        if target == ALL_LINEAR or any(f".{name}".endswith(f".{target}") for name in experts):
            problem = f"must be among {', '.join(last_names(spec))} in a model with experts, whose adapters are not "
            raise PlanError("lora.targets", target, problem + "modelled")


def linear_sizes(spec: ModelSpec) -> Mapping[str, tuple[int, int]]:
    """Inputs and outputs of linear layers that adapters may be on; of latent attention, those that the model has."""
    h, f, a, d = spec.hidden, spec.ffn, spec.heads, spec.head_dim
    sizes = {
        "qkv": (h, spec.qkv_features),
        "query": (h, a * d),
        "key": (h, spec.kv_heads * d),
        "value": (h, spec.kv_heads * d),
        "attention_output": (spec.attention_features, h),
        "gate": (h, f),
        "up": (h, f),
        "gate_up": (h, 2 * f),
        "down": (f, h),
        "transform": (h, h),
    }
    if q := spec.latent_q_rank:
        sizes |= {"query_down": (h, q), "query_up": (q, a * d)}
        del sizes["query"]
    if kv := spec.latent_kv_rank:
        up = a * (spec.nope_head_dim + spec.value_head_dim)
        sizes |= {"key_value_down": (h, kv + spec.rope_head_dim), "key_value_up": (kv, up)}
    return sizes


def adapter_parameters(plan: Plan) -> int:
    """Elements of all adapters: ``r (k + n)`` for a layer with k inputs and n outputs; of DoRA n more."""
    spec, rank = plan.model, plan.lora.rank or 0
    counts = {name: rank * (k + n) + n * plan.lora.dora for name, (k, n) in linear_sizes(spec).items()}
    return sum(counts[name] * (1 if name == "transform" else spec.layers) for name in adapted(plan))
