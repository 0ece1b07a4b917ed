"""Which linear layers of a model there are, under the names that transformers gives them, and which LoRA targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..families import family
from ..frameworks import framework
from .errors import PlanError
from .plan import Plan
from .releases import STACKED_EXPERTS, release
from .spec import ModelSpec

SCORE, CLASSIFIER = "score", "classifier"
"""The head of a model for sequence classification (``GenericForSequenceClassification``)."""

ALL_LINEAR = "all-linear"
"""Every linear layer but the head (peft ``tuners_utils.py``, ``_maybe_include_all_linear_layers``)."""

NOT_ADAPTED = ("lm_head", "embed_tokens", "wte", "wpe", "embed_in", "embed_out", "word_embeddings", "decoder")
"""What targets may name in peft beside layers of blocks: embeddings and heads."""

WORD, HEAD = "word", "head"
"""The embedding's table and the head, as the recipes call them."""


OF_EXPERTS = ("gate", "up", "gate_up", "down", "shared_gate", "shared_up", "shared_down", "shared_opens")
"""Linear layers of a feed-forward network, which experts have in place of a dense layer."""


PARTS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_fc1": ("linear_fc1_gate", "linear_fc1_up"),
}
"""Megatron-Bridge's names of what has adapters of its own within one linear layer (``CanonicalLoRA``), in the order in
which they run."""

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
}
"""peft's targets of architectures that traces know (peft 0.21, ``utils/constants.py``,
``TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING``)."""


def default_targets(spec: ModelSpec) -> tuple[str, ...] | None:
    """peft's, where nobody names any."""
    return family(spec.family).lora_targets if spec.has_sizes else OF_TYPES.get(spec.family)


def linear_layers(spec: ModelSpec) -> dict[str, str]:
    """Those of the family that the model has, and the ends of their names."""
    sizes, known = linear_sizes(spec), family(spec.family)
    named = known.linear_layers
    if spec.labels and known.scores is not None:
        named = {**{part: name for part, name in named.items() if part not in known.word_layers}, **known.score_layers}
    return {part: name for part, name in named.items() if part in sizes or part in OF_EXPERTS}


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
    targets = plan.lora.targets or ()
    if (own := framework(plan.framework).adaptable(plan)) is not None:
        known = tuple(name for name, layers in own.items() if layers)
        wrong = next((target for target in targets if target not in own or not {*targets} & {*known}), None)
        if wrong is not None:
            raise PlanError(
                "lora.targets", wrong, f"must be among {', '.join(known)} in {plan.model.name}", known=known
            )
        return frozenset(layer.part for target in targets for layer in own[target])
    names = linear_layers(plan.model)
    found: set[str] = set()
    if ALL_LINEAR in targets and len(targets) > 1:
        raise PlanError("lora.targets", list(targets), f"must be {ALL_LINEAR} alone, or names of linear layers")
    if plan.model.experts:
        attention = _finds_attention_alone(plan)
        _check_experts([one for one in targets if one != ALL_LINEAR or not attention], plan.model)
        names = {part: name for part, name in names.items() if part not in OF_EXPERTS}
    ends = tables(plan.model)
    for target in targets:
        matched = {part for part, name in names.items() if target == ALL_LINEAR or f".{name}".endswith(f".{target}")}
        matched |= {part for name, part in ends.items() if f".{name}".endswith(f".{target}")}
        found |= matched
        if target in NOT_ADAPTED and not matched:
            problem = f"is not modelled as a target in {plan.model.name}; {named_layers(plan)}"
            raise PlanError("lora.targets", target, problem)
    if found & {WORD, HEAD}:
        _check_tables(plan, found & {WORD, HEAD})
    if targets and not found:
        wrong, problem = ", ".join(targets), f"matches nothing in {plan.model.name}; {named_layers(plan)}"
        raise PlanError("lora.targets", wrong, problem, known=(*last_names(plan.model), ALL_LINEAR))
    return frozenset(found)


def _finds_attention_alone(plan: Plan) -> bool:
    """Whether peft's word for all linear layers names no experts."""
    known = family(plan.model.family)
    return known.all_linear_of_attention and release(plan, "transformers") >= STACKED_EXPERTS


def tables(spec: ModelSpec) -> dict[str, str]:
    """Names of embedding and head, and what the recipes call them, where adapters on them are modelled: embeddings of
    words alone, and heads that are linear layers."""
    known = family(spec.family)
    if known.modules is None or known.scale_in_embedding or spec.mlm_head or spec.head_bias:
        return {}
    return {known.modules.embedding[0]: WORD, **({} if spec.tied_embeddings else {known.modules.head[-1]: HEAD})}


