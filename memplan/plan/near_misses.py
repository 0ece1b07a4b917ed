"""Flags as other tools call them: read as memplan's own, or refused with what to write here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .errors import nearest

_LENGTHS = ("max-length", "model-max-length", "cutoff-len", "sequence-len", "block-size")
"""Of trl, FastChat, LLaMA-Factory, Axolotl and transformers' examples."""

_SAME = {
    "--model": ("model-name-or-path", "model-path", "hf-model"),
    "--mbs": (
        *(
            "micro-batch-size",
            "micro-batch",
            "per-device-train-batch-size",
            "local-batch-size",
            "per-device-batch-size",
        ),
        *("per-gpu-batch-size", "train-micro-batch-size-per-gpu", "batch-size-per-gpu", "batch-size-per-device"),
    ),
    "--gbs": ("global-batch-size", "global-batch", "train-batch-size", "total-batch-size"),
    "--accumulation": (
        "gradient-accumulation-steps",
        "gradient-accumulation",
        "grad-accum",
        "accumulation-steps",
        "ga",
        "gas",
    ),
    "--seq": ("seq-len", "seq-length", "sequence-length", "max-seq-len", "max-seq-length", "context-length", *_LENGTHS),
    "--tp": (
        "tensor-parallel",
        "tensor-parallel-size",
        "tensor-model-parallel-size",
        "tensor-parallel-degree",
        "tp-size",
    ),
    "--pp": (
        "pipeline-parallel",
        "pipeline-parallel-size",
        "pipeline-model-parallel-size",
        "pipeline-parallel-degree",
        "pp-size",
    ),
    "--dp": ("data-parallel", "data-parallel-size", "dp-size"),
    "--cp": ("context-parallel", "context-parallel-size", "context-parallel-degree", "cp-size"),
    "--ep": ("expert-parallel", "expert-parallel-size", "expert-model-parallel-size", "expert-parallel-degree"),
    "--vpp": ("virtual-pipeline", "virtual-pipeline-size", "vp", "virtual-pipeline-model-parallel-size"),
    "--weight-decay": ("wd",),
    "--zero": ("zero-stage",),
    "--offload-optimizer": ("offload-optimizer-device",),
    "--offload-param": ("offload-param-device",),
    "--recompute": ("recompute-granularity",),
    "--kbit-preparation": ("prepared", "prepare-model-for-kbit-training"),
    "--sequence-parallel": ("use-sequence-parallel",),
    "--gpus": ("num-gpus", "ngpus", "n-gpus", "gpu-count", "world-size", "num-processes"),
    "--gpu": ("gpu-type", "gpu-model", "gpu-name"),
    "--layers": ("num-layers", "num-hidden-layers", "n-layers", "n-layer"),
    "--hidden": ("hidden-size", "d-model"),
    "--heads": ("num-heads", "num-attention-heads", "n-heads"),
    "--kv-heads": ("num-key-value-heads", "num-kv-heads", "num-query-groups"),
    "--ffn": ("ffn-hidden-size", "intermediate-size"),
    "--experts": ("num-experts",),
    "--expert-top-k": ("moe-router-topk",),
    "--expert-ffn": ("moe-ffn-hidden-size", "moe-intermediate-size"),
    "--expert-latent": ("moe-latent-size",),
    "--eval-mbs": (
        "per-device-eval-batch-size",
        "eval-batch-size",
        "evaluation-batch-size",
        "evaluation-batch",
        "eval-micro-batch-size",
    ),
    "--optimizer": ("optim", "optimiser"),
    "--dtype": ("torch-dtype", "params-dtype", "precision"),
    "--attention": ("attn-implementation", "attention-implementation", "attn-impl", "attn"),
    "--lora-rank": ("lora-r", "lora", "r"),
    "--lora-targets": ("lora-target-modules", "target-modules", "lora-target"),
    "--lora-alpha": ("alpha",),
    "--trainer=sft": ("sft",),
    "--trainer=dpo": ("dpo",),
    "--trainer=kto": ("kto",),
    "--trainer=orpo": ("orpo",),
    "--trainer=cpo": ("cpo",),
    "--trainer=simpo": ("simpo",),
    "--trainer=grpo": ("grpo",),
    "--trainer=rloo": ("rloo",),
    "--trainer=reward": ("reward", "reward-model"),
    "--completion-length": ("max-completion-length", "response-length", "max-response-length"),
    "--capacity": ("gpu-memory", "vram", "gpu-mem"),
    "--fsdp-replicas": ("dp-replicate", "data-parallel-replicate-degree"),
    "--modules-to-save": ("lora-modules-to-save",),
    "--use-dora": ("dora", "lora-use-dora"),
    "--use-rslora": ("rslora", "lora-use-rslora"),
    "--quantisation": ("bnb-4bit-quant-type",),
    "--quantisation=nf4": ("load-in-4bit",),
    "--double-quantisation": ("bnb-4bit-use-double-quant", "use-bnb-nested-quant"),
    "--compute-dtype": ("bnb-4bit-compute-dtype",),
    "--quant-storage": ("bnb-4bit-quant-storage", "bnb-4bit-quant-storage-dtype"),
    "--kernels=liger": ("liger", "use-liger-kernel", "use-liger"),
    "--vocab-multiple": ("make-vocab-size-divisible-by",),
    "--activation=swiglu": ("swiglu",),
    "--rotary-fraction": ("rotary-percent", "partial-rotary-factor"),
    "--positions-max": ("max-position-embeddings", "max-positions"),
    "--no-tied-embeddings": ("untie-embeddings-and-output-weights", "untie-embeddings"),
    "--tied-embeddings": ("tie-word-embeddings", "tie-embeddings"),
    "--norm": ("normalization", "normalisation"),
}
"""What other tools call a flag of memplan, where it cannot be anything else: read as that flag."""

