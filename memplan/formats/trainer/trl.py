"""trl's trainers, a room each: by what a script or its arguments are known to be of it, what its configuration says by
default, which of its keys change memory, and which change none.

trl 1.16: ``scripts/`` (``trl dpo``, ``dpo.py``), ``trainer/base_config.py``, ``trainer/sft_config.py`` (``SFTConfig``),
``trainer/dpo_config.py`` (``DPOConfig``), ``trainer/kto_config.py`` (``KTOConfig``), ``trainer/grpo_config.py``
(``GRPOConfig``), ``trainer/rloo_config.py`` (``RLOOConfig``), ``trainer/reward_config.py`` (``RewardConfig``),
``experimental/cpo/cpo_config.py`` (``CPOConfig``), ``experimental/orpo/orpo_config.py`` (``ORPOConfig``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

from ...plan.errors import Node, PlanError
from ...plan.lora import SCORE
from ...plan.read import SAVED
from ...plan.releases import (
    ARGUMENTS_OF_SGD,
    CHECKPOINT_DTYPE,
    TRL_LOADS_FP32,
    TRL_TILES,
    Version,
    parsed,
    shown,
    transformers_of,
)
from ...values import dataclass, replace
from ..launch import Asked
from ..settings import Reader, Row
from .arguments import EVALUATION, EVALUATION_OF_LOSS, Arguments, no_evaluation
from .keys import FROM_SCRATCH, LOADED_BY
from .table import of_model


class Before(NamedTuple):
    """What a key does before the release ``first``, which is not modelled."""

    first: Version
    does: str
    value: str = ""
    """With this value, alone or among others; empty where any does it."""

    def counts(self, node: Node) -> bool:
        said = [one.value for one in node.value] if isinstance(node.value, list) else [node.value]
        return self.value in said if self.value else node.value not in (None, False)


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop around the Trainer's arguments."""

    name: str
    """``trainer.loop`` of a plan."""
    scripts: tuple[str, ...] = ()
    """trl's commands and scripts that start it."""
    alone: tuple[str, ...] = ()
    """Keys that no other loop has."""
    without_effect: frozenset[str] = frozenset()
    """Keys that change no memory, beside those of ``TrainingArguments``."""
    defaults: Mapping[str, bool | float] = field(default_factory=dict)
    """Where they are others than those of ``TrainingArguments``,"""
    earlier: Mapping[str, tuple[Version, bool | float | None]] = field(default_factory=dict)
    """and before which release of trl they are others than these, or none."""
    counts_before: Mapping[str, Before] = field(default_factory=dict)
    """Keys that change memory before a release."""
    rows: tuple[Row, ...] = ()
    own_loss: bool = True
    """The loss is not the model's, so that engines have to know the loop, too."""
    experimental: bool = False
    """Of ``trl.experimental``: no command starts it, and a model that it is given by name is loaded as transformers
    does, not in fp32."""

    def with_defaults(self, written: Node, asked: Asked) -> Node:
        """The arguments ``written`` with the defaults that they do not say, and without what changes no memory."""
        for key, older in self.counts_before.items():
            node = written.mapping.get(key)
            if node is not None and older.counts(node) and _is_before(older.first, "trl", asked):
                what = f"must be left out before trl {shown(older.first)}, where it {older.does}: not modelled"
                raise node.wrong(key, what)
        given = {key: node for key, node in written.mapping.items() if key not in self.without_effect}
        known = {key for key, node in given.items() if node.value is not None}
        known |= {"gradient_checkpointing"} if "activation_checkpointing" in known else set()
        known |= {"bf16"} if "fp16" in known and given["fp16"].value else set()
        defaults: dict[str, bool | float | None] = {**self.defaults}
        defaults |= {key: value for key, (first, value) in self.earlier.items() if _is_before(first, "trl", asked)}
        unsaid = {
            key: Node(value, written.origin)
            for key, value in defaults.items()
            if key not in known and value is not None
        }
        return Node({**unsaid, **given}, written.origin)


# -- GRPO ------------------------------------------------------------------------------------------------