def _check_tables(plan: Plan, found: set[str]) -> None:
    """Adapters on embedding or head: with which settings they are modelled."""
    given = list(plan.lora.targets or ())
    if plan.lora.dora:
        raise plan.wrong("lora.dora", "must be false with adapters on embedding or head: both are not modelled")
    if plan.loss.kind != "plain" and HEAD in found:
        problem = f"must not name the head with loss.kind {plan.loss.kind}: its loss reads the head's own weight"
        raise PlanError("lora.targets", given, problem)
    if plan.loop.own_loss:
        of = "a classifier" if plan.model.labels else f"trainer.loop {plan.trainer.loop}"
        problem = f"must not name embedding or head with {of}: both are not modelled"
        raise PlanError("lora.targets", given, problem)
    plan.refuse(
        (
            "quantisation.prepared",
            plan.quantisation.prepared,
            "must be false with adapters on embedding or head: both together are not modelled",
        ),
        (
            "precision.autocast",
            plan.precision.autocast,
            "must be false with adapters on embedding or head: both together are not modelled",
        ),
    )


STACKED = {"experts.gate_up": "experts.gate_up_proj", "experts.down": "experts.down_proj"}
"""Weights of stacked experts as the recipes call them, and the ends of their names."""


def of_experts(plan: Plan) -> frozenset[str]:
    """Weights of stacked experts that ``lora.target_parameters`` names, as the recipes call them. A name is the end of
    a parameter's (peft ``tuners_utils.py``, ``_inject_parameters``)."""
    given = plan.lora.target_parameters
    if not given:
        return frozenset()
    spec, lora = plan.model, plan.lora
    known = family(spec.family)
    stacked = known.mixture is not None or known.mlp_beside_experts
    if not spec.experts or not stacked or spec.mlp_bias:
        what = "names stacks of experts, and" if spec.experts else "is for stacks of experts, which this model has not:"
        how = "only stacks without biases are modelled" if spec.experts else "name linear layers (--lora-targets)"
        raise plan.wrong("lora.target_parameters", f"{what} {how}; the model is {spec.name}")
    found = set()
    for one in given:
        matched = {
            part for part, name in STACKED.items() if f".{family(spec.family).experts_in}.{name}".endswith(f".{one}")
        }
        if not matched:
            problem = f"matches no weight of experts; {' and '.join(STACKED.values())} are these"
            raise PlanError("lora.target_parameters", one, problem, known=tuple(STACKED.values()))
        found |= matched
    for name, wrong in (("dropout", lora.dropout != 0.0), ("dora", lora.dora)):
        if wrong:
            raise plan.wrong(
                f"lora.{name}", "must be left out with lora.target_parameters: peft's ParamWrapper refuses it"
            )
    plan.refuse(
        (
            "lora.target_parameters",
            release(plan, "transformers") < STACKED_EXPERTS,
            f"must be left out with transformers before {STACKED_EXPERTS[0]}, whose experts are modules",
        ),
        (
            "lora.target_parameters",
            plan.precision.autocast or plan.trainer.kind.own_loss,
            "must be left out with autocast and with trl's losses of its own: these together are not modelled",
        ),
    )
    return frozenset(found)


def refuse_apart(plan: Plan, where: str) -> None:
    """``PlanError`` for adapters on embedding, head or stacked experts, which are not modelled ``where``."""
    if plan.lora.rank is None:
        return
    if plan.lora.target_parameters:
        raise plan.wrong(
            "lora.target_parameters",
            f"must be left out {where}: adapters on stacks of experts are modelled in single, ddp and device-map",
        )
    if adapted(plan) & {WORD, HEAD}:
        problem = f"must not name embedding or head {where}: adapters on them are modelled in single, ddp and "
        raise plan.wrong("lora.targets", f"{problem}device-map")


def named_layers(plan: Plan) -> str:
    """What targets may be called, as a part of a sentence."""
    named = f"its linear layers are {', '.join(last_names(plan.model))}"
    return named if plan.model.experts else f"{named}; {ALL_LINEAR} names them all"


def left_out(plan: Plan) -> list[str]:
    """Targets beside others that match nothing, which peft leaves out (``tuners_utils.py``, ``inject_adapter``)."""
    if not plan.model.has_sizes or framework(plan.framework).adaptable(plan) is not None:
        return []
    names = (*linear_layers(plan.model).values(), *tables(plan.model))
    targets = plan.lora.targets or () if plan.lora.rank is not None else ()
    return [one for one in targets if one != ALL_LINEAR and not any(f".{name}".endswith(f".{one}") for name in names)]


