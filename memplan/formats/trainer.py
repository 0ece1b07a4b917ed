"""``--from trainer``: arguments of Hugging Face's Trainer as a plan.

A JSON or YAML mapping as ``TrainingArguments.to_dict`` writes it or the example scripts take it: keys of
``training_args.py`` (transformers 5.23), and those of the scripts' model and data arguments that are known. How many
GPUs there are it does not say: more than one (``--gpus``) are taken to be started by a launcher, as ``ddp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..optimizers import trainer_names
from ..plan.errors import ABSENT, Guesses, PlanError, nearest
from ..plan.node import Node
from ..plan.normalise import normalised
from ..plan.notes import Note
from ..plan.read import Source
from ..plan.text import text_at
from ..plan.yaml_nodes import parse_yaml
from .launch import Asked, Launch, guessed, left_out
from .rows import Building, Reader, Row, read_rows
from .settings import Keys

READ = frozenset(
    {
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "weight_decay",
        "max_length",
        "max_seq_length",
        "block_size",
        "optim",
        "bf16",
        "fp16",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
        "attn_implementation",
        "torch_dtype",
        "dtype",
        "eval_accumulation_steps",
        "prediction_loss_only",
        "model_name_or_path",
        "deepspeed",
        "fsdp",
    }
)
"""Keys whose values are looked at."""

REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "deepspeed": (
            (None, "", False),
            "DeepSpeed runs the model: read its own file, --from deepspeed ds_config.json",
        ),
        "fsdp": ((None, "", False, []), "the model is sharded: give a plan with framework fsdp"),
        "torch_compile": ((None, False), "compiled code saves other tensors, and is not modelled"),
        "use_liger_kernel": (
            (None, False),
            "Liger's norms, rotary embedding and MLP are not modelled; its loss alone is --loss liger",
        ),
        "label_smoothing_factor": ((None, 0, 0.0), "the Trainer's own loss is not modelled; the model's is"),
        "neftune_noise_alpha": ((None,), "noise on the embeddings is not modelled"),
        "parallelism_config": ((None,), "Accelerate's parallelism is not modelled around the Trainer"),
        "optim_target_modules": ((None,), "optimizers of some modules (GaLore, APOLLO) are not modelled"),
        "use_cpu": ((None, False), "there is no device then"),
        "use_peft": ((None, False), "adapters are not read from here"),
        "load_in_4bit": ((None, False), "quantised weights are not read from here"),
        "load_in_8bit": ((None, False), "quantised weights are not read from here"),
    }
)
"""Keys that change the estimate: values that do nothing, and why another value is refused."""

NOTED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "auto_find_batch_size": ((None, False), "the batch size is found at run time; per_device_train_batch_size is"),
        "torch_empty_cache_steps": ((None,), "the cache is emptied behind forward: less is reserved than estimated"),
        "ddp_bucket_cap_mb": ((None, 25), "buckets are taken to be 25 MiB"),
        "ddp_static_graph": ((None, False), "DDP is taken to have no static graph"),
        "bf16_full_eval": ((None, False), "evaluation outside of training casts the model, and is not modelled"),
        "fp16_full_eval": ((None, False), "evaluation outside of training casts the model, and is not modelled"),
        "batch_eval_metrics": ((None, False), "logits are not kept then; leave out --eval-batches"),
        "eval_do_concat_batches": ((None, True), "logits are taken to be concatenated, batch by batch"),
        "packing": ((None, False), "rows are taken to be one sequence each"),
        "padding_free": ((None, False), "rows are taken to be one sequence each"),
    }
)
"""Keys that are not modelled and change a detail: values that do nothing, and the assumption."""

WITHOUT_EFFECT = frozenset(
    """
    output_dir overwrite_output_dir num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
    warmup_steps warmup_ratio optim_args adam_beta1 adam_beta2 adam_epsilon max_grad_norm average_tokens_across_devices
    tf32 torch_compile_backend torch_compile_mode liger_kernel_config use_cache logging_strategy logging_steps
    logging_first_step logging_dir log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy evaluation_strategy eval_steps eval_delay eval_on_start
    eval_use_gather_object include_for_metrics include_tokens_per_second save_only_model save_strategy save_steps
    save_safetensors save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo
    hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model
    greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed
    accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    remove_unused_columns label_names train_sampling_strategy group_by_length length_column_name
    ddp_find_unused_parameters ddp_broadcast_buffers ddp_backend ddp_timeout fsdp_config debug skip_memory_metrics
    do_train do_eval do_predict resume_from_checkpoint local_rank dataset_name dataset_config dataset_config_name
    train_file validation_file max_train_samples max_eval_samples preprocessing_num_workers config_name tokenizer_name
    cache_dir use_fast_tokenizer model_revision token trust_remote_code overwrite_cache validation_split_percentage
    keep_linebreaks streaming use_cpu_amp fp16_backend half_precision_backend fp16_opt_level torchdynamo mp_parameters
    past_index ray_scope no_cuda use_mps_device jit_mode_eval auto_find_batch_size_ratio chat_template_path
    """.split()  # noqa: SIM905 - a list this long would be a hundred lines
)
"""Keys without effect on the memory of a training step; ``max_grad_norm`` is one, for the norm is always taken."""


def read(place: str, asked: Asked) -> Launch:
    """The plan in the arguments at ``place``. The model and the number of GPUs are flags."""
    text, name = text_at(place)
    written = parse_yaml(text.expandtabs(2), name)
    if not isinstance(written.value, dict):
        raise PlanError("", ABSENT, "must be a mapping of TrainingArguments", origin=written.origin)
    if written.mapping.keys() & {"framework", "extends", "layout", "batch"}:
        raise PlanError("", ABSENT, "is a plan, not TrainingArguments; leave out --from", origin=written.origin)
    _refuse(written)
    building = Building(written.origin)
    reader = Reader(Arguments(written.mapping, written.origin), building, asked.names)
    building.put("trainer.loop", "transformers")
    unread = tuple(_unread(written, strict=asked.strict))
    _framework(reader)
    read_rows(ROWS, reader)
    notes = (*unread, *(Note(*note) for note in building.notes))
    return Launch(Source(normalised(building.plan()), Path()), notes)


class Arguments(Keys):
    """The Trainer's arguments; ``null`` counts as left out."""

    def node(self, name: str) -> Node | None:
        node = self.given.get(name)
        return node if node is not None and node.value is not None else None

    def on(self, *names: str) -> Node | None:
        """The first of ``names`` that is true."""
        switches = (self.value(Row(name, "", kind="switch")) for name in names)
        return next((node for node in switches if node is not None and node.value is True), None)


