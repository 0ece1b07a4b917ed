"""``--from trainer``: arguments of Hugging Face's Trainer as a plan.

A JSON or YAML mapping as ``TrainingArguments.to_dict`` writes it or the example scripts take it: keys of
``training_args.py`` (transformers 5.23), and those of the scripts' model and data arguments that are known. How many
GPUs there are it does not say: more than one (``--gpus``) are taken to be started by a launcher, as ``ddp``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from ..errors import ABSENT, PlanError, nearest, one_line
from ..node import Node
from ..normalise import normalised
from ..notes import Note
from ..read import Flags, Source
from ..text import STANDARD_INPUT, path_of, read_standard_input, read_text
from ..yaml_nodes import parse_yaml
from .building import Building
from .read import Launch

OPTIMIZERS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "adamw_torch": {"name": "adamw", "implementation": "foreach"},
        "adamw_torch_fused": {"name": "adamw", "implementation": "fused"},
        "adafactor": {"name": "adafactor", "implementation": "transformers"},
        "sgd": {"name": "sgd", "implementation": "foreach"},
        "adamw_bnb_8bit": {"name": "adam8bit", "block_size": 256},
        "adamw_8bit": {"name": "adam8bit", "block_size": 256},
        "paged_adamw_8bit": {"name": "adam8bit", "block_size": 256, "paged": True},
        "paged_adamw_32bit": {"name": "adamw", "implementation": "bitsandbytes", "paged": True},
        "lion_32bit": {"name": "lion"},
        "lion_8bit": {"name": "lion8bit", "block_size": 256},
        "paged_lion_32bit": {"name": "lion", "paged": True},
        "paged_lion_8bit": {"name": "lion8bit", "block_size": 256, "paged": True},
    }
)
"""``optim``; bitsandbytes' block size is that of 0.43 and later."""

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "per_device_train_batch_size": "batch.mbs",
        "gradient_accumulation_steps": "batch.accumulation",
        "per_device_eval_batch_size": "trainer.evaluation_mbs",
        "weight_decay": "optimizer.weight_decay",
        "max_length": "batch.seq",
        "max_seq_length": "batch.seq",
        "block_size": "batch.seq",
    }
)
"""Keys that are fields as they are; the last three are those of scripts (and of TRL)."""

DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "weight_decay": 0.0,
        "optim": "adamw_torch_fused",
    }
)
"""What ``TrainingArguments`` has where the file says nothing."""

