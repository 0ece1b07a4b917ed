"""The Trainer's arguments behind a training script that a shell script starts, and what its launchers say.

``torchrun``, ``deepspeed``, ``srun`` and ``accelerate launch`` in front of ``run_clm.py --model_name_or_path …``: words
are taken apart as ``HfArgumentParser`` does (``hf_argparser.py`` of transformers 5.23), where ``--bf16`` alone is true.

Every key of ``TrainingArguments`` (``training_args.py`` of transformers 5.23) and of the example scripts' model and
data arguments: which are read, refused, told, or without effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ...bash.origin import ScriptError
from ...bash.shell import read_script
from ...bash.values import Ledger, Value, is_known, origin_of, text
from ...plan.errors import Node, Origin, PlanError, refused, scalar, together
from ...values import dataclass
from ..accelerate import Accelerated, file_named
from ..accelerate_flags import configured, split_off
from ..launch import Asked
from ..launchers import MAPPINGS, RUNNERS, beside, is_trainer, training_in, unread
from ..recognised import holds_arguments
from ..settings import Given, needed, taken_apart
from ..training_scripts import with_unread
from .trl import TRAINER, Loop

READ = frozenset(
    {
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "weight_decay",
        "max_length",
        "max_seq_length",
        "model_max_length",
        "block_size",
        "max_completion_length",
        "max_prompt_length",
        "beta",
        "use_vllm",
        "vllm_mode",
        "vllm_enable_sleep_mode",
        "optim",
        "bf16",
        "fp16",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
        "attn_implementation",
        "use_flash_attention_2",
        "torch_dtype",
        "dtype",
        "eval_accumulation_steps",
        "prediction_loss_only",
        "model_name_or_path",
        "deepspeed",
        "fsdp",
        "fsdp_config",
        "use_liger_kernel",
        "liger_kernel_config",
        "packing",
        "packing_strategy",
        "padding_free",
        "use_peft",
        "lora_r",
        "lora_dropout",
        "lora_alpha",
        "precompute_ref_log_probs",
        "use_dora",
        "use_rslora",
        "lora_target_modules",
        "lora_modules_to_save",
        "lora_target_parameters",
        "load_in_4bit",
        "load_in_8bit",
        "bnb_4bit_quant_type",
        "use_bnb_nested_quant",
        "bnb_4bit_quant_storage",
    }
)
"""Keys whose values are looked at."""

REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "torch_compile": ((None, False), "compiled code saves other tensors, and is not modelled"),
        "label_smoothing_factor": ((None, 0, 0.0), "the Trainer's own loss is not modelled; the model's is"),
        "neftune_noise_alpha": ((None,), "noise on the embeddings is not modelled"),
        "parallelism_config": ((None,), "Accelerate's parallelism is not modelled around the Trainer"),
        "optim_target_modules": ((None,), "optimizers of some modules (GaLore, APOLLO) are not modelled"),
        "use_cpu": ((None, False), "there is no device then"),
        "lora_bias": ((None, "none"), "biases that are trained beside adapters are not modelled"),
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
        **dict.fromkeys(
            ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"),
            ((None, False), "Axolotl may run adapters by kernels of its own, which save less; peft's layers are taken"),
        ),
        "batch_eval_metrics": ((None, False), "logits are not kept then; leave out --eval-batches"),
        "eval_do_concat_batches": ((None, True), "logits are taken to be concatenated, batch by batch"),
    }
)
"""Keys that are not modelled and change a detail: values that do nothing, and the assumption."""

WITHOUT_EFFECT = frozenset(
    """
    output_dir overwrite_output_dir num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
    warmup_steps warmup_ratio optim_args adam_beta1 adam_beta2 adam_epsilon max_grad_norm average_tokens_across_devices
    tf32 torch_compile_backend torch_compile_mode use_cache logging_strategy logging_steps
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
    ddp_find_unused_parameters ddp_broadcast_buffers ddp_backend ddp_timeout debug skip_memory_metrics
    do_train do_eval do_predict resume_from_checkpoint local_rank dataset_name dataset_config dataset_config_name
    train_file validation_file max_train_samples max_eval_samples preprocessing_num_workers config_name tokenizer_name
    cache_dir use_fast_tokenizer model_revision token trust_remote_code overwrite_cache validation_split_percentage
    keep_linebreaks streaming use_cpu_amp fp16_backend half_precision_backend fp16_opt_level torchdynamo mp_parameters
    eval_packing lora_task_type
    dataset_num_proc dataset_mixer dataset_splits chat_template
    past_index ray_scope no_cuda use_mps_device jit_mode_eval auto_find_batch_size_ratio chat_template_path
    """.split()  # noqa: SIM905 - a list this long would be a hundred lines
)
"""Keys without effect on the memory of a training step; ``max_grad_norm`` is one, for the norm is always taken."""


@dataclass(frozen=True, slots=True)
class Started:
    """The Trainer's arguments, and what is said in front of them."""

    arguments: Node
    """A mapping."""
    folder: Path
    """What relative paths start from."""
    gpus: Node | None = None
    accelerate: Accelerated | None = None
    script: str = ""
    """Name of what is started."""
    loop: Loop = TRAINER