def _refuse(written: Node) -> None:
    for key, (harmless, why) in REFUSED.items():
        node = written.mapping.get(key)
        if node is not None and node.plain() not in harmless:
            raise PlanError(key, _plain(node), f"must be left out: {why}", origin=node.origin)


def _plain(node: Node) -> object:
    return ABSENT if isinstance(node.value, (dict, list)) else node.plain()


def _unread(written: Node, *, strict: bool) -> Iterator[Note]:
    """Keys that nobody knows, or that change a detail which is not modelled."""
    known = (*READ, *REFUSED, *NOTED, *WITHOUT_EFFECT)
    guesses = Guesses(lambda key: nearest(key, known))
    for key, node in written.mapping.items():
        if key in NOTED:
            harmless, assumed = NOTED[key]
            if node.plain() in harmless:
                continue
            code, problem = "argument-not-modelled", f"is not modelled: {assumed}"
        elif key in known or key.startswith("_"):
            continue
        else:
            code, problem = "argument-unknown", guessed("is no key that is read", guesses.of(key))
        yield left_out(code, key, _plain(node), problem, node.origin, strict=strict)


def _framework(reader: Reader) -> None:
    """Who runs the model."""
    names = reader.context
    if "framework" in names:
        return
    several = bool({"gpus", "dp"} & names) and not {"gpus", "dp"} <= names
    reader.building.put("framework", "ddp" if several else "single")
    if several:
        reader.building.note(
            "launcher-assumed",
            "several GPUs are taken to be started by torchrun or accelerate launch, one process each (ddp); "
            "without a launcher the Trainer wraps the model in DataParallel, which is not modelled",
        )


def _given_by(*flags: str) -> Callable[[Reader], str]:
    """A row that one of ``flags`` replaces."""
    return lambda reader: next((f"--{flag} instead" for flag in flags if flag in reader.context), "")


_DTYPES = {"float32": "fp32", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}