def _prompt(reader: Reader) -> None:
    """Releases before 1.0 cut prompts: with the completion, that is a sequence."""
    prompt, completion = (reader.settings.node(name) for name in ("max_prompt_length", "max_completion_length"))
    lengths = [node.value for node in (prompt, completion) if node is not None and isinstance(node.value, int)]
    if len(lengths) == 2:
        reader.building.put("batch.seq", sum(lengths), "max_prompt_length")


def _reference(reader: Reader) -> None:
    """A KL term has a reference."""
    node = reader.settings.node("beta")
    if node is not None and node.value:
        reader.building.put("trainer.keeps_reference", Node(True, node.origin), "beta")


def _engine_beside(reader: Reader) -> None:
    """transformers' own generation gives back what it takes, and a server has GPUs of its own; what vLLM in the same
    process keeps is asked for."""
    arguments: Arguments = reader.settings
    mode = arguments.node("vllm_mode")
    if arguments.on("use_vllm") is None or (mode is not None and mode.value == "server"):
        reader.building.put("trainer.generation_memory", 0, "use_vllm")
    reader.building.because("vllm_mode", "says where generation runs")
    reader.building.because("vllm_enable_sleep_mode", "what generation keeps is --generation-memory")


def _reward_model(reader: Reader) -> None:
    """``GRPOTrainer`` loads it on every rank, where it stays (``prepare_model`` with ``evaluation_mode``)."""
    node = reader.settings.node("reward_model_name_or_path")
    if node is not None and "generation-memory" not in reader.context:
        problem = (
            "is a model beside the policy, whole on every GPU, which is not modelled: say what it takes, with "
            "what generation keeps, as --generation-memory 16GiB"
        )
        raise PlanError("reward_model_name_or_path", node.plain(), problem, origin=node.origin)


def _no_wide_head(reader: Reader) -> None:
    if (node := reader.settings.on("cast_lm_head_to_fp32")) is not None:
        raise node.wrong(
            "cast_lm_head_to_fp32", "must be false: a head in fp32 beside a model in 16 bits is not modelled"
        )


def _unpaired(reader: Reader) -> None:
    """Without a KL term there are no mismatched completions (``calculate_KL``)."""
    node = reader.settings.node("loss_type")
    if node is not None and node.value not in (None, "kto"):
        raise node.wrong("loss_type", "must be kto: losses without mismatched completions are not modelled")


def _prepared(reader: Reader) -> None:
    """``ORPOTrainer`` and ``CPOTrainer`` prepare quantised models."""
    node = reader.settings.on("load_in_4bit", "load_in_8bit")
    if node is not None and "kbit-preparation" not in reader.context:
        reader.building.put("quantisation.prepared", Node(True, node.origin), "load_in_4bit")


def _no_liger(reader: Reader) -> None:
    """``DPOTrainer`` and ``GRPOTrainer`` take Liger's losses then (``use_liger_kernel``)."""
    arguments: Arguments = reader.settings
    if (node := arguments.on("use_liger_kernel", "use_liger_loss")) is not None:
        raise node.wrong(
            "use_liger_kernel",
            "must be false: Liger's losses of pairs and groups are not modelled; trl's own head makes no logits",
        )


def _liger_of_layers(reader: Reader) -> None:
    """``RewardTrainer``'s model has no loss that Liger's could replace, ``SFTTrainer`` turns that off, and
    ``CPOTrainer`` and ``ORPOTrainer`` give the model no labels."""
    if (node := reader.settings.on("use_liger_kernel")) is not None:
        reader.building.put("loss.kind", Node("plain", node.origin), "use_liger_kernel")


def _negative_likelihood(reader: Reader) -> None:
    node = reader.settings.node("loss_type")
    if node is not None and node.value not in ("nll", "chunked_nll"):
        raise node.wrong("loss_type", "must be nll: other losses of SFT are not modelled")


def _balanced(reader: Reader) -> None:
    """``SFTTrainer`` puts its own coefficient into the model's configuration: 0 leaves out the routers' loss."""
    node = reader.settings.node("router_aux_loss_coef")
    if node is not None and node.value == 0:
        of_model(reader.building, "router_aux_loss", Node(0.0, node.origin), "router_aux_loss_coef")