READ = frozenset(
    {
        *FIELDS,
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
"""Keys that change what is estimated: values that do nothing, and why another is refused."""

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
"""Keys that are not modelled and change a detail: values that do nothing, and what is assumed."""

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


def read_trainer_arguments(place: str, flags: Flags, varied: Collection[str] = (), *, strict: bool = False) -> Launch:
    """The plan in the arguments at ``place``. What they do not say is in ``flags``: the model and the number of GPUs;
    ``varied`` are names of flags that take several values."""
    if place == "-":
        text, name = read_standard_input(), STANDARD_INPUT
    else:
        text, name = read_text(path_of(place)), place
    written = parse_yaml(text.expandtabs(2), name)
    if not isinstance(written.value, dict):
        raise PlanError("", ABSENT, "must be a mapping of TrainingArguments", origin=written.origin)
    if written.mapping.keys() & {"framework", "extends", "layout", "batch"}:
        raise PlanError("", ABSENT, "is a plan, not TrainingArguments; leave out --from", origin=written.origin)
    _refuse(written)
    names = {*flags, *varied}
    building = Building(written.origin)
    notes = [*_unread(written, strict=strict), *_fields(building, written, names)]
    _precision(building, written)
    _optimizer(building, written)
    notes += [*_recompute(building, written), *_evaluation(building, written, names)]
    return Launch(Source(normalised(building.plan()), Path()), tuple(notes), ())


def _given(written: Node, *keys: str) -> Node | None:
    """The first of ``keys`` that has a value."""
    for key in keys:
        node = written.mapping.get(key)
        if node is not None and node.value is not None:
            return node
    return None


def _switch(written: Node, *keys: str) -> Node | None:
    """The first of ``keys`` that is on."""
    for key in keys:
        node = _given(written, key)
        if node is None:
            continue
        if not isinstance(node.value, bool):
            raise PlanError(key, node.plain(), "must be true or false", origin=node.origin)
        if node.value:
            return node
    return None


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
    for key, node in written.mapping.items():
        if key in NOTED:
            harmless, assumed = NOTED[key]
            if node.plain() in harmless:
                continue
            code, problem = "argument-not-modelled", f"is not modelled: {assumed}"
        elif key in known or key.startswith("_"):
            continue
        else:
            guess = nearest(key, known)
            code, problem = "argument-unknown", "is no key that is read" + (f"; did you mean {guess}?" if guess else "")
        if strict:
            raise PlanError(key, _plain(node), f"{problem} (--strict)", origin=node.origin)
        yield Note(code, one_line(f"{key} ({node.origin}) {problem}"))


def _fields(building: Building, written: Node, names: Collection[str]) -> Iterator[Note]:
    """Sizes, and what runs the model."""
    here = written.origin
    building.put("trainer.loop", Node("transformers", here))
    if "framework" not in names:
        several = bool({"gpus", "dp"} & {*names}) and not {"gpus", "dp"} <= {*names}
        building.put("framework", Node("ddp" if several else "single", here))
        if several:
            yield Note(
                "launcher-assumed",
                "several GPUs are taken to be started by torchrun or accelerate launch, one process each (ddp); "
                "without a launcher the Trainer wraps the model in DataParallel, which is not modelled",
            )
    for key, path in FIELDS.items():
        node = _given(written, key)
        if node is None and key in DEFAULTS:
            node = Node(_scalar(DEFAULTS[key]), here)
        if node is not None:
            building.put(path, node, key)
    model = _given(written, "model_name_or_path")
    if model is not None and "model" not in names:
        building.put("model", model, "model_name_or_path")
    attention = _given(written, "attn_implementation")
    if attention is not None:
        kinds = {"eager": "eager", "sdpa": "flash", "flash_attention_2": "flash"}
        if attention.value not in kinds:
            problem = f"must be {', '.join(kinds)}"
            raise PlanError("attn_implementation", attention.plain(), problem, origin=attention.origin)
        building.put("attention", Node(kinds[str(attention.value)], attention.origin), "attn_implementation")
    if not {"gbs", "accumulation"} & {*names}:
        return
    building.items.pop("batch.accumulation", None)


def _scalar(value: object) -> str | int | float | bool | None:
    assert value is None or isinstance(value, (str, int, float, bool))
    return value


_DTYPES = {"float32": "fp32", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}


def _precision(building: Building, written: Node) -> None:
    """``bf16`` and ``fp16`` are autocast, over the dtype in which the model was loaded: fp32 if nobody says."""
    bf16, fp16 = _switch(written, "bf16"), _switch(written, "fp16")
    if bf16 is not None and fp16 is not None:
        raise PlanError("fp16", True, "must be false with bf16: there is one autocast", origin=fp16.origin)
    loaded = _given(written, "dtype", "torch_dtype")
    stored = None
    if loaded is not None and loaded.value != "auto":
        name = str(loaded.value).removeprefix("torch.")
        if name not in _DTYPES:
            raise PlanError("dtype", loaded.plain(), "must be float32, bfloat16, float16 or auto", origin=loaded.origin)
        stored = Node(_DTYPES[name], loaded.origin)
    on = bf16 or fp16
    if on is None:
        building.put("precision.dtype", stored or Node("fp32", written.origin), "dtype")
        return
    building.put("precision.dtype", Node("bf16" if bf16 is not None else "fp16", on.origin), "bf16", "fp16")
    building.put("precision.autocast", Node(True, on.origin), "bf16", "fp16")
    if stored is not None:
        building.put("precision.parameters", stored, "dtype")
    elif loaded is None or loaded.value == "auto":
        building.note(
            "loaded-dtype",
            "parameters are taken to be fp32; transformers 5 loads a checkpoint in the dtype that it was saved in: if "
            "the model was loaded so, give --autocast-parameters bf16",
        )


def _optimizer(building: Building, written: Node) -> None:
    node = _given(written, "optim") or Node(_scalar(DEFAULTS["optim"]), written.origin)
    found = OPTIMIZERS.get(str(node.value))
    if found is None:
        problem = f"is not modelled; {', '.join(OPTIMIZERS)} are"
        raise PlanError("optim", node.plain(), problem, origin=node.origin)
    for name, value in found.items():
        building.put(f"optimizer.{name}", Node(_scalar(value), node.origin), "optim")


def _recompute(building: Building, written: Node) -> Iterator[Note]:
    """``activation_checkpointing`` of every layer, not reentrant; ``gradient_checkpointing`` is its name before 5.0."""
    node = _switch(written, "activation_checkpointing", "gradient_checkpointing")
    yield from (Note(*note) for note in building.notes)
    if node is None:
        return
    settings = _given(written, "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    for key, allowed in (("use_reentrant", (False,)), ("every_n_layers", (1,)), ("offload", (False,))):
        value = settings.mapping.get(key) if settings is not None else None
        if value is not None and value.plain() not in allowed:
            problem = f"must be {str(allowed[0]).lower()}: other recompute is not modelled"
            raise PlanError(key, _plain(value), problem, origin=value.origin)
    building.put("recompute.mode", Node("full", node.origin), "activation_checkpointing", "gradient_checkpointing")


def _evaluation(building: Building, written: Node, names: Collection[str]) -> Iterator[Note]:
    """Logits are kept for ``compute_metrics`` alone, which no file shows."""
    strategy = _given(written, "eval_strategy", "evaluation_strategy")
    if strategy is None or strategy.value in ("no", False):
        return
    loss_only, steps = _switch(written, "prediction_loss_only"), _given(written, "eval_accumulation_steps")
    if loss_only is not None or "eval-batches" in names:
        return
    if steps is not None:
        building.put("trainer.evaluation_batches", steps, "eval_accumulation_steps")
        return
    yield Note(
        "evaluation-logits",
        "evaluation is taken to compute no metrics; with compute_metrics the logits of every batch stay on the device "
        "until its end: give their number as --eval-batches, or eval_accumulation_steps",
    )