def _precision(reader: Reader) -> None:
    """``bf16`` and ``fp16`` are autocast, over the dtype in which the model was loaded: fp32 if nobody says."""
    arguments: Arguments = reader.settings
    put = reader.building.put
    bf16, fp16 = arguments.on("bf16"), arguments.on("fp16")
    if bf16 is not None and fp16 is not None:
        raise PlanError("fp16", True, "must be false with bf16: there is one autocast", origin=fp16.origin)
    found = arguments.first("dtype", "torch_dtype")
    loaded = found[1] if found is not None and found[1].value != "auto" else None
    if loaded is not None:
        name = str(loaded.value).removeprefix("torch.")
        if name not in _DTYPES:
            raise PlanError("dtype", loaded.plain(), "must be float32, bfloat16, float16 or auto", origin=loaded.origin)
        loaded = Node(_DTYPES[name], loaded.origin)
    on = bf16 or fp16
    if on is None:
        put("precision.dtype", loaded or "fp32", "dtype")
        return
    put("precision.dtype", Node("bf16" if bf16 is not None else "fp16", on.origin), "bf16", "fp16")
    put("precision.autocast", Node(True, on.origin), "bf16", "fp16")
    if loaded is not None:
        put("precision.parameters", loaded, "dtype")
        return
    reader.building.note(
        "loaded-dtype",
        "parameters are taken to be fp32; transformers 5 loads a checkpoint in the dtype that it was saved in: if "
        "the model was loaded so, give --autocast-parameters bf16",
    )


def _optimizer(reader: Reader) -> None:
    node = reader.settings.node("optim") or Node("adamw_torch_fused", reader.settings.origin)
    known = trainer_names()
    found: Mapping[str, Any] | None = known.get(str(node.value))
    if found is None:
        problem = f"is not modelled; {', '.join(known)} are"
        raise PlanError("optim", node.plain(), problem, origin=node.origin)
    for name, value in found.items():
        reader.building.put(f"optimizer.{name}", Node(value, node.origin), "optim")


def _recompute(reader: Reader) -> None:
    """``activation_checkpointing`` of every layer, not reentrant; ``gradient_checkpointing`` is its name before 5.0."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    node = reader.settings.on(*names)
    if node is None:
        return
    settings = reader.settings.first(*(f"{name}_kwargs" for name in names))
    for key, allowed in (("use_reentrant", (False,)), ("every_n_layers", (1,)), ("offload", (False,))):
        value = settings[1].mapping.get(key) if settings is not None else None
        if value is not None and value.plain() not in allowed:
            problem = f"must be {str(allowed[0]).lower()}: other recompute is not modelled"
            raise PlanError(key, _plain(value), problem, origin=value.origin)
    reader.building.put("recompute.mode", Node("full", node.origin), *names)


def _evaluates(arguments: Arguments) -> bool:
    """Whether the file asks for an evaluation; by default the Trainer makes none."""
    strategy = arguments.first("eval_strategy", "evaluation_strategy")
    while_training = strategy is not None and strategy[1].value not in ("no", False)
    return while_training or arguments.on("do_eval") is not None


def _evaluation_batch(reader: Reader) -> None:
    """Counts only where there is an evaluation."""
    name = "per_device_eval_batch_size"
    node = reader.settings.node(name)
    if _evaluates(reader.settings):
        reader.building.put("trainer.evaluation_mbs", 8 if node is None else node, name)
    elif node is not None and node.value != 8:
        reader.building.note(
            "evaluation-off",
            f"{name} is given, but neither eval_strategy nor do_eval: no evaluation is part of the estimate",
        )


def _evaluation(reader: Reader) -> None:
    """Logits are kept for ``compute_metrics`` alone, which no file shows."""
    arguments: Arguments = reader.settings
    if not _evaluates(arguments):
        return
    loss_only, steps = arguments.on("prediction_loss_only"), arguments.node("eval_accumulation_steps")
    if loss_only is not None or "eval-batches" in reader.context:
        return
    if steps is not None:
        reader.building.put("trainer.evaluation_batches", steps, "eval_accumulation_steps")
        return
    reader.building.note(
        "evaluation-logits",
        "evaluation is taken to compute no metrics; with compute_metrics the logits of every batch stay on the device "
        "until its end: give their number as --eval-batches, or eval_accumulation_steps",
    )


ROWS = (
    Row("per_device_train_batch_size", "batch.mbs", kind="any", default=8),
    Row(
        "gradient_accumulation_steps",
        "batch.accumulation",
        kind="any",
        default=1,
        without_effect=_given_by("gbs", "accumulation"),
    ),
    Row("per_device_eval_batch_size", "trainer.evaluation_mbs", read=_evaluation_batch),
    Row("weight_decay", "optimizer.weight_decay", kind="any", default=0.0),
    Row("block_size", "batch.seq", kind="any", older=("max_seq_length", "max_length")),
    Row("model_name_or_path", "model", kind="any", without_effect=_given_by("model")),
    Row("attn_implementation", "attention", kind="any"),
    Row("bf16", "precision.dtype", read=_precision),
    Row("optim", "optimizer.name", read=_optimizer),
    Row("activation_checkpointing", "recompute.mode", read=_recompute),
    Row("eval_strategy", "trainer.evaluation_batches", read=_evaluation),
)
"""With the defaults of ``TrainingArguments``; lengths are keys of scripts (and of TRL)."""