def _saved_head(reader: Reader) -> None:
    """For sequence classification peft trains a copy of the head (``PeftModelForSequenceClassification``); for any
    other task, as ``ModelConfig`` has it by default, the head is frozen as it was made."""
    arguments: Arguments = reader.settings
    task, given = arguments.node("lora_task_type"), arguments.node("lora_modules_to_save")
    if arguments.on("use_peft") is None or "modules-to-save" in reader.context:
        return
    if task is not None and str(task.value).rpartition(".")[2] == "SEQ_CLS":
        modules = [] if given is None else given.value if isinstance(given.value, list) else [given]
        if SCORE not in [one.value for one in modules]:
            both = [*modules, Node(SCORE, task.origin)]
            reader.building.put("lora.modules_to_save", Node(both, task.origin), "lora_task_type")
    elif given is None:
        reader.building.note("head-frozen", HEAD_FROZEN)


HEAD_FROZEN = (
    "without lora_task_type SEQ_CLS (or lora_modules_to_save score) peft freezes the head, which no checkpoint has: "
    "scores stay random products"
)


def _no_last_logits(reader: Reader) -> None:
    """``DPOTrainer`` of 0.13 to 0.28 then asks for logits from the first completion on alone."""
    for key in ("use_logits_to_keep", "use_num_logits_to_keep"):
        if (node := reader.settings.on(key)) is not None:
            raise node.wrong(key, "must be false: logits of only the completions are not modelled in DPO")


_NO_LIGER = Row("use_liger_kernel", "", older=("use_liger_loss",), read=_no_liger)
_ALL_LOGITS = Row("use_logits_to_keep", "", older=("use_num_logits_to_keep",), read=_no_last_logits)

# -- the loops -------------------------------------------------------------------------------------------

_DATA = "router_aux_loss_coef "
_OF_ALL: Mapping[str, bool | float] = {"gradient_checkpointing": True, "bf16": True}
"""``_BaseConfig``: bf16 unless fp16 is asked for."""
_EARLIER: Mapping[str, tuple[Version, bool | float | None]] = {
    "gradient_checkpointing": ((0, 22), None),
    "bf16": ((0, 19), None),
}
"""Before these releases trl has the defaults of ``TrainingArguments``."""


def _saved_classifier(reader: Reader) -> None:
    """The head of a classifier that the arguments make, if they do."""
    if reader.settings.node("num_labels") is not None or "labels" in reader.context:
        _saved_head(reader)


TRAINER = Loop(
    "transformers",
    rows=(*EVALUATION, Row("lora_task_type", "lora.modules_to_save", read=_saved_classifier)),
    own_loss=False,
)
"""transformers' own."""

_BEFORE_TILES = Loop(
    "transformers",
    without_effect=frozenset(
        (
            _DATA
            + """
            shuffle_dataset truncation_mode pad_to_multiple_of
            completion_only_loss assistant_only_loss
            """
        ).split()
    ),
    defaults={**_OF_ALL, "max_length": 1024},
    earlier=_EARLIER,
    rows=EVALUATION,
    own_loss=False,
)
"""SFTTrainer before trl 1.15, which has the loss of transformers."""

_SFT = Loop(
    "sft",
    scripts=("sft",),
    alone=("packing", "packing_strategy", "eval_packing", "completion_only_loss", "assistant_only_loss"),
    without_effect=_BEFORE_TILES.without_effect - {_DATA.strip()},
    defaults=_BEFORE_TILES.defaults,
    earlier=_EARLIER,
    rows=(
        Row("use_liger_kernel", "loss.kind", read=_liger_of_layers),
        Row("loss_type", "", read=_negative_likelihood),
        Row("router_aux_loss_coef", "model.router_aux_loss", read=_balanced),
        *EVALUATION_OF_LOSS,
    ),
)