_MEANT = {
    "--model": ("config",),
    "--mbs": ("batch-size", "bs", "bsz", "batch", "micro-bs"),
    "--seq": ("context", "ctx", "ctx-len", "context-size", "max-tokens", "tokens-per-sequence"),
    "--pp": ("stages",),
    "--vpp": ("interleave",),
    "--zero 1": ("zero1",),
    "--zero 2": ("zero2",),
    "--zero 3": ("zero3", "zero3-init"),
    "--zero": ("deepspeed-stage", "stage"),
    "--fp8 delayed, tensorwise, blockwise or mxfp8": ("use-fp8", "enable-fp8", "fp8-training", "float8"),
    "--sequence-parallel": ("sp",),
    "--gpus": ("num-devices", "devices"),
    "--gpu": ("device", "accelerator"),
    "--capacity": ("memory", "max-memory"),
    "--gpus (all that shard or replicate)": ("dp-shard", "data-parallel-shard-degree", "fsdp-size"),
    "--fsdp-replicas": ("hsdp", "hybrid-shard"),
    "--hidden": ("dim",),
    "--activation": ("hidden-act", "act", "hidden-activation"),
    "--heads": ("attention-heads",),
    "--hidden-dropout": ("dropout",),
    "--latent-kv-rank": ("mla", "multi-latent-attention"),
    "--optimizer adamw": ("adamw", "adam"),
    "--optimizer sgd": ("sgd",),
    "--optimizer adam8bit": ("adam-8bit", "8bit-adam", "use-8bit-optimizer", "use-8bit-adam", "8bit-optimizer"),
    "--offload-modules (megatron)": ("activation-offloading", "offload-activations", "cpu-offloading"),
    "--seq (prompt and completion)": ("prompt-length", "max-prompt-length"),
    "--vocab": ("vocabulary", "vocab-size"),
    "--experts": ("moe",),
    "--expert-top-k": ("top-k",),
    "--tp or --pp": ("parallel", "parallelism", "model-parallel", "model-parallel-size", "mp"),
    "--dtype bf16": ("bf16", "bfloat16"),
    "--dtype fp16": ("fp16", "half"),
    "--dtype fp32": ("fp32", "float32"),
    "--autocast": ("amp", "use-amp"),
    "--recompute full": (
        "ac",
        *("gradient-checkpointing", "activation-checkpointing", "checkpoint-activations"),
        *("grad-ckpt", "grad-checkpoint", "grad-checkpointing", "gradient-checkpoint", "ckpt", "checkpointing"),
    ),
    "--recompute selective": ("recompute-activations", "selective-recompute"),
    "--recompute none": ("no-recompute", "no-gradient-checkpointing", "no-activation-checkpointing"),
    "--framework megatron --zero 1": ("use-distributed-optimizer", "distributed-optimizer"),
    "--attention": ("attention-backend-name",),
    "--attention sdpa": ("sdpa", "use-sdpa"),
    "--attention flash": ("flash", "flash-attention", "flash-attn", "use-flash-attn", "use-flash-attention"),
    "--lora-rank": ("rank", "peft", "use-lora"),
    "--lora-rank 16, or nothing to train all parameters": (
        *("method", "tuning", "finetuning-type", "train-type", "tuner-type", "peft-type", "adapter"),
    ),
    "--quantisation nf4": ("4bit", "nf4"),
    "--quantisation nf4 --lora-rank 16": ("qlora", "q-lora"),
    "--fsdp-offload (fsdp) or --offload-optimizer cpu (deepspeed)": ("cpu-offload", "offload", "offload-to-cpu"),
    "--trainer dpo": ("rlhf",),
    "--framework fsdp": ("fsdp", "fsdp2", "fully-shard"),
    "--framework fsdp1": ("fsdp1",),
    "--framework ddp": ("ddp",),
    "--framework megatron": ("megatron",),
    "--framework deepspeed, or its ds_config.json beside PLAN": ("deepspeed", "deepspeed-config", "ds-config"),
    "Accelerate's file beside PLAN": ("config-file", "accelerate-config", "fsdp-config"),
    "memplan explain 'MESSAGE'": ("oom", "oom-message", "out-of-memory", "error"),
    "--framework": ("engine", "backend", "strategy", "distributed"),
    "--headroom": ("reserve", "margin"),
}
"""What may be meant by a flag that memplan has not, and what to write for it: a guess, which is offered."""