def started(content: str, source: str, folder: Path, asked: Asked) -> Started:
    """What the script ``content``, called ``source`` and read in ``folder``, starts."""
    try:
        reading = read_script(content.replace("\r\n", "\n"), source, asked.variables(), beside(folder))
        training = training_in(reading, source, is_trainer(holds_arguments(folder)))
    except ScriptError as error:
        raise refused(error) from None
    given, loose = taken_apart(training.words, {}, training.origin)
    wrong: list[PlanError] = []
    read = READ if asked.names & {"gpus", "dp"} else READ | {"num_processes"}
    flags = dict(_entries(given, reading.ledger, wrong, read))
    arguments = Node({**_of_file(flags, loose, folder), **flags}, training.origin)
    front = _of_launcher(training.launcher, training.origin)
    launcher = None if front is None else dict(_entries(front, reading.ledger, wrong, read))
    if wrong:
        raise with_unread(together(wrong), unread(reading))
    by_trl = any(text(word).rpartition("/")[2] == "trl" for word in training.launcher)
    return with_launcher(Started(arguments, folder, training.gpus, script=training.script), launcher, by_trl=by_trl)


def with_launcher(found: Started, launcher: Mapping[str, Node] | None = None, *, by_trl: bool = True) -> Started:
    """``found`` with what ``launcher``'s flags of Accelerate say and, with ``by_trl``, those among the arguments, which
    trl passes on."""
    arguments, passed = split_off(found.arguments) if by_trl else (found.arguments, {})
    if launcher is None and not passed:
        return found
    accelerate = configured({**(launcher or {}), **passed}, arguments, found.folder)
    return replace(found, arguments=arguments, gpus=found.gpus or accelerate.processes, accelerate=accelerate)


def _of_file(flags: dict[str, Node], loose: Sequence[Value], folder: Path) -> Mapping[str, Node]:
    """What stands in the file of arguments that is given: the one word behind the script (``HfArgumentParser``'s
    ``parse_json_file``), or ``--config`` (``TrlParser``), over which flags are."""
    named = flags.get("config")
    if named is None or not str(named.value).endswith(MAPPINGS):
        files = [word for word in loose if is_known(word) and text(word).endswith(MAPPINGS)]
        if not files:
            return {}
        named = Node(text(files[0]), origin_of(files[0], Origin("")))
    flags.pop("config", None)
    return file_named(named, folder, "config", "the Trainer's arguments").mapping


def _entries(
    given: Sequence[Given], ledger: Ledger, wrong: list[PlanError], read: Collection[str]
) -> Iterator[tuple[str, Node]]:
    """Keys and values; those of ``read`` that are not known are asked for in ``wrong``."""
    for one in given:
        name = one.name.removeprefix("--").replace("-", "_")
        unknown = next((value for value in one.values if not is_known(value)), None)
        if unknown is not None:
            if name in read:
                where = origin_of(unknown, one.origin)
                wrong.append(needed(one.name, ledger.shown(unknown), ledger.unknowns(unknown)[0], where))
            continue
        values = [scalar(text(value), origin_of(value, one.origin)) for value in one.values]
        yield name, values[0] if len(values) == 1 else Node(values or True, one.origin)


def _of_launcher(launcher: Sequence[Value], origin: Origin) -> list[Given] | None:
    """Flags of ``accelerate launch``, if that starts the training; the last word may be the command that it runs."""
    words = [text(word) for word in launcher]
    at = next((n for n, word in enumerate(words) if word.rpartition("/")[2] in _ACCELERATE), None)
    if at is None:
        return None
    return taken_apart(launcher[at + 1 : len(words) - (words[-1] in RUNNERS)], {}, origin)[0]


_ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