def saved(plan: Plan) -> frozenset[str]:
    """Tables of embedding and head that ``lora.modules_to_save`` names, as the recipes call them (peft
    ``utils/other.py``, ``ModulesToSaveWrapper``)."""
    names = family(plan.model.family).modules
    heads = (SCORE, CLASSIFIER) if plan.model.labels else names.head[-1:] if names is not None else ()
    known = {names.embedding[0]: "word.weight", **dict.fromkeys(heads, "head.weight")} if names is not None else {}
    found = set()
    for module in plan.lora.modules_to_save or ():
        matched = {table for name, table in known.items() if f".{name}".endswith(f".{module}")}
        if not matched or (not plan.model.labels and (plan.model.mlm_head or plan.model.head_bias)):
            last = [name.rpartition(".")[2] for name in known]
            problem = f"is not modelled of {plan.model.name}; {' and '.join(last)} are, of heads without a bias"
            raise PlanError("lora.modules_to_save", module, problem)
        found |= matched
    if "head.weight" in found and plan.model.labels and family(plan.model.family).scores is not None:
        found.add("head.bias")
    if found and plan.model.tied_embeddings:
        raise plan.wrong(
            "lora.modules_to_save", f"is not modelled of {plan.model.name}, whose head and embedding share one table"
        )
    return frozenset(found)


def saved_parameters(plan: Plan) -> int:
    """Elements of the copies that are trained whole."""
    spec, rows = plan.model, {"head.weight": plan.model.labels or plan.model.vocab}
    sizes = {"head.bias": spec.labels}
    return sum(sizes.get(table, rows.get(table, spec.vocab) * spec.hidden) for table in saved(plan))


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
        "query": (h, a * d * (1 + spec.attention_gate)),
        "key": (h, spec.kv_heads * d),
        "value": (h, spec.kv_heads * d),
        "attention_output": (spec.attention_features, h),
        "gate": (h, f),
        "up": (h, f),
        "gate_up": (h, 2 * f),
        "down": (f, h),
        "transform": (h, h),
        "pooler": (h, h),
        WORD: (spec.vocab, h),
        HEAD: (h, spec.vocab),
    }
    if spec.linear_interval:
        keys, values = 2 * spec.linear_key_heads * spec.linear_key_head_dim, spec.linear_value_heads
        features = values * spec.linear_value_head_dim
        sizes |= {"delta_qkv": (h, keys + features), "delta_gate": (h, features), "delta_output": (features, h)}
        sizes |= dict.fromkeys(("delta_b", "delta_a"), (h, values))
        sizes |= {"delta_qkvz": (h, keys + 2 * features), "delta_ba": (h, 2 * values)}
    if q := spec.latent_q_rank:
        sizes |= {"query_down": (h, q), "query_up": (q, a * d)}
        del sizes["query"]
    if kv := spec.latent_kv_rank:
        up = a * (spec.nope_head_dim + spec.value_head_dim)
        sizes |= {"key_value_down": (h, kv + spec.rope_head_dim), "key_value_up": (kv, up)}
    return sizes


def _more_of_full_layers(
    spec: ModelSpec, counts: Mapping[str, int], names: Iterable[str], rank: int, dora: bool
) -> int:
    """Elements that adapters of attention called ``names`` have more in layers that see all tokens, by heads of their
    own, than ``counts`` of other layers."""
    full = sum(map(spec.is_full, range(spec.layers)))
    sizes = linear_sizes(spec.of_full_layers)
    own = {name: rank * sum(sizes[name]) + sizes[name][1] * dora for name in counts}
    own["value"] *= not spec.keys_as_values
    return full * sum(own[name] - counts[name] for name in names) if full else 0


def adapter_parameters(plan: Plan) -> int:
    """Elements of all adapters: ``r (k + n)`` for a layer with k inputs and n outputs; of DoRA n more."""
    spec, rank, h = plan.model, plan.lora.rank or 0, plan.model.hidden
    if (own := framework(plan.framework).adaptable(plan)) is not None:
        wrapped = [layer for target in {*(plan.lora.targets or ())} for layer in own[target]]
        norms = int(plan.lora.dora)
        return sum(one.times * (rank * (one.outputs + one.inputs) + norms * one.outputs) for one in wrapped)
    counts = {name: rank * (k + n) + n * plan.lora.dora for name, (k, n) in linear_sizes(spec).items()}
    once = ("transform", WORD, HEAD)
    dense = sum(not spec.has_experts(number) for number in range(spec.layers)) if spec.experts else spec.layers

    linear = sum(map(spec.is_linear, range(spec.layers))) if spec.linear_interval else 0

    def layers(name: str) -> int:
        shared = name.startswith("shared_")
        if name.startswith("delta_"):
            return linear
        if linear and name in ("query", "key", "value", "attention_output"):
            return spec.layers - linear
        return dense if name in OF_EXPERTS and not shared else spec.layers - (dense if shared else 0)

    of_layers = sum(counts[name] * (1 if name in once else layers(name)) for name in adapted(plan))
    of_layers += _more_of_full_layers(spec, counts, adapted(plan), rank, plan.lora.dora)
    sizes = {"experts.gate_up": (h, 2 * spec.expert_ffn), "experts.down": (spec.expert_ffn, h)}
    stacks = sum(rank * spec.experts * sum(sizes[name]) for name in of_experts(plan))
    return of_layers + stacks * (spec.layers - dense)