_CHECKPOINTS = tuple(name for name in _MEANT["--recompute full"] if name != "ac")
_OFF = ("false", "no", "off", "0", "none")
_VALUED = {
    "--attention flash_attention_2": ("flash-attn 2", "flash-attention 2", "flash 2"),
    "--attention flash_attention_3": ("flash-attn 3", "flash-attention 3", "flash 3"),
    "--recompute none": tuple(f"{name} {off}" for name in (*_CHECKPOINTS, "ac") for off in _OFF),
    "--framework ddp": ("fsdp no_shard",),
    "--framework fsdp --no-reshard-after-forward": ("fsdp shard_grad_op",),
    "--framework fsdp --fsdp-replicas N": ("fsdp hybrid_shard",),
    "--framework fsdp --fsdp-offload": ("fsdp offload", "fsdp cpu-offload", "fsdp cpu_offload"),
    **{f"--framework deepspeed --zero {n}": (f"deepspeed zero{n}", f"deepspeed stage{n}") for n in range(4)},
}
"""What is meant by such a flag with a value behind it, where that says more."""

BESIDE: Mapping[str, str] = {"--autocast": "dtype"}
"""Switches, and the field whose value others write behind them."""

_MIXED = (
    "is no flag: fsdp, deepspeed and megatron keep fp32 main parameters by themselves, with --dtype bf16 or fp16; in "
    "single and ddp fp32 parameters with compute in 16 bits are --autocast --dtype bf16 or fp16"
)

OTHER_EXPERTS = (
    "experts that run one after the other (eager), on gathered weights (batched_mm) or on other kernels are not "
    "modelled"
)
"""What is said of values of transformers' ``experts_implementation``."""

NOT_MODELLED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "--ppo",
            "--gkd",
            "--online-dpo",
            "--xpo",
            "--nash-md",
            "--bco",
        ),
        "is not modelled of trl's trainers: --trainer sft, dpo, kto, orpo, cpo, simpo, grpo, rloo and reward are",
    ),
    "--experts-implementation": f"is no flag: experts run as transformers takes by itself, grouped_mm; {OTHER_EXPERTS}",
    "--recipe": "names a recipe of Megatron-Bridge as its checkout does, such as "
    "llama3_8b_pretrain_2gpu_h100_bf16_config; every name ends in _config",
    "--mixed-precision": _MIXED,
    "--unsloth": "Unsloth's own runs are not modelled: its layers and its offloaded checkpoints are code of its own; "
    "--kernels fms is fms-acceleration's set of its kernels",
    **dict.fromkeys(
        ("--packing", "--pack", "--padding-free", "--group-by-length"),
        "is no flag: rows are assumed to be full, as packing fills them (--seq), unless --padding says otherwise; "
        "padding-free rows take --attention flash_attention_2",
    ),
    **dict.fromkeys(
        ("--load-in-8bit", "--8bit", "--int8"),
        "bitsandbytes' 8-bit weights (LLM.int8) are --quantisation int8, under adapters (--lora-rank 16)",
    ),
    **dict.fromkeys(
        ("--lora-bias", "--bias"), "biases that are trained beside adapters are not modelled; peft's default is none"
    ),
    **dict.fromkeys(
        ("--image-size", "--num-frames", "--vision"), "vision towers are not modelled: models that read only text are"
    ),
    **dict.fromkeys(
        ("--sharding-strategy", "--fsdp-sharding-strategy", "--shard-strategy", "--sharding"),
        "is --framework fsdp: FULL_SHARD as it is, SHARD_GRAD_OP with --no-reshard-after-forward, HYBRID_SHARD with "
        "--fsdp-replicas N; NO_SHARD is --framework ddp",
    ),
    **dict.fromkeys(
        (
            *("--ulysses", "--ulysses-size", "--ulysses-degree", "--sequence-parallel-size", "--sp-size"),
            *("--ring-attention", "--ring-degree"),
        ),
        "DeepSpeed-Ulysses, ring attention and the like are not modelled; megatron's --cp N exchanges as a ring, with "
        "--cp-communication a2a as Ulysses does",
    ),
    **dict.fromkeys(
        ("--tokens", "--num-tokens", "--batch-tokens"),
        "is no flag: tokens of a sequence are --seq, sequences of a step are --gbs",
    ),
    **dict.fromkeys(
        ("--inference", "--infer", "--serve", "--serving", "--generate", "--kv-cache", "--max-new-tokens"),
        "inference is not modelled: memplan plans training",
    ),
    **dict.fromkeys(
        ("--params", "--parameters", "--num-params", "--model-size", "--n-params"),
        "a number of parameters says too little: name a --model (memplan models), with --layers, --hidden, "
        "--heads and others over its own",
    ),
}
"""Flags of what memplan does not do yet, and what to say of it."""