_DPO = Loop(
    "dpo",
    scripts=("dpo",),
    alone=("precompute_ref_log_probs", "f_divergence_type", "ld_alpha", "discopop_tau", "rpo_alpha"),
    without_effect=frozenset(
        (
            _DATA
            + """
            beta loss_type loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef label_smoothing
            use_weighting discopop_tau sync_ref_model ref_model_mixup_alpha ref_model_sync_steps truncation_mode
            pad_token pad_to_multiple_of disable_dropout max_prompt_length max_completion_length
            precompute_ref_batch_size rpo_alpha
            """
        ).split()
    ),
    defaults={**_OF_ALL, "max_length": 1024},
    earlier={**_EARLIER, "max_length": ((0, 14), 512)},
    counts_before={
        "rpo_alpha": Before((0, 29), "adds a cross entropy of the chosen sequences"),
        "use_weighting": Before(TRL_TILES, "takes all log-probabilities once more"),
        "loss_type": Before(TRL_TILES, "adds a cross entropy of the chosen sequences", "sft"),
    },
    rows=(
        _NO_LIGER,
        _ALL_LOGITS,
        Row("precompute_ref_log_probs", "trainer.precompute_ref_log_probs", kind="switch"),
        *EVALUATION_OF_LOSS,
    ),
)

_GRPO = Loop(
    "grpo",
    scripts=("grpo",),
    alone=("steps_per_generation", "importance_sampling_level", "num_generations_eval", "top_entropy_quantile"),
    without_effect=frozenset(
        (
            _DATA
            + """
            num_generations num_generations_eval shuffle_dataset pad_to_multiple_of generation_batch_size
            steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
            repetition_penalty cache_implementation vllm_model_impl vllm_structured_outputs_regex
            vllm_guided_decoding_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
            vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size num_iterations
            epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos
            vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation
            scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha
            ref_model_sync_steps top_entropy_quantile max_tool_calling_iterations vllm_importance_sampling_correction
            vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
            vllm_importance_sampling_cap off_policy_mask_threshold use_bias_correction_kl log_completions
            log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
            reward_funcs
            """
        ).split()
    ),
    defaults={**_OF_ALL, "max_completion_length": 256},
    earlier={**_EARLIER, "beta": ((0, 19), 0.04), "max_prompt_length": ((0, 26), 512)},
    rows=(
        _NO_LIGER,
        Row("max_completion_length", "trainer.completion_length"),
        Row("max_prompt_length", "batch.seq", read=_prompt),
        Row("beta", "trainer.keeps_reference", read=_reference),
        Row("use_vllm", "trainer.generation_memory", read=_engine_beside),
        Row("reward_model_name_or_path", "trainer.generation_memory", read=_reward_model),
        Row("cast_lm_head_to_fp32", "", read=_no_wide_head),
        *EVALUATION_OF_LOSS,
    ),
)
"""RLOO's configuration shares a few of its keys, and is told by its script."""

_RLOO = replace(
    _GRPO,
    name="rloo",
    scripts=("rloo",),
    alone=("normalize_advantages", "reward_clip_range"),
    without_effect=_GRPO.without_effect | {"normalize_advantages", "reward_clip_range"},
    defaults={**_OF_ALL, "max_completion_length": 512, "beta": 0.05},
    earlier={},
)

_KTO = Loop(
    "kto",
    scripts=("kto",),
    alone=("desirable_weight", "undesirable_weight"),
    without_effect=frozenset(
        (
            _DATA
            + """
            beta desirable_weight undesirable_weight sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
            disable_dropout pad_to_multiple_of precompute_ref_batch_size train_sampling_strategy
            """
        ).split()
    ),
    defaults={**_OF_ALL, "max_length": 1024},
    rows=(
        _NO_LIGER,
        Row("loss_type", "", read=_unpaired),
        Row("precompute_ref_log_probs", "trainer.precompute_ref_log_probs", kind="switch"),
        *EVALUATION_OF_LOSS,
    ),
)

_ORPO = Loop(
    "orpo",
    scripts=("orpo",),
    without_effect=frozenset(
        [
            "beta",
            "disable_dropout",
            "padding_value",
            "generate_during_eval",
            "is_encoder_decoder",
            "max_completion_length",
        ]
    ),
    defaults=_KTO.defaults,
    rows=(
        Row("use_liger_kernel", "loss.kind", read=_liger_of_layers),
        Row("load_in_4bit", "quantisation.prepared", read=_prepared),
        *EVALUATION_OF_LOSS,
    ),
    experimental=True,
)