SHORT: Mapping[str, str] = {
    "-m": "--model", "-g": "--gpu", "-n": "--gpus", "-b": "--mbs", "-s": "--seq", "-d": "--dtype", "-f": "--framework",
    "-l": "--layers", "-z": "--zero", "-j": "--json", "-c": "--compare", "-bs": "--mbs", "-opt": "--optimizer",
}  # fmt: skip
"""What may be meant by one letter."""

CHANGES_NOTHING = frozenset(
    f"--{name}"
    for name in (
        *("learning-rate", "lr", "min-lr", "warmup-steps", "warmup-ratio", "logging-steps"),
        *("lr-scheduler-type", "max-steps", "train-iters", "num-train-epochs", "epochs", "seed"),
        *("completion-only-loss", "assistant-only-loss", "train-on-inputs", "train-on-prompt", "mask-prompt"),
        *("finetune", "full-finetune", "full-finetuning", "full-fine-tuning", "full", "full-ft"),
        *("num-generations", "temperature", "top-p"),
        *("dataset", "dataset-name", "output-dir", "rope-theta", "rotary-base", "rope-scaling", "rope-base"),
    )
)
"""Flags of other tools that no tensor's size depends on: read, told and left out."""

FILES = tuple(f"--{name}" for name in ("config", "config-file", "accelerate-config", "deepspeed", "deepspeed-config"))
"""What launchers call a file of settings, which is one of PLAN here."""
NODES = ("--nodes", "--nnodes", "--num-nodes", "--num-machines")
PER_NODE = ("--gpus-per-node", "--nproc-per-node", "--gpus-per-machine", "--ntasks-per-node")
"""What launchers call the number of nodes, and of GPUs of each: of both follows ``--gpus``."""

MEANT: Mapping[str, str] = {f"--{name}": flags for flags, names in _MEANT.items() for name in names}
"""By the flag that was written."""

VALUED: Mapping[str, str] = {f"--{said}": flags for flags, all_said in _VALUED.items() for said in all_said}
"""By the flag that was written, and its value."""

SAME: Mapping[str, str] = {
    **{f"--{name}": flag for flag, names in _SAME.items() for name in names},
    **{
        f"--{prefix}{name.replace('isation', 'ization')}": f"--{prefix}{name}"
        for name in ("quantisation", "double-quantisation")
        for prefix in ("", "no-")
    },
}
"""Other tools' names, and American spellings, to the flags as which they are read."""


def called(name: str) -> str:
    """The field that a word of ``--vary`` or ``--fix`` names: by its flag, or by what other tools call that."""
    name = name.strip().removeprefix("--").replace("_", "-")
    same = SAME.get(f"--{name}", "")
    return same[2:] if same and "=" not in same else name


def likely(flag: str, known: Iterable[str]) -> str | None:
    """What was probably meant by ``flag``, which is none of ``known``: one of them, or what other tools call one."""
    elsewhere, known = {**SHORT, **MEANT, **SAME}, tuple(known)
    name = flag.replace("_", "-").lstrip("-")
    if flag in elsewhere or f"--{name}" in elsewhere:
        return elsewhere.get(flag) or elsewhere[f"--{name}"]
    if f"--{name}" in known:
        return f"--{name}"
    called = nearest(name, [other[2:] for other in elsewhere if other.startswith("--")], cutoff=0.85)
    if called is not None:
        return " or ".join(dict.fromkeys(elsewhere[f"--{one}"] for one in called.split(" or ")))
    found = nearest(name, [other[2:] for other in known if other.startswith("--")])
    return " or ".join(f"--{one}" for one in found.split(" or ")) if found is not None else None