_CPO = replace(
    _ORPO,
    name="cpo",
    scripts=("cpo", "simpo"),
    alone=("cpo_alpha", "simpo_gamma"),
    without_effect=_ORPO.without_effect | {"cpo_alpha", "simpo_gamma", "alpha", "label_smoothing", "loss_type"},
)
_SIMPO = replace(_CPO, name="simpo", scripts=(), alone=())
"""With a weight of 0 CPOTrainer computes no cross entropy; SimPO's own loss alone (``loss_type``) has one of 1."""


def _weighed(loop: Loop, written: Node) -> Loop:
    """``loop``, or of CPO's that without a cross entropy (``CPOConfig.__post_init__``)."""
    weight, loss = written.mapping.get("cpo_alpha"), written.mapping.get("loss_type")
    without = (weight is not None and weight.value == 0) or (loss is not None and loss.value == "alphapo")
    return _SIMPO if loop is _CPO and without else loop


_REWARD = Loop(
    "reward",
    scripts=("reward", "reward_modeling"),
    alone=("center_rewards_coefficient",),
    without_effect=frozenset(
        (_DATA + "pad_token pad_to_multiple_of center_rewards_coefficient disable_dropout").split()
    ),
    defaults={**_OF_ALL, "max_length": 1024},
    earlier=_EARLIER,
    rows=(
        Row("use_liger_kernel", "loss.kind", read=_liger_of_layers),
        Row("lora_task_type", "lora.modules_to_save", read=_saved_head),
        *EVALUATION_OF_LOSS,
    ),
)

_OF_LLAMA_FACTORY = Loop(
    "llama-factory-dpo",
    scripts=("llama-factory-dpo",),
    rows=(
        Row("use_liger_kernel", "loss.kind", read=_liger_of_layers),
        Row("eval_strategy", "", read=no_evaluation),
    ),
)
"""LLaMA-Factory's own, whose arguments are the Trainer's."""

_OF_AXOLOTL = Loop(
    "axolotl-dpo",
    scripts=("axolotl-dpo",),
    defaults=_OF_ALL,
    rows=(
        Row("use_liger_kernel", "loss.kind", read=_liger_of_layers),
        Row("precompute_ref_log_probs", "trainer.precompute_ref_log_probs", kind="switch"),
        *EVALUATION_OF_LOSS,
    ),
)
"""Axolotl's own around trl's, with its translated arguments."""

_NOT_MODELLED = {
    **dict.fromkeys(("dpo_online", "online_dpo", "onlinedpo"), "online-dpo"),
    **dict.fromkeys(("nash_md", "nashmd"), "nash-md"),
    "async_grpo": "async-grpo",
    **{name: name for name in ("bco", "prm", "ppo", "gkd", "xpo")},
    **{name: name for name in ("distillation", "gold", "minillm", "sdft", "sdpo", "ssd", "tpo")},
}
"""trl's other trainers by their commands and scripts; a plan refuses them by name."""

LOOPS = (
    _SFT,
    _DPO,
    _KTO,
    _ORPO,
    _CPO,
    _SIMPO,
    _OF_LLAMA_FACTORY,
    _OF_AXOLOTL,
    _GRPO,
    _RLOO,
    _REWARD,
    *(Loop(name, scripts=(script,)) for script, name in _NOT_MODELLED.items()),
)

OF_PAIRS = ("beta", "sync_ref_model")
OF_SEVERAL = ("num_generations", "max_completion_length", "use_vllm", "vllm_mode", *OF_PAIRS)
"""Keys that several of trl's trainers have, and transformers' has not."""
OF_FILES = ("dataset_num_proc", "dataset_mixture", "dataset_mixer", "dataset_text_field", "dataset_kwargs")
"""And keys of their files that say nothing of memory."""


def _is_before(first: Version, library: str, asked: Asked) -> bool:
    """A release of ``library`` before ``first`` is named, or goes with a trl that is named alone."""
    given: object = asked.flags.get("versions", "")
    words = [word for one in (given if isinstance(given, (list, tuple)) else [given]) for word in str(one).split(",")]
    named = {word.partition("=")[0].strip(): word.partition("=")[2].strip() for word in words}
    if library == "transformers" and library not in named and "trl" in named:
        return (transformers_of(named["trl"]) or first) < first
    one = named.get(library, "")
    return bool(re.fullmatch(r"[0-9]+(\.[0-9]+)+", one)) and parsed(one) < first


def of_release(written: Node, asked: Asked) -> Node:
    """``written`` without what the release of transformers does not look at."""
    sgd = (node := written.mapping.get("optim")) is not None and node.value == "sgd"
    return written.without("optim_args") if sgd and _is_before(ARGUMENTS_OF_SGD, "transformers", asked) else written


def as_loaded(written: Node, loop: Loop, asked: Asked) -> Node:
    """``written`` with the checkpoint's dtype where nobody names one and what loads the model takes that: transformers,
    but not trl, whose trainers load what they are given by name in fp32."""
    by, named = written.mapping.get(LOADED_BY), [written.mapping.get(key) for key in ("dtype", "torch_dtype")]
    by_trl = (
        loop is not TRAINER and not loop.experimental and by is None and not _is_before(TRL_LOADS_FP32, "trl", asked)
    )
    from_scratch = by is not None and by.value == FROM_SCRATCH
    said = any(node is not None and node.value is not None for node in named)
    if said or by_trl or from_scratch or _is_before(CHECKPOINT_DTYPE, "transformers", asked):
        return written
    return written.with_items({"dtype": Node(SAVED, written.origin)})


def named_by_folder(folder: Path, written: Node) -> str:
    """The trainer that a recipe's folder is called by, ``recipes/zephyr-7b-beta/dpo/config.yaml``, where ``written``
    leaves open which one it is; empty where it does not."""
    name = folder.absolute().name
    return name if _is_open(written) and any(name in one.scripts for one in LOOPS) else ""


def named_by_keys(written: Node) -> str:
    """The key by which ``written`` is a file of trl's, where none says of which trainer: of SFT's; transformers'
    own scripts read no YAML (``run_clm.py``: ``parse_json_file``)."""
    keys = written.mapping.keys()
    of_trl = next((key for key in OF_FILES if key in keys), "")
    if (
        not of_trl
        and written.origin.source.endswith((".yaml", ".yml"))
        and {"dataset_name", "model_name_or_path"} <= keys
    ):
        of_trl = "dataset_name"
    return of_trl if of_trl and not keys & {*OF_SEVERAL, *(key for one in LOOPS for key in one.alone)} else ""


def _is_open(written: Node) -> bool:
    keys = written.mapping.keys()
    return bool(keys & {*OF_SEVERAL, *OF_FILES}) and not any(keys & {*one.alone} for one in LOOPS)


def loop_of(script: str, written: Node, asked: Asked) -> Loop:
    """The loop that ``script`` starts with the arguments ``written``."""
    return _weighed(_started(script, written, asked), written)


def _started(script: str, written: Node, asked: Asked) -> Loop:
    named = asked.flags.get("trainer")
    if isinstance(named, str):
        return next((one for one in LOOPS if one.own_loss and one.name == named), TRAINER)
    found = next((one for one in LOOPS if script in one.scripts), None)
    if found is _SFT and _is_before(TRL_TILES, "trl", asked):
        return _BEFORE_TILES
    if found is not None or script.startswith("sft"):
        return found or TRAINER
    if (found := next((one for one in LOOPS if written.mapping.keys() & {*one.alone}), None)) is not None:
        return found
    for key in OF_SEVERAL:
        if (node := written.mapping.get(key)) is not None:
            problem = "belongs to several of trl's trainers: say which one (--trainer dpo, kto, grpo or rloo)"
            if key not in OF_PAIRS:
                problem += "; of grpo also what vLLM keeps in the same process (--generation-memory 20GiB)"
            raise node.wrong(key, problem)
    return TRAINER
