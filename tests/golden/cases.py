"""The command lines of the safety net. Models are cut to few layers where depth teaches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
EXAMPLES = (
    "bert-5.1b-zero3", "bigscience-104b-250k", "gpt2-xl-4gpu", "gpt2-xl-8gpu", "llama-3-405b-1024gpu", "llama-3-8b",
)  # fmt: skip
SPECS = (
    "bert-5.1b", "bert-large", "bigscience-104b", "bigscience-104b-250k", "bloom-176b", "falcon-7b", "gemma-2-9b",
    "gpt-j-6b", "gpt-neox-20b", "gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl", "gpt3-175b", "llama-2-70b", "llama-2-7b",
    "llama-3-405b", "llama-3-70b", "llama-3-8b", "megatron-1t", "megatron-22b", "megatron-530b", "mistral-7b", "opt-30b",
    "opt-6.7b", "phi-3-mini", "qwen2.5-72b", "qwen2.5-7b", "qwen3-32b", "qwen3-8b",
)  # fmt: skip
HUGGING_FACE = (
    "gpt2", "bert-large", "bloom-176b", "llama-3-8b", "mistral-7b", "qwen3-8b", "qwen2.5-7b", "phi-3-mini",
    "gemma-2-9b", "opt-6.7b", "gpt-neox-20b", "gpt-j-6b", "falcon-7b", "mixtral-8x7b", "qwen3-30b-a3b",
    "deepseek-v2", "moonlight-16b",
)  # fmt: skip
"""A model of each family that transformers runs."""
OPTIMIZERS = (
    "sgd",
    "sgd --momentum 0.9",
    "adam",
    "adamw",
    "adam8bit",
    "adafactor",
    "lion",
    "lion8bit",
    "muon",
    "ao_adamw_8bit",
    "ao_adamw_4bit",
)
IMPLEMENTATIONS = ("foreach", "for-loop", "fused", "apex", "bitsandbytes", "transformers")
EXPANDABLE = "--env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
ALLOCATOR = (
    EXPANDABLE,
    "--env PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64",
    "--env PYTORCH_ALLOC_CONF=roundup_power2_divisions:8",
    "--env PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:0.8",
    "--env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "--env CUBLAS_WORKSPACE_CONFIG=:16:8",
    "--env PYTORCH_NO_CUDA_MEMORY_CACHING=1",
    "--env CUDA_DEVICE_MAX_CONNECTIONS=1 --env NCCL_NVLS_ENABLE=0",
)


def commands() -> list[str]:
    """All of them, once each."""
    return list(dict.fromkeys([*estimates(), *others(), *searches()]))


def estimates() -> Iterator[str]:
    for part in (
        examples, families, plain, optimizers, tuned, losses, trainer, autocast, ddp, deepspeed, device_map, fsdp,
        torchtitan, megatron, adapters, low_precision, experts, pipelines, megatron_deepspeed, allocators, refused,
        learned,
    ):  # fmt: skip
        for flags in part():
            yield f"estimate {flags}"


def learned() -> Iterator[str]:
    """Models that ship as traces found them."""
    for name in ("phi-2", "olmo-7b"):
        yield f"--model {name} --gpu h100 --seq 2048"
        yield f"--model {name} --gpu h100 --seq 2048 --framework ddp --gpus 8 --recompute full"
        yield f"--model {name} --gpu h100 --seq 2048 --framework fsdp --gpus 8 --gbs 32"
        yield f"--model {name} --gpu h100 --seq 2048 --framework fsdp --gpus 8 --fsdp-version 1"
        yield f"--model {name} --gpu h100 --seq 2048 --framework deepspeed --zero 2 --gpus 8"
    for name in ("phi-2", "smollm3-3b"):  # the latter has a recipe
        yield f"--model {name} --gpu h100 --seq 2048 --framework deepspeed --zero 3 --gpus 8 --recompute full"
    yield (
        "--model smollm3-3b --gpu h100 --seq 2048 --framework deepspeed --zero 3 --gpus 8 --recompute full "
        "--offload-optimizer cpu --offload-param cpu"
    )
    for more in ("", " --framework ddp --gpus 4"):
        yield f"--model gemma-3-1b --gpu h100 --seq 512 --gbs 32 --trainer transformers{more}"
    yield "--model gpt-oss-20b --gpu h100 --seq 2048 --trainer sft --router-aux-loss 0 --lora-rank 8 --lora-targets all-linear --recompute full"
    yield "--model gemma-2b --gpu h100 --lora-rank 16"
    yield "--model gemma-2b --gpu h100 --lora-rank 16 --quantisation nf4"
    for framework in ("fsdp", "deepspeed --zero 2", "deepspeed --zero 3", "fsdp --fsdp-version 1"):
        yield f"--model gemma-2b --gpu h100 --lora-rank 16 --framework {framework} --gpus 4"
    yield "--model gemma-2b --gpu h100 --lora-rank 16 --quantisation gptq --dtype fp16"
    for name, rank in (("olmo-7b", 4), ("stablelm-2-1.6b", 256), ("whisper-small", 32)):
        yield f"--model {name} --gpu h100 --lora-rank {rank} --lora-targets q_proj,v_proj --recompute full"


def examples() -> Iterator[str]:
    yield from EXAMPLES
    for name in SPECS:
        yield f"--model {name} --gpu h200"
    yield "bigscience-104b-250k --mbs 8"
    yield "bigscience-104b-250k --gpus 256 --zero 1"
    yield "bigscience-104b-250k --loss adaptive-softmax"
    yield "bigscience-104b-250k --optimizer adam8bit"
    yield "gpt2-xl-4gpu --no-multiply-by-visible-gpus"
    yield "llama-3-405b-1024gpu --recompute full"
    yield "llama-3-8b --gpu h100-80gb --recompute full"
    yield "bert-5.1b-zero3 --zero 1"
    yield "bert-5.1b-zero3 --zero 2"
    yield "bert-5.1b-zero3 --stage3-prefetch-bucket-size 0"


def families() -> Iterator[str]:
    """Every family in every framework of one device or more that runs transformers' code."""
    for model in HUGGING_FACE:
        job = f"--model {model} --layers 3 --seq 512 --gpu a100-80gb"
        for dtype, attention, recompute in (
            ("fp32", "eager", "none"),
            ("bf16", "flash", "none"),
            ("bf16", "eager", "full"),
            ("fp16", "flash", "full"),
        ):
            if attention == "flash" and model in ("gemma-2-9b",):
                attention = "eager"
            yield f"{job} --dtype {dtype} --attention {attention} --recompute {recompute} --mbs 2"
        yield f"{job} --framework ddp --gpus 4 --dtype bf16"
        yield f"{job} --framework fsdp --gpus 8 --dtype bf16 --recompute full"
        yield f"{job} --framework fsdp --gpus 4 --dtype bf16 --fsdp-parameters fp32 --fsdp-reduce fp32"
        yield f"{job} --framework deepspeed --zero 3 --gpus 8 --dtype bf16"
        yield f"{job} --framework deepspeed --zero 2 --gpus 8 --dtype fp16 --recompute full"
        yield f"{job} --framework device-map --gpus 3 --dtype bf16"
        yield f"{job} --dtype bf16 --lora-rank 8"


def plain() -> Iterator[str]:
    for model in ("gpt2", "llama-3-8b"):
        job = f"--model {model} --layers 4 --framework single"
        for mbs, seq in ((1, 128), (3, 1000), (8, 1024)):
            yield f"{job} --mbs {mbs} --seq {seq} --dtype bf16 --gpu h100-80gb"
        yield f"{job} --seq 1024 --gbs 8 --mbs 2 --dtype bf16"
        yield f"{job} --seq 1024 --recompute full --recompute-method block --recompute-layers 2 --dtype bf16"
        yield f"{job} --seq 1024 --gradients fp32 --dtype fp32 --torch 2.6"
        yield f"{job} --seq 1024 --capacity 8GiB --headroom 1GiB"
        yield f"{job} --seq 1024 --gpu v100-16gb --headroom 5% --dtype fp16"
    yield "--model gpt2-medium --code 2020 --dtype fp32 --attention eager --seq 1024"
    yield "--model gpt2-medium --code 2020 --dtype fp16 --attention eager --seq 512 --recompute full"
    yield "--model gpt2 --hidden 256 --heads 8 --ffn 1000 --vocab 3001 --layers 2 --seq 100"
    yield "--model llama-3-8b --layers 2 --kv-heads 2 --qk-norm --tied-embeddings --seq 512"
    yield "--model gpt2 --activation gelu --embedding-dropout 0 --attention-dropout 0 --hidden-dropout 0 --seq 512"
    yield "--model mistral-7b --layers 2 --sliding-window 256 --seq 1024 --dtype bf16"
    yield "--model gemma-2-9b --layers 4 --seq 8192 --dtype bf16 --recompute full"


def optimizers() -> Iterator[str]:
    """Every optimizer and implementation in every framework that has them; the rest is refused."""
    jobs = (
        "--model gpt2 --layers 3 --seq 256 --dtype bf16 --framework single",
        "--model llama-3-8b --layers 2 --seq 256 --dtype bf16 --framework ddp --gpus 4",
        "--model llama-3-8b --layers 2 --seq 256 --dtype bf16 --framework ddp --zero 1 --gpus 4",
        "--model llama-3-8b --layers 2 --seq 256 --dtype bf16 --framework fsdp --gpus 4",
        "--model llama-3-8b --layers 2 --seq 256 --dtype bf16 --framework deepspeed --zero 2 --gpus 4",
        "--model llama-3-8b --layers 2 --seq 256 --dtype fp16 --framework deepspeed --zero 3 --gpus 4",
        "--model llama-3-8b --layers 2 --seq 256 --dtype bf16 --framework megatron --tp 2 --dp 2",
        "--model bigscience-104b --layers 4 --seq 256 --dtype fp16 --framework megatron-deepspeed --tp 4 --pp 2 --dp 2",
        "--model gpt2 --layers 4 --seq 256 --dtype bf16 --framework device-map --gpus 2",
    )
    for job in jobs:
        for optimizer in OPTIMIZERS:
            yield f"{job} --optimizer {optimizer}"
    for implementation in IMPLEMENTATIONS:
        for optimizer in ("adamw", "sgd", "adafactor"):
            yield f"{jobs[0]} --optimizer {optimizer} --optimizer-implementation {implementation}"
        yield f"{jobs[3]} --optimizer adamw --optimizer-implementation {implementation}"
    yield f"{jobs[0]} --optimizer adam8bit --optimizer-block-size 2048 --no-embeddings-32bit"
    yield f"{jobs[0]} --optimizer adam8bit --paged-optimizer"
    yield "--model gpt2 --layers 3 --seq 256 --framework deepspeed --zero 2 --gpus 4 --optimizer paged_adamw_8bit"
    yield f"{jobs[0]} --optimizer adamw --optimizer-implementation bitsandbytes --paged-optimizer"
    for optimizer in ("adam8bit", "paged_adamw_8bit", "lion"):
        yield f"--model llama-3-8b --seq 2048 --framework fsdp --fsdp-version 1 --gpus 8 --optimizer {optimizer}"
    yield "--model deepseek-v2-lite --seq 512 --framework fsdp --fsdp-version 1 --gpus 8"
    yield f"{jobs[6]} --zero 1 --precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16"
    yield f"{jobs[6]} --zero 1 --precision-aware-optimizer --main-params-dtype fp16"


def tuned() -> Iterator[str]:
    """LoRA, QLoRA, frozen layers."""
    for model in ("llama-3-8b", "gpt2", "opt-6.7b", "gpt-neox-20b"):
        job = f"--model {model} --layers 3 --seq 512 --dtype bf16 --mbs 2"
        yield f"{job} --lora-rank 16 --lora-targets all-linear --lora-dropout 0.1"
        yield f"{job} --lora-rank 16 --lora-targets all-linear --quantisation nf4 --double-quantisation --recompute full"
        yield f"{job} --lora-rank 16 --lora-targets all-linear --lora-dropout 0.1 --recompute full --autocast"
        yield f"{job} --freeze-embedding --freeze-layers 2"
    for loop in ("dpo", "grpo --completion-length 192 --generation-memory 10GiB --keeps-reference"):
        yield f"--model llama-3-8b --layers 3 --seq 512 --dtype bf16 --gpu a100-80gb --mbs 2 --trainer {loop}"
        yield f"--model llama-3-8b --layers 3 --seq 512 --framework deepspeed --zero 3 --gpus 8 --trainer {loop}"
    yield "--model llama-3-8b --layers 3 --framework deepspeed --zero 3 --gpus 8 --trainer dpo --lora-rank 8 --recompute full"
    whole = "--model llama-3-8b --layers 3 --seq 512 --dtype bf16 --mbs 2 --trainer llama-factory-dpo"
    yield f"{whole} --gpu a100-80gb"
    yield f"{whole} --autocast --autocast-parameters bf16 --framework ddp --gpus 4 --lora-rank 8 --recompute full"
    dpo = "--model llama-3-8b --layers 3 --seq 512 --dtype bf16 --mbs 2 --trainer dpo --gpus 8 --framework fsdp"
    for version in (1, 2):
        yield f"{dpo} --fsdp-version {version}"
        yield f"{dpo} --fsdp-version {version} --eval-mbs 4"
        yield f"{dpo} --fsdp-version {version} --lora-rank 8 --recompute full"
    yield f"{dpo} --gbs 64 --no-gradient-sync --no-reshard-after-forward"
    sft = "--model llama-3-8b --layers 3 --seq 512 --dtype bf16 --mbs 2 --trainer sft"
    yield f"{sft} --gpu a100-80gb --eval-mbs 8"
    yield f"{sft} --autocast --recompute full --lora-rank 8"
    for sharded in ("deepspeed --zero 2", "deepspeed --zero 3", "fsdp", "fsdp --fsdp-version 1", "ddp"):
        yield f"{sft} --gpus 8 --framework {sharded} --recompute full"
    reward = "--model qwen2.5-1.5b --layers 3 --seq 512 --dtype bf16 --mbs 2 --trainer reward"
    yield f"{reward} --gpu a100-80gb"
    yield f"{reward} --autocast --recompute full --lora-rank 8 --modules-to-save score"
    for sharded in ("deepspeed --zero 2", "deepspeed --zero 3", "fsdp", "fsdp --fsdp-version 1", "ddp"):
        yield f"{reward} --gpus 8 --framework {sharded} --recompute full"
    labels = "--model qwen2.5-1.5b --layers 3 --seq 512 --dtype bf16 --mbs 4 --labels 2"
    yield f"{labels} --trainer transformers --autocast --lora-rank 8 --modules-to-save score"
    yield f"{labels} --trainer transformers --gpu a100-80gb --eval-batches 4"
    for sharded in ("deepspeed --zero 2", "deepspeed --zero 3", "fsdp", "fsdp --fsdp-version 1", "ddp"):
        yield f"{labels} --gpus 8 --framework {sharded} --recompute full"
    yield "--model bert-base --labels 1 --mbs 32 --seq 128 --trainer transformers --autocast"
    yield "--model bert-base --labels 2 --mbs 32 --seq 128 --lora-rank 8 --modules-to-save classifier"
    yield "--model gemma-2-9b --mbs 1 --seq 2048 --attention flash_attention_2 --recompute full"
    yield "--model bert-base --labels 3 --mbs 32 --seq 128 --gpus 2 --framework ddp --trainer transformers"
    job = "--model llama-3-8b --layers 3 --seq 512 --dtype bf16 --lora-rank 8"
    yield f"{job} --lora-targets q_proj,v_proj --lora-dtype bf16"
    yield f"{job} --quantisation fp4 --compute-dtype fp32 --kbit-preparation"
    yield f"{job} --quantisation nf4 --kbit-preparation --recompute full --optimizer adamw --paged-optimizer"
    yield f"{job} --quantisation nf4 --kbit-preparation --recompute full --autocast --versions transformers=4.48.1,trl=0.13.0"
    yield f"{job} --recompute full --framework fsdp --fsdp-version 1 --gpus 4 --versions transformers=4.48.1"
    yield f"{job} --attention flash_attention_3 --versions transformers=4.57.1,peft=0.17.1"
    yield f"{job} --attention flash_attention_4 --gpu b200"
    yield f"{job} --kernels liger --recompute full"
    fused = "--lora-targets q_proj,k_proj,v_proj,o_proj --lora-dropout 0.1 --kernels fms --autocast"
    yield f"{job} {fused} --quantisation nf4 --double-quantisation --versions transformers=4.45.2 --recompute full"
    awq = "--quantisation awq --dtype fp16 --lora-targets q_proj,v_proj --versions transformers=4.57.6,peft=0.18.1"
    yield f"{job} {awq}"
    yield f"{job} {awq} --mbs 4 --recompute full --framework ddp --gpus 2 --no-broadcast-buffers"
    yield f"{job} {awq} --framework fsdp --gpus 2"
    yield f"{job} {fused} --quantisation gptq --dtype fp16 --framework fsdp --fsdp-version 1 --gpus 4 --recompute full"
    ahead = f"{job} {fused} --framework fsdp --fsdp-version 1 --gpus 4 --gpu a100-80gb --torch 2.4.1 --recompute full"
    yield f"{ahead} --quantisation nf4 --double-quantisation"
    yield f"{ahead} --quantisation gptq --dtype fp16 --env CUDA_MODULE_LOADING=LAZY"
    yield f"{job} --quantisation gptq --dtype fp16 --framework ddp --gpus 2 --loss liger --liger-version 0.4.2"
    yield f"{job} --quantisation nf4 --optimizer adam8bit --loss liger"
    yield f"{job} --quantisation int8"
    yield f"{job} --quantisation int8 --kbit-preparation --recompute full --framework ddp --gpus 2"
    yield f"{job} --quantisation int8 --kbit-preparation --recompute full --use-reentrant"
    yield f"{job} --quantisation int8 --framework fsdp --gpus 2"
    yield f"{job} --lora-targets embed_tokens,lm_head,q_proj"
    yield f"{job} --lora-targets embed_tokens,lm_head --framework fsdp --gpus 2"
    experts = "--lora-rank 8 --lora-target-parameters experts.gate_up_proj,experts.down_proj"
    yield f"--model mixtral-8x7b --layers 3 --seq 512 --dtype bf16 {experts} --recompute full"
    yield f"--model mixtral-8x7b --layers 3 --seq 512 --dtype bf16 {experts} --framework ddp --gpus 2"
    yield f"--model llama-4-scout --layers 4 --seq 512 {experts} --lora-targets q_proj,v_proj"
    yield f"{job} --framework ddp --gpus 4"
    yield f"{job} --framework ddp --gpus 4 --quantisation nf4"
    yield f"{job} --framework fsdp --gpus 4"
    yield f"{job} --framework deepspeed --zero 2 --gpus 4"
    yield f"{job} --framework deepspeed --zero 3 --gpus 4"
    yield f"{job} --framework device-map --gpus 2"
    yield f"{job} --autocast"


def losses() -> Iterator[str]:
    for kind in ("plain", "vocab-parallel", "adaptive-softmax", "liger", "cut", "chunked"):
        yield f"--model llama-3-8b --layers 2 --seq 1024 --dtype bf16 --mbs 4 --loss {kind}"
        yield f"--model llama-3-8b --layers 2 --seq 1024 --dtype bf16 --framework fsdp --gpus 4 --loss {kind}"
        yield (
            f"--model llama-3-8b --layers 2 --seq 1024 --dtype bf16 --framework fsdp --fsdp-code torchtitan --gpus 4 "
            f"--loss {kind}"
        )
        yield f"--model gpt2 --layers 4 --seq 1024 --dtype bf16 --framework megatron --tp 2 --loss {kind}"
        yield f"--model bigscience-104b --layers 4 --seq 1024 --framework megatron-deepspeed --tp 4 --pp 2 --loss {kind}"
    job = "--model llama-3-8b --layers 2 --seq 1024 --dtype bf16 --mbs 4"
    yield f"{job} --loss liger --loss-fp32-accumulators"
    yield f"{job} --loss cut --loss-fp32-accumulators"
    yield f"{job} --loss liger --framework deepspeed --zero 3 --gpus 8"
    yield f"{job} --logits-to-keep 16"
    yield "--model gpt2 --seq 1024 --loss adaptive-softmax --cutoffs 10000,30000 --div-value 2 --framework megatron-deepspeed"


def trainer() -> Iterator[str]:
    job = "--model llama-3-8b --layers 3 --seq 512 --trainer transformers"
    yield f"{job} --autocast --dtype bf16"
    yield f"{job} --autocast --dtype fp16 --eval-mbs 16"
    yield f"{job} --dtype bf16 --eval-batches 4 --eval-mbs 8 --gbs 8"
    yield f"{job} --dtype fp32 --optimizer adafactor"
    yield f"{job} --framework ddp --gpus 4 --autocast --dtype bf16 --find-unused-parameters"
    yield f"{job} --framework deepspeed --zero 2 --gpus 4 --dtype bf16 --gbs 16"
    yield f"{job} --framework deepspeed --zero 3 --gpus 4 --dtype bf16 --param-groups decay"
    yield f"{job} --framework fsdp --gpus 4 --dtype bf16"
    yield f"{job} --lora-rank 8 --quantisation nf4 --dtype bf16 --recompute full"
    yield "--model gpt2 --layers 3 --seq 512 --trainer transformers --framework device-map --gpus 2"
    yield "--model gpt-neox-20b --layers 3 --seq 512 --trainer transformers --dtype bf16"
    compiled = "--framework single --torch-compile --seq 4096"
    yield f"--model llama-3.2-1b {compiled} --mbs 2 --gbs 8"
    yield f"--model llama-3-8b {compiled} --trainer transformers --autocast"
    yield f"--model llama-3-8b {compiled} --trainer transformers --autocast --recompute full"
    yield f"--model llama-3-8b {compiled} --mbs 7"
    yield "--model llama-3-8b --framework ddp --gpus 2 --torch-compile"
    yield f"--model llama-3-8b {compiled} --trainer transformers --autocast --autocast-parameters bf16"
    replicas = "--model llama-3.2-1b --framework ddp --gpus 8 --torch-compile --seq 4096"
    yield f"{replicas} --mbs 2 --gbs 64 --ddp-gradient-sync false"
    yield f"{replicas} --mbs 2 --gradient-as-bucket-view"
    yield f"{replicas} --trainer transformers --autocast --autocast-parameters bf16 --gbs 16"
    for more in ("", " --compile-regions", " --recompute full", " --recompute full --compile-regions"):
        yield f"--model llama-3-8b --framework fsdp --gpus 8 --torch-compile --seq 4096{more}"
    preference = "--model llama-3-8b --layers 3 --seq 512 --dtype bf16 --mbs 2 --gpus 4"
    for trl in ("0.12.2", "0.17", "0.24", "1.13"):
        yield f"{preference} --trainer dpo --framework fsdp --versions trl={trl}"
    for trl in ("0.18.2", "0.24", "1.13"):
        grpo = f"{preference} --trainer grpo --completion-length 256 --versions trl={trl}"
        yield f"{grpo} --framework deepspeed --zero 2"


def autocast() -> Iterator[str]:
    for model in HUGGING_FACE:
        yield f"--model {model} --layers 2 --seq 256 --autocast --dtype bf16 --mbs 2"
    job = "--model llama-3-8b --layers 2 --seq 256 --autocast"
    yield f"{job} --dtype bf16 --autocast-parameters bf16"
    yield f"{job} --dtype fp16 --recompute full"
    yield f"{job} --dtype bf16 --framework ddp --gpus 2 --gradient-as-bucket-view"
    yield f"{job} --dtype bf16 --framework device-map --gpus 2"
    yield f"{job} --dtype bf16 --gbs 8 --mbs 2 --recompute full"


def ddp() -> Iterator[str]:
    job = "--model gpt2-medium --seq 512 --dtype bf16 --framework ddp --gpus 4"
    for flags in (
        "", "--gradient-as-bucket-view", "--static-graph", "--bucket-cap-mb 100", "--no-broadcast-buffers",
        "--no-ddp-gradient-sync --gbs 16", "--gbs 16", "--zero 1", "--zero 1 --parameters-as-bucket-view",
        "--recompute full --static-graph", "--find-unused-parameters", "--optimizer sgd --gradient-as-bucket-view",
    ):  # fmt: skip
        yield f"{job} {flags}".rstrip()


def deepspeed() -> Iterator[str]:
    for zero in (0, 1, 2, 3):
        job = f"--model llama-3-8b --layers 4 --seq 1024 --framework deepspeed --zero {zero} --gpus 8 --gpu a100-40gb"
        yield f"{job} --dtype bf16"
        yield f"{job} --dtype fp16 --gbs 32"
        yield f"{job} --dtype fp32"
        yield f"{job} --dtype bf16 --recompute full --gradient-clipping 1.0"
        yield f"{job} --dtype bf16 --offload-optimizer cpu"
        yield f"{job} --dtype bf16 --grad-accum-dtype fp32 --gbs 16"
        yield f"{job} --dtype bf16 --no-contiguous-gradients --reduce-bucket-size 50000000"
        yield f"{job} --dtype bf16 --overlap-comm --no-reduce-scatter"
        yield f"{job} --dtype bf16 --round-robin-gradients --param-groups decay"
    job = "--model gpt2-xl --layers 6 --seq 1024 --framework deepspeed --zero 3 --gpus 4 --dtype bf16"
    for flags in (
        "--sub-group-size 100000000", "--stage3-prefetch-bucket-size 0", "--stage3-max-live-parameters 10000000",
        "--stage3-max-reuse-distance 0", "--stage3-param-persistence-threshold 0",
        "--stage3-model-persistence-threshold 1000000", "--no-memory-efficient-linear",
        "--offload-optimizer nvme", "--offload-param cpu", "--offload-param nvme --offload-optimizer nvme",
        "--offload-optimizer cpu --offload-optimizer-ratio 0.5", "--offload-param cpu --no-offload-param-pin",
        "--offload-param nvme --offload-param-buffer-count 8 --offload-param-max-in-cpu 1000000",
        "--optimizer muon", "--optimizer lion --offload-optimizer cpu", "--gbs 32 --recompute full",
    ):  # fmt: skip
        yield f"{job} {flags}"


def device_map() -> Iterator[str]:
    for model in ("gpt2-xl", "llama-3-8b"):
        job = f"--model {model} --layers 12 --seq 512 --framework device-map"
        yield f"{job} --gpus 4 --dtype fp32"
        yield f"{job} --gpus 3 --dtype bf16 --recompute full"
        yield f"{job} --gpus 2 --dtype bf16 --gbs 8 --mbs 2"
        yield f"{job} --device-map '{{0: 0-2, 1: 3-11}}' --dtype bf16"
    yield "--model gpt2-xl --framework device-map --gpus 8 --gpu v100-16gb --multiply-by-visible-gpus --seq 1024"


def fsdp() -> Iterator[str]:
    for zero in range(4):
        yield f"--model llama-3-8b --layers 4 --seq 1024 --framework deepspeed --gpus 8 --zero {zero} --lora-rank 16"
    job = "--model llama-3-8b --layers 4 --seq 1024 --framework deepspeed --gpus 8 --zero 3 --lora-rank 16"
    yield f"{job} --quantisation nf4 --recompute full"
    job = "--model llama-3-8b --layers 4 --seq 1024 --framework fsdp --gpus 8"
    yield f"{job} --lora-rank 16 --recompute full"
    yield f"{job} --lora-rank 16 --quantisation nf4 --fsdp-reduce bf16 --gbs 16"
    yield f"{job} --lora-rank 16 --quantisation nf4 --quant-storage uint8"
    for flags in (
        "--dtype fp32", "--dtype bf16", "--dtype fp16 --fsdp-parameters fp32", "--dtype bf16 --fsdp-reduce fp32",
        "--dtype bf16 --no-reshard-after-forward", "--dtype bf16 --reshard-to 4", "--dtype bf16 --reshard-root",
        "--dtype bf16 --fsdp-replicas 2", "--dtype bf16 --fsdp-offload", "--dtype bf16 --no-gradient-sync --gbs 32",
        "--dtype bf16 --gbs 32", "--dtype bf16 --recompute full --recompute-layers 2 --recompute-method block",
        "--dtype bf16 --optimizer muon --recompute full", "--dtype bf16 --gpus 1", "--dtype bf16 --mbs 4 --recompute full",
    ):  # fmt: skip
        yield f"{job} {flags}"


def torchtitan() -> Iterator[str]:
    job = "--model llama-3-8b --layers 8 --seq 2048 --framework fsdp --fsdp-code torchtitan --gpu h100-80gb"
    for flags in (
        "--fp8 tensorwise", "--fp8 rowwise --recompute-per-operator --filter-fqns auto_filter_small_kn",
        "--fp8 rowwise_with_gw_hp --recompute full --filter-fqns layers.0.,output",
        "--fp8 tensorwise --enable-fsdp-float8-all-gather --precompute-float8-dynamic-scale-for-fsdp",
        "--fp8 rowwise --enable-fsdp-float8-all-gather", "--fp8 tensorwise --tp 2",
        "--compile --seq 8192 --mbs 2 --fp8 rowwise --filter-fqns auto_filter_small_kn,output --recompute full",
        "--compile --seq 8192 --mbs 2 --fp8 tensorwise --enable-fsdp-float8-all-gather --recompute-per-operator",
        "--compile --fp8 rowwise_with_gw_hp", "--compile --fp8 tensorwise --filter-fqns attention.wq",
    ):  # fmt: skip
        yield f"{job} --gpus 8 {flags}"
    for flags in (
        "--gpus 8", "--gpus 8 --recompute full", "--gpus 8 --recompute selective --recompute-every 2",
        "--gpus 8 --recompute selective --recompute-per-operator", "--gpus 8 --recompute full --recompute-every 2",
        "--gpus 8 --ends-apart", "--gpus 8 --no-reshard-after-forward", "--gpus 8 --fsdp-replicas 2",
        "--gpus 8 --fsdp-offload", "--gpus 8 --dtype fp32", "--tp 2 --gpus 8", "--tp 4 --gpus 4 --sequence-parallel",
        "--tp 2 --gpus 8 --recompute full --loss plain", "--gpus 8 --optimizer adam --optimizer-implementation fused",
        "--gpus 8 --fsdp-parameters fp32 --fsdp-reduce fp32 --gbs 32",
        "--pp 2 --gpus 4 --gbs 16", "--pp 4 --gpus 8 --gbs 16 --schedule gpipe", "--pp 2 --vpp 2 --gpus 4 --gbs 16",
        "--pp 4 --gpus 4 --gbs 8 --schedule 1f1b --return-outputs", "--pp 2 --tp 2 --gpus 8 --gbs 16 --recompute full",
        "--pp 4 --vpp 2 --gpus 8 --gbs 32 --recompute selective --recompute-per-operator", "--pp 2 --gpus 2 --gbs 8 --no-reshard-after-forward",
        "--tp 2 --gpus 8 --ends-apart --loss chunked", "--gpus 8 --ends-apart --loss chunked --fsdp-cuda-graphs",
        "--pp 2 --gpus 4 --gbs 16 --ends-apart --loss chunked", "--pp 2 --vpp 2 --tp 2 --gpus 8 --gbs 16 --ends-apart --loss chunked",
        "--pp 2 --gpus 8 --gbs 8 --reshard-after-forward --reshard-to 2", "--pp 2 --tp 2 --vpp 4 --gpus 4 --gbs 12",
    ):  # fmt: skip
        yield f"{job} {flags}"
    yield f"{job} --gpus 8 --ends-apart --loss chunked --fp8 rowwise --filter-fqns attention.wo --recompute full"
    for flags in ("--recompute-per-operator --compile-loss", "--recompute full", "--seq 8192 --mbs 2"):
        yield f"{job} --gpus 8 --compile {flags}"
    job = "--model gpt-oss-20b --layers 4 --seq 2048 --framework fsdp --fsdp-code torchtitan --gpu h200 --ends-apart"
    yield from (
        f"{job} --gpus 8",
        f"{job} --gpus 16 --recompute full --gbs 32",
        f"{job} --gpus 8 --ep 2",
        f"{job} --gpus 64",
        f"{job} --gpus 64 --ep 4 --recompute full",
        f"{job} --gpus 8 --ep 2 --recompute selective --recompute-per-operator --loss chunked",
        f"{job} --gpus 8 --loss chunked --fsdp-cuda-graphs",
        f"{job} --gpus 8 --ep 2 --fsdp-cuda-graphs",
        f"{job} --gpus 8 --loss chunked --compile-loss --gbs 16",
    )
    yield f"{job} --gpus 8 --recompute selective --recompute-per-operator"
    yield f"{job} --gpus 8 --pp 2 --ep 4 --gbs 16"
    yield f"{job} --gpus 8 --cp 2 --ep 4 --seq 16384"
    for model in ("qwen3.5-9b --tied-embeddings false", "qwen3.5-35b-a3b --ep 8"):
        yield f"{job.replace('gpt-oss-20b', model)} --gpus 8 --loss chunked"
        yield f"{job.replace('gpt-oss-20b', model)} --gpus 16 --pp 2 --gbs 32 --recompute full"
    muse = job.replace("gpt-oss-20b", "muse-glimmer-30b") + " --gpus 8 --loss chunked"
    newest = muse.replace("muse-glimmer-30b", "{}") + " --fsdp-newest --recompute selective --recompute-per-operator"
    yield from (
        f"{newest.format('llama-3-8b')} {flags}" for flags in ("--cp 4 --seq 32768", "--cp 2 --dp 4 --fsdp-cuda-graphs")
    )
    yield from (newest.format(model) for model in ("llama-3-8b", "qwen3-8b", "qwen3-0.6b", "qwen3-30b-a3b"))
    yield from (f"{muse} --recompute {one}" for one in ("none", "full", "selective --recompute-per-operator"))
    yield f"{newest.format('qwen3-30b-a3b')} --cp 4 --ep 8 --seq 16384"
    yield f"{newest.format('deepseek-v2-lite')} --ep 8"
    for model in ("qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"):
        job = f"--model {model} --layers 6 --seq 2048 --framework fsdp --fsdp-code torchtitan --gpu h200 --gpus 8"
        yield from (job, f"{job} --recompute full", f"{job} --recompute selective --recompute-per-operator --gbs 16")
        yield f"{job} --recompute full --ep 4"
        yield from (
            f"{job} --pp 2 --gbs 16",
            f"{job} --pp 2 --vpp 2 --gbs 16 --recompute full",
            f"{job} --pp 2 --ep 2 --gbs 16",
            f"{job} --tp 2",
        )
    for model, flags in (
        ("qwen3-30b-a3b", "--tp 2 --ep 8 --recompute full"),
        ("qwen3-30b-a3b", "--tp 4 --ep 2 --etp 4"),
        ("qwen3-30b-a3b", "--tp 4 --ep 2 --etp 2"),
        ("deepseek-v3", "--tp 4 --ep 4 --recompute selective --recompute-per-operator --gbs 8"),
        ("deepseek-v3", "--tp 2 --pp 2 --ep 4 --gbs 16"),
    ):
        yield f"--model {model} --layers 6 --seq 2048 --framework fsdp --fsdp-code torchtitan --gpu h200 --gpus 8 {flags}"
    job = "--framework fsdp --fsdp-code torchtitan --gpu h100-80gb --gpus 8 --seq 2048"
    yield from (
        f"--model qwen3-1.7b {job}",
        f"--model qwen3-0.6b {job} --loss chunked --recompute selective --recompute-per-operator --gbs 16",
        f"--model llama-3.2-1b {job} --ends-apart --recompute full",
        f"--model qwen3-1.7b {job} --tp 2",
    )
    for flags in (
        "--gpu a100-80gb --gpus 8",
        "--gpu h200 --gpus 8 --ep 8",
        "--gpu h200 --gpus 8 --ep 3",
        "--gpu h200 --gpus 128 --ep 2",
    ):
        yield f"--model deepseek-v2-lite --layers 4 --seq 2048 --framework fsdp --fsdp-code torchtitan {flags}"
    job = "--seq 4096 --framework fsdp --fsdp-code torchtitan --fsdp-newest --ends-apart --loss chunked --gpu b200 --gpus 8"
    for few in (
        "--fp8 mxfp8",
        "--fp8 mxfp8 --fqns layers --recompute full",
        "--fp4 nvfp4 --fqns attention,lm_head",
        "--fp8 rowwise",
    ):
        yield f"--model llama-3-8b --layers 4 {job} {few}"
    for few in ("--fp8 mxfp8 --fqns attention,shared_experts", "--fp8 rowwise --filter-fqns output,router.gate"):
        yield f"--model deepseek-v2-lite --layers 4 {job} --ep 8 --pad-multiple 128 {few}"


def megatron() -> Iterator[str]:
    for model in ("qwen2.5-7b", "phi-4"):
        yield f"--model {model} --layers 4 --seq 2048 --framework megatron --gpu h100-80gb --tp 2 --dp 4 --zero 1"
    for model, seq in (("llama-3-8b", 2048), ("gpt2-large", 1024), ("bert-5.1b", 512), ("gpt3-175b", 2048)):
        job = f"--model {model} --layers 4 --seq {seq} --dtype bf16 --framework megatron --gpu h100-80gb"
        yield f"{job} --tp 1 --dp 2"
        yield f"{job} --tp 4 --dp 2 --zero 1 --sequence-parallel"
        yield f"{job} --tp 2 --pp 2 --dp 2 --zero 1 --gbs 16 --recompute full"
        yield f"{job} --tp 2 --recompute selective --transformer-impl local"
    yield f"{job} --tp 2 --dp 4 --zero 1 --optimizer-cuda-graph --te-version 2.12 --precision-aware-optimizer --exp-avg-dtype bf16"
    yield f"{job} --tp 4 --dp 2 --no-sequence-parallel --recompute full --distribute-saved-activations"
    job = "--model llama-3-8b --layers 4 --seq 2048 --dtype bf16 --framework megatron --tp 2 --dp 4 --zero 1"
    yield f"{job} --gpu h200 --optimizer-implementation foreach --transformer-impl local"
    for flags in (
        "--transformer-impl local", "--transformer-impl local --attention eager", "--attention-backend unfused",
        "--attention-backend fused", "--attention-backend flash", "--te-version 2.1", "--deterministic",
        "--no-gradient-accumulation-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion",
        "--rotary-interleaved", "--cross-entropy-fusion native", "--cross-entropy-fusion te", "--per-token-loss",
        "--no-attention-mask-in-dataloader", "--vocab-multiple 512", "--distributed-optimizer-instances 2",
        "--overlap-grad-reduce", "--overlap-grad-reduce --overlap-param-gather", "--overlap-grad-reduce --bucket-size 10000000",
        "--log-num-zeros-in-grad --log-params-norm", "--clip-grad 0", "--no-check-for-nan", "--gradients bf16",
        "--recompute full --recompute-method uniform --recompute-layers 2",
        "--recompute full --recompute-method block --recompute-layers 3",
        "--recompute selective --recompute-modules core_attn,layernorm,mlp", "--recompute selective --recompute-modules mlp",
        "--cp 2", "--cp 2 --cp-communication a2a --sequence-parallel", "--sequence-parallel --mbs 2", "--gbs 64 --mbs 2",
    ):  # fmt: skip
        yield f"{job} {flags}"
    sizes = "--hidden 1024 --heads 16 --head-dim 64 --mamba-heads 32 --mamba-head-dim 64 --mamba-groups 8 --mamba-state-dim 128"
    job = f"--model gpt2 --family hybrid {sizes} --seq 1024 --framework megatron --gpu h100-80gb --layer-pattern M-M*"
    for flags in (
        "--tp 2 --dp 4 --zero 1 --mbs 4",
        "--tp 2 --cp 4",
        "--pp 2 --gbs 8 --recompute full",
        "--tp 4 --fp8 tensorwise",
    ):
        yield f"{job} {flags}"
    job = "--model nemotron-3-nano-30b-a3b --layer-pattern MEM*E --framework megatron --gpu h100-80gb --seq 8192"
    yield f"{job} --dp 8 --ep 8 --zero 1 --moe-squared-relu-fusion"
    yield f"{job} --tp 2 --dp 4 --ep 4 --zero 1"
    graphs = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn,mamba,moe_router,moe_preprocess"
    yield f"{job} --dp 8 --ep 8 --zero 1 --expert-latent 1024 {graphs}"
    yield f"{job} --dp 8 --ep 8 --zero 1 --cuda-graph-impl local --cuda-graph-modules attn,mamba,moe_router"
    yield f"{job} --dp 8 --ep 8 --zero 1 --megatron-fsdp optim_grads_params"
    yield f"{job} --dp 8 --ep 8 --zero 1 --megatron-fsdp optim_grads_params --megatron-fsdp-max-pool"
    yield f"{job} --dp 8 --ep 8 --zero 1 --disable-mamba-mem-eff-path"
    yield f"{job} --dp 8 --ep 8 --zero 1 --mamba-training-ssm-states-dtype fp32"
    job = "--model qwen3-next-80b-a3b --layers 4 --framework megatron --gpu h100-80gb --seq 4096 --te-version 2.20"
    for flags in (
        "--dp 8 --ep 8 --zero 1", "--tp 2 --cp 2 --dp 4 --ep 4 --zero 1 --recompute selective "
        "--recompute-modules moe_act,gdn_norm_out", "--dp 8 --ep 8 --zero 1 --recompute full", "--dp 8 --ep 8 --fp8 tensorwise",
        "--dp 8 --ep 8 --zero 1 --moe-use-grouped-tensor --moe-dispatcher flex --moe-flex-backend hybridep "
        "--moe-expert-rank-capacity-factor 1.5",
    ):  # fmt: skip
        yield f"{job} {flags}"
    yield f"{job} --dp 2 --ep 2 --experts 16 --deterministic".replace("--seq 4096", "--seq 512")
    sizes = "--linear-key-heads 8 --linear-value-heads 16 --linear-key-head-dim 64 --linear-value-head-dim 64"
    job = f"--model gpt2 --family hybrid {sizes} --seq 1024 --framework megatron --gpu h100-80gb --layer-pattern G-G*"
    yield f"{job} --activation swiglu --mlp-bias false --tp 2 --dp 4 --zero 1"
    blocks = "8:14336,none:7168,8:none,none:none"
    job = "--model llama-3-8b --layers 4 --seq 2048 --framework megatron --gpu h100-80gb --tp 2 --dp 4"
    yield f"{job} --layer-blocks {blocks} --sequence-parallel --zero 1"
    yield f"{job} --layer-blocks {blocks} --recompute full"
    yield f"{job} --layer-blocks 8:14336,linear:7168,8:linear,4:14336 --pp 2 --gbs 16"
    yield "--model llama-3.3-nemotron-super-49b --framework megatron --gpu h100-80gb --tp 8 --pp 2 --dp 2 --seq 4096"
    job = "--model llama-3-8b --layers 4 --seq 2048 --framework megatron --gpu h100-80gb --tp 2 --dp 4 --megatron-fsdp"
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        yield f"{job} {strategy}"
    for more in ("--megatron-fsdp-double-buffer", "--megatron-fsdp-unit-size 500000000", "--recompute full"):
        yield f"{job} optim_grads_params {more}"
    yield f"{job} optim_grads_params --use-nccl-ub --megatron-fsdp-meta-device"
    yield f"{job} optim_grads_params --use-nccl-ub --megatron-fsdp-persistent"
    yield f"{job} optim_grads_params --precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"
    yield f"{job} optim_grads --use-nccl-ub --dp 8 --distributed-optimizer-instances 2"
    job = "--model llama-3-8b --layers 4 --seq 2048 --framework megatron --gpu h100-80gb --dp 4 --gbs 8 --torch-fsdp"
    for more in ("--offload-layers 2", "--offload-layers 3 --tp 2 --zero 1", "--offload-layers 2 --fp8 delayed"):
        yield f"{job.removesuffix(' --torch-fsdp')} {more}"
    yield (  # NVIDIA's recipe of 64 GB200s (Megatron-Bridge, llama3_70b_pretrain_64gpu_gb200_fp8cs_config)
        "--model llama-3-70b --seq 8192 --framework megatron --gpu gb200 --gpus 64 --gbs 256 --mbs 2 --zero 1"
        " --gradients bf16 --gradient-accumulation-fusion false --megatron-fsdp optim_grads_params"
        " --megatron-fsdp-double-buffer --megatron-fsdp-meta-device --fp8 tensorwise --fp8-parameters"
        " --offload-layers 40"
    )
    for more in ("reshard", "keep", "reshard --tp 2 --recompute full", "reshard --cp 2 --torch-fsdp-host-init"):
        yield f"{job} {more}"
    yield f"{job} reshard --transformer-impl local --recompute selective --dtype fp32"
    job = "--model llama-3-8b --layers 4 --seq 2048 --framework megatron --gpu h100-80gb --dp 4 --zero 1"
    yield f"{job} --precision-aware-optimizer --optimizer-offload-fraction 0.5"
    yield f"{job} --cp 2 --cp-communication all_gather"
    windows = (
        "--layers 4 --seq 8192 --framework megatron --gpu h100-80gb --gpus 8 --cp 2 --dtype bf16 --cp-communication"
    )
    yield f"--model mistral-7b {windows} all_gather"
    for gpu, release in (("h100-80gb", 3), ("h100-80gb", 4), ("b200", 4)):
        yield (
            f"--model llama-3-8b --layers 4 --seq 8192 --framework megatron --gpu {gpu} --gpus 4 --tp 4 "
            f"--attention-backend flash --flash-attention-release {release}"
        )
    yield f"--model mistral-7b {windows} all_gather --alternating-windows"
    two = windows.replace("--cp 2", "--cp 4")
    yield f"--model llama-3-8b {two} a2a+p2p --cp-inner 2"
    yield (
        f"--model llama-3-8b {two} a2a --deterministic --cross-entropy-fusion none --attention-dropout 0.1 --fp8 delayed "
        "--fp8-dot-product-attention"
    )
    yield f"--model llama-3-8b {two} a2a+p2p --cp-inner 2 --fp8 delayed --fp8-dot-product-attention"
    yield f"--model gpt-oss-20b {windows} a2a --ep 4 --bias-dropout-fusion false"
    job = "--model llama-3-8b --layers 4 --seq 2048 --framework megatron --gpu h100-80gb --tp 2 --dp 4 --sequence-parallel"
    for flags in (
        "--use-te-activation-func --no-bias-swiglu-fusion", "--qk-clip", "--qk-clip --zero 1", "--packed-sequences --mbs 2",
        "--use-transformer-engine-op-fuser", "--gradients bf16 --fp32-gradients-of all", "--dtype fp32 --mbs 1",
        "--zero 1 --gradients bf16 --ddp-reduce-scatter-with-fp32-accumulation",
        "--zero 1 --gradients bf16 --ddp-reduce-scatter-with-fp32-accumulation --overlap-grad-reduce",
        "--zero 1 --use-nccl-ub", "--zero 1 --dp 8 --use-sharp --nccl-blocks dp_cp=2-16,tp=-8",
        "--cuda-graph-impl transformer_engine --cuda-graph-modules attn --cuda-graph-warmup-steps 0",
        "--cuda-graph-impl local --dp 2 --pp 2 --gbs 8",
    ):  # fmt: skip
        yield f"{job} {flags}"
    job = "--layers 4 --seq 2048 --framework megatron --gpu b200 --dp 8 --ep 8 --zero 1 --fp8 mxfp8 --fp8-parameters "
    job += "--env NVTE_CUTEDSL_FUSED_GROUPED_MLP=1"
    for flags in (
        "--model qwen3-30b-a3b --use-transformer-engine-op-fuser",
        "--model deepseek-v2 --use-transformer-engine-op-fuser --moe-shared-chain --te-version 2.19 --moe-dispatcher flex "
        "--moe-flex-backend hybridep --moe-expert-rank-capacity-factor 1.5 --recompute selective "
        "--recompute-modules moe_act",
        "--model deepseek-v2 --moe-shared-chain --te-version 2.19 --tp 2 --dp 4 --etp 1 --sequence-parallel --moe-shared-expert-overlap",
    ):  # fmt: skip
        yield f"{job} {flags}"
    job = "--model deepseek-v2 --layers 4 --seq 2048 --framework megatron --gpu h100-80gb --dp 8 --ep 8 --zero 1"
    for flags in (
        "--fused-residual-rmsnorm", "--mla-down-proj-fusion", "--mtp-layers 2 --mtp-detach-heads",
        "--mtp-layers 2 --mtp-hsm", "--mtp-layers 1 --megatron-fsdp optim_grads_params --use-nccl-ub",
        "--mtp-layers 2 --megatron-fsdp optim_grads_params --fp8 tensorwise --fp8-parameters",
    ):  # fmt: skip
        yield f"{job} {flags}"
    job = "--model gpt2-large --layers 4 --seq 1024 --dtype fp16 --framework megatron --tp 2 --transformer-impl local"
    for flags in ("--attention eager --no-masked-softmax-fusion", "--attention eager --attention-softmax-in-fp32",
                  "--attention eager --query-key-layer-scaling", "--no-bias-gelu-fusion", "--dtype fp32"):  # fmt: skip
        yield f"{job} {flags}"


def low_precision() -> Iterator[str]:
    """Products in 8 and 4 bits, in Megatron-Core."""
    job = "--model llama-3-8b --layers 4 --seq 2048 --framework megatron --zero 1 --tp 2 --dp 4 --sequence-parallel"
    yield f"{job} --gpu h100-80gb --fp8 tensorwise --precision-of-modules *linear_fc2=16bit,*layers.0.*=16bit"
    for recipe in ("delayed", "tensorwise", "blockwise"):
        yield f"{job} --gpu h100-80gb --fp8 {recipe}"
        yield f"{job} --gpu h100-80gb --fp8 {recipe} --fp8-parameters --gbs 32"
    for recipe in ("--fp8 tensorwise", "--fp8 mxfp8", "--fp4 nvfp4"):
        yield f"{job} --gpu b200 {recipe}"
        yield f"{job} --gpu b200 {recipe} --fp8-parameters --recompute full"
    for more in ("--gpu h100-80gb --fp8 delayed --amax-history 1024", "--gpu b200 --fp8 tensorwise --recompute full"):
        yield f"{job} {more} --fp8-dot-product-attention"
    yield f"{job} --gpu b200 --fp8 mxfp8 --fp8-dot-product-attention --fp8-output-proj"
    yield f"{job} --gpu b200 --fp4 nvfp4 --fp8-dot-product-attention --env NVTE_DPA_FP8_RECIPE=Float8CurrentScaling"
    yield f"{job} --gpu b200 --fp4 nvfp4 --fp8-dot-product-attention"  # of which there is none
    yield f"{job} --gpu b200 --fp8 tensorwise --fp8-output-proj"
    for recipe in (
        "delayed --cp-communication a2a",
        "mxfp8 --cp-communication a2a",
        "delayed",
        "mxfp8",
        "tensorwise --cp-communication all_gather",
    ):
        yield (
            "--model llama-3-8b --layers 4 --seq 8192 --framework megatron --zero 1 --dp 2 --cp 4 --gpu b200 "
            f"--fp8 {recipe} --fp8-dot-product-attention"
        )
    for model in ("gpt-oss-20b --bias-dropout-fusion false", "deepseek-v3 --mtp-layers 1 --fp8-output-proj"):
        yield (
            f"--model {model} --layers 4 --seq 2048 --framework megatron --gpu b200 --dp 8 --ep 8 --zero 1 --fp8 mxfp8 "
            "--fp8-dot-product-attention"
        )
    yield f"{job} --gpu h100-80gb --fp8 tensorwise --first-16bit-layers 1 --last-16bit-layers 1 --pp 2 --gbs 32"
    yield f"{job} --gpu b200 --fp8 tensorwise --fp8-parameters --megatron-fsdp optim_grads_params"
    sharded = f"{job} --fp8-parameters --megatron-fsdp"
    for more in (
        "optim_grads_params --gpu h100-80gb --fp8 delayed --use-nccl-ub --megatron-fsdp-meta-device",
        "optim_grads_params --gpu h100-80gb --fp8 delayed --recompute full --megatron-fsdp-keep-transposes",
        "optim_grads_params --gpu h100-80gb --fp8 blockwise --recompute full",
        "optim_grads_params --gpu b200 --fp8 mxfp8 --recompute full --distributed-optimizer-instances 2 "
        "--megatron-fsdp-outer optim",
        "optim_grads --gpu h100-80gb --fp8 tensorwise", "optim --gpu b200 --fp8 mxfp8",
    ):  # fmt: skip
        yield f"{sharded} {more}"
    job = "--model mixtral-8x7b --layers 2 --seq 1024 --framework megatron --gpus 8 --ep 4"
    for more in (
        "--gpu h100-80gb --fp8 blockwise",
        "--gpu b200 --fp8 mxfp8 --moe-router-padding",
        "--gpu b200 --fp4 nvfp4",
    ):
        yield f"{job} {more}"
    for more in ("--fp8 rowwise", "--fp8 mxfp8 --gpu h100-80gb", "--fp8 tensorwise --te-version 2.8"):
        yield f"--model llama-3-8b --framework megatron {more}"


def experts() -> Iterator[str]:
    """Models with experts and latent attention, in Megatron-Core."""
    job = "--model mixtral-8x7b --layers 2 --seq 1024 --framework megatron --gpu h100-80gb --gpus 8 --ep 4"
    yield job
    for more in (
        "--zero 1 --tp 2 --sequence-parallel", "--zero 1 --tp 2 --sequence-parallel --etp 1", "--etp 2 --ep 2",
        "--experts-imbalance 1.5", "--experts-imbalance worst", "--no-moe-permute-fusion", "--no-moe-grouped-gemm",
        "--moe-dispatcher allgather --no-moe-permute-fusion", "--moe-capacity-factor 1.25",
        "--moe-capacity-factor 1 --moe-pad-to-capacity", "--recompute selective --recompute-modules moe",
        "--recompute selective --recompute-modules moe_act,layernorm", "--recompute full", "--router-z-loss 0.001",
        "--optimizer muon", "--optimizer muon --zero 1", "--shared-expert-ffn 4096 --shared-expert-gate",
        "--shared-expert-ffn 4096 --moe-shared-expert-overlap --zero 1 --tp 2 --sequence-parallel",
        "--transformer-impl local --no-moe-permute-fusion --shared-expert-ffn 4096",
    ):  # fmt: skip
        yield f"{job} {more}"
    yield "--model qwen3-30b-a3b --layers 4 --seq 2048 --framework megatron --gpu h100-80gb --gpus 16 --ep 8 --pp 2 --zero 1"
    for model in ("deepseek-v2", "deepseek-v3", "moonlight-16b"):
        job = f"--model {model} --layers 4 --seq 2048 --framework megatron --gpu b200 --gpus 16 --ep 8 --pp 2 --zero 1 --gbs 32"
        yield job
        yield f"{job} --mtp-layers 1"
        yield f"{job} --mtp-layers 1 --cp 2 --tp 2"
        yield f"{job} --mtp-layers 1 --recompute selective --recompute-modules mla_up_proj,moe"
        yield f"{job} --recompute selective --recompute-modules mla_up_proj,layernorm,shared_experts --no-rope-fusion"
    yield f"{job} --mtp-layers 1 --pp 4 --gpus 32 --pipeline-layout 'Et|tt|tm|L'"
    for model in ("qwen3-30b-a3b", "deepseek-v3"):
        job = (
            f"--model {model} --layers 4 --seq 2048 --framework megatron --gpu h200 --gpus 16 --ep 8 --zero 1 --gbs 64"
        )
        for more in (
            "", "--pp 2 --vpp 2", "--moe-delay-wgrad", "--pp 2 --vpp 2 --moe-delay-wgrad --mtp-layers 1",
            "--pp 2 --vpp 2 --moe-early-attention-release --recompute selective --recompute-modules layernorm,moe_act",
            "--tp 2 --cp 2 --moe-delay-wgrad", "--fp8 blockwise --moe-delay-wgrad", "--pp 2",
        ):  # fmt: skip
            yield f"{job} --moe-overlap-exchange {more}"
        flex = f"{job} --moe-overlap-exchange --moe-dispatcher flex --moe-flex-backend"
        graphs = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn,moe_router,moe_preprocess"
        yield f"{flex} deepep --pp 2 --vpp 2 --moe-delay-wgrad"
        yield f"{flex} hybridep {graphs}"
        yield f"{flex} hybridep --pp 2 --vpp 2 --offload-modules core_attn,attn_proj,mlp_norm,expert_fc1,moe_act"
        yield f"{job} --moe-wgrad-beside-dispatch"
    for model in ("llama-4-scout", "llama-4-maverick", "olmoe-1b-7b", "granite-3.0-1b-a400m"):
        yield f"--model {model} --layers 4 --seq 2048 --framework megatron --gpu h100-80gb --gpus 8 --ep 8 --zero 1"
    for framework in ("fsdp", "deepspeed", "single"):
        yield f"--model mixtral-8x7b --framework {framework}"
    yield "--model llama-4-maverick --layers 4 --seq 1024 --gpu h200 --recompute full"
    for more in ("2", "3 --recompute full", "3 --stage3-param-persistence-threshold 8"):
        yield f"--model gpt-oss-20b --layers 4 --seq 1024 --gpu h200 --gpus 4 --framework deepspeed --zero {more}"
    for more in ("fsdp", "fsdp --fsdp-version 1", "deepspeed --zero 2", "deepspeed --zero 3", "ddp", "device-map"):
        yield f"--model llama-4-scout --layers 4 --seq 1024 --gpu h200 --gpus 4 --framework {more}"
    yield "--model llama-4-scout --layers 4 --seq 8192 --gpu h200"
    yield "--model llama-4-scout --layers 4 --seq 8192 --gpu h200 --attention eager"
    for more in ("", " --recompute full --framework fsdp --gpus 4", " --attention eager"):
        yield f"--model llama-4-scout --layers 4 --seq 1024 --gpu h200 --versions transformers=4.57.1{more}"
    for more in ("--ep 3", "--ep 16", "--moe-dispatcher flex", "--moe-pad-to-capacity", "--expert-top-k 9", "--etp 3"):
        yield f"--model mixtral-8x7b --framework megatron --gpus 8 {more}"


def pipelines() -> Iterator[str]:
    job = "--model llama-3-8b --layers 16 --seq 2048 --dtype bf16 --framework megatron --tp 2 --zero 1"
    for flags in (
        "--pp 2 --gbs 8", "--pp 4 --gbs 4", "--pp 4 --gbs 32 --dp 2", "--pp 4 --vpp 2 --gbs 16", "--pp 4 --vpp 4 --gbs 8",
        "--pp 4 --vpp 4 --gbs 32 --no-overlap-p2p", "--pp 4 --vpp 2 --gbs 16 --overlap-p2p-warmup",
        "--pp 2 --vpp 4 --gbs 12 --microbatch-group-size 4", "--pp 4 --first-layers 2 --last-layers 2 --gbs 16",
        "--pp 4 --first-layers 1 --gbs 16", "--pp 4 --layers 14 --count-embedding --count-loss --gbs 16",
        "--pp 2 --vpp 2 --pipeline-layout 'Ettt|tttt|tttt|tttttL' --gbs 8",
        "--pp 4 --pipeline-layout 'Et*3|t*5|t*5|t*3,L' --gbs 16", "--pp 4 --vpp 2 --recompute full --gbs 16",
        "--pp 8 --gbs 64 --recompute selective", "--pp 4 --vpp 2 --recompute full --recompute-method block --recompute-layers 1 --gbs 16",
        "--pp 4 --gbs 16 --overlap-grad-reduce --overlap-param-gather --vpp 2", "--pp 3 --layers 15 --gbs 9 --dp 1",
        "--pp 4 --vpp 2 --gbs 64 --sequence-parallel --mbs 2 --dp 2", "--pp 4 --gbs 1 --dp 1", "--pp 4 --gbs 2 --dp 1",
        "--pp 4 --vpp 2 --gbs 4 --dp 1", "--pp 16 --layers 32 --gbs 128 --dp 2 --gpu h200",
    ):  # fmt: skip
        yield f"{job} {flags}"
    yield "--model bert-5.1b --layers 8 --seq 512 --dtype bf16 --framework megatron --pp 4 --gbs 8"
    yield "--model gpt2-large --layers 8 --seq 1024 --dtype bf16 --framework megatron --pp 4 --vpp 2 --gbs 8 --transformer-impl local"


def adapters() -> Iterator[str]:
    """Megatron-Bridge's."""
    job = "--model llama-3-8b --layers 4 --seq 2048 --framework megatron --gpu h100-80gb --lora-rank 16 --zero 1"
    for flags in (
        "", "--tp 4 --dp 2 --sequence-parallel", "--tp 2 --dp 2 --lora-dropout 0.1", "--lora-targets linear_qkv --recompute full",
        "--tp 2 --pp 2 --vpp 2 --gbs 16 --sequence-parallel --tp-comm-overlap", "--fp8 tensorwise --fp8-parameters --tp 2",
        "--recompute selective --recompute-modules core_attn,mlp --cp 2", "--fp8 delayed --lora-targets linear_proj,linear_fc2",
        "--megatron-fsdp optim", "--use-dora", "--use-dora --tp 2 --pp 2 --gbs 8 --recompute full",
        "--lora-targets linear_q,linear_k,linear_v,linear_fc1_gate,linear_fc1_up --tp 2 --sequence-parallel",
        "--lora-targets linear_qkv --cuda-graph-impl transformer_engine --cuda-graph-modules mlp",
    ):  # fmt: skip
        yield f"{job} {flags}".strip()
    moe = (
        "--model qwen3-30b-a3b --layers 2 --seq 2048 --framework megatron --gpu h100-80gb --gpus 8 --ep 4 --lora-rank 8"
    )
    yield f"{moe} --tp 4 --etp 1 --sequence-parallel"
    yield f"{moe} --lora-targets linear_qkv,linear_proj --moe-dispatcher flex"
    for model in ("nemotron-3-nano-30b-a3b --layers 6 --layer-pattern ME*E-M", "moonlight-16b --layers 3"):
        yield f"--model {model} --seq 2048 --framework megatron --gpu h100-80gb --gpus 8 --ep 8 --lora-rank 8"


def megatron_deepspeed() -> Iterator[str]:
    job = "--model bigscience-104b --layers 14 --seq 1024 --framework megatron-deepspeed --tp 4 --gpu v100-32gb"
    for flags in (
        "--pp 4", "--pp 4 --gbs 64 --zero 1 --dp 2", "--pp 4 --recompute full --gbs 16", "--pp 4 --dtype bf16 --gbs 16",
        "--pp 4 --dtype bf16 --zero 1 --dp 4 --gbs 64", "--pp 4 --schedule gpipe --gbs 16", "--pp 4 --dtype fp32 --gbs 8",
        "--pp 4 --partition uniform", "--pp 4 --partition parameters", "--pp 4 --partition 'type:embed|transformer'",
        "--pp 4 --partition 0,5,9,14,21", "--pp 2 --recompute full --recompute-layers 2 --gbs 8",
        "--pp 4 --optimizer adam8bit --zero 1 --dp 2 --no-embeddings-32bit", "--pp 1 --dp 2", "--pp 7 --mbs 2 --gbs 64 --recompute full",
        "--pp 4 --gbs 2", "--pp 4 --gbs 3 --recompute full", "--pp 2 --attention eager --mbs 4",
    ):  # fmt: skip
        yield f"{job} {flags}"
    yield "--model bloom-176b --seq 2048 --framework megatron-deepspeed --tp 4 --pp 12 --dp 8 --zero 1 --dtype bf16 --gbs 2048 --recompute full --gpu a100-80gb"
    yield "--model gpt2 --seq 1024 --framework megatron-deepspeed --tp 2 --pp 2 --dp 2 --zero 1 --gbs 8"
    yield "--model bert-large --seq 512 --framework megatron-deepspeed --tp 2"


def allocators() -> Iterator[str]:
    jobs = (
        "--model gpt2 --layers 4 --seq 1024 --mbs 4 --dtype bf16 --gpu a100-40gb",
        "--model llama-3-8b --layers 4 --seq 2048 --dtype bf16 --framework fsdp --gpus 8 --recompute full",
        "--model llama-3-8b --layers 4 --seq 2048 --dtype bf16 --framework deepspeed --zero 3 --gpus 8",
        "--model llama-3-8b --layers 8 --seq 2048 --dtype bf16 --framework megatron --tp 2 --pp 2 --vpp 2 --gbs 8",
        "--model llama-3-8b --layers 8 --seq 2048 --framework fsdp --fsdp-code torchtitan --pp 2 --gpus 4 --gbs 8",
        "--model bigscience-104b --layers 6 --seq 1024 --framework megatron-deepspeed --tp 4 --pp 2 --gbs 8",
        "--model gpt2-medium --seq 512 --dtype bf16 --framework ddp --gpus 4 --gbs 16",
    )
    for at, job in enumerate(jobs):
        for settings in ALLOCATOR if at == 0 else ALLOCATOR[:3]:
            yield f"{job} {settings}"
    yield f"{jobs[0]} --capacity 3GiB"
    yield f"{jobs[1]} --capacity 9GiB --headroom 0"
    yield f"{jobs[3]} --capacity 30GiB"
    yield "--model gpt2 --vocab 256000 --seq 1024 --mbs 8 --gpu h200 --torch 2.11"
    yield "--model llama-3-8b --framework fsdp --fsdp-code torchtitan --layers 16 --tp 2 --gpus 8 --gpu h200 --torch 2.11"


def refused() -> Iterator[str]:
    """Plans that contradict themselves or are not modelled: the field that the answer names must stay."""
    yield "--model gpt2 --ep 2"
    yield "--model gpt2 --zero 2 --framework ddp --gpus 2"
    yield "--model gpt2 --framework single --gpus 2"
    yield "--model gpt2 --framework fsdp --tp 2 --gpus 4"
    yield "--model gpt2 --framework device-map --dp 2"
    yield "--model gpt2 --framework deepspeed --pp 2"
    yield "--model gpt2 --framework megatron --tp 5"
    yield "--model gpt2 --framework megatron --sequence-parallel"
    yield "--model gpt2 --seq 4096"
    yield "--model gpt2 --gbs 3 --mbs 2"
    yield "--model gpt2 --mbs 2 --gbs 4 --accumulation 3"
    yield "--model gpt2 --cp 2 --framework ddp"
    yield "--model gpt2 --framework megatron --cp 2 --seq 1023"
    yield "--model llama-3-8b --kv-heads 3"
    yield "--model llama-3-8b --framework deepspeed --autocast --dtype bf16 --gpus 2"
    yield "--model llama-3-8b --dtype fp32 --autocast"
    yield "--model llama-3-8b --recompute selective"
    yield "--model llama-3-8b --framework ddp --gpus 2 --bucket-cap-mb -1"
    yield "--model no-such-model"
    yield "--model gpt2 --optimizer adamx"
    yield "--model gpt2 --gpu h10"
    yield "--model gpt2 --mbs 0"
    yield "--model gpt2 --framework fsdp --gpus 4 --schedule gpipe"
    yield "--model gpt2 --framework megatron --pp 2 --partition uniform"
    yield "--model gpt2 --framework megatron-deepspeed --pp 2 --first-layers 2"
    yield "--model gpt2 --framework megatron --pp 2 --vpp 2 --gbs 3"
    yield "--model gpt2 --framework megatron --lora-rank 8"
    yield "--model gpt2 --quantisation nf4 --framework deepspeed --zero 3 --gpus 2 --lora-rank 8"
    yield "--model falcon-7b --framework megatron"
    yield "--model gpt2 --framework megatron-deepspeed --loss liger"
    yield "--model gpt2 --stage3-max-live-parameters 5"
    yield "--model gpt2 --framework ddp --gpus 2 --trainer transformers --eval-batches 0"
    yield "--model gpt2 --env PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:1"
    yield "--model gpt2 --precision-aware-optimizer"
    yield "--model gpt2 --lora-rank 8 --lora-targets nothing"
    yield "--model gpt2 --offload-param cpu --framework deepspeed --zero 2 --gpus 2"
    yield "--model gpt2 --mbs 100000000"


def others() -> Iterator[str]:
    """Launch files, comparisons, exports, lists, and reports as people read them."""
    yield "estimate llama-3-8b --vary mbs=1,2 --vary recompute=none,full"
    yield "estimate --compare gpt2-xl-4gpu gpt2-xl-8gpu"
    for name in (*EXAMPLES, "llama-3-8b --gpu h100-80gb"):
        yield f"estimate {name} --text"
    yield "estimate llama-3-405b-1024gpu --detail 3 --text"
    yield "estimate llama-3-8b --layers 4 --seq 512 --framework deepspeed --gpus 4 --zero 3 --detail 0 --text"
    yield "estimate llama-3-8b -v --text"
    yield "estimate llama-3-8b --vary mbs=1,2 --text"
    yield "gpus"
    yield "models"
    yield from launched()
    for config in sorted((FOLDER / "configs").iterdir()):
        framework = " --framework megatron-deepspeed --tp 2" if config.name.startswith("bloom") else ""
        yield f"estimate --model tests/golden/configs/{config.name} --seq 256 --dtype bf16{framework}"
    for plan in (
        *(name for name in EXAMPLES if name != "llama-3-8b"),
        "--model llama-3-8b --framework fsdp --fsdp-code torchtitan --gpus 8 --seq 8192 --recompute selective",
        "--model llama-3-8b --framework fsdp --fsdp-code torchtitan --gpus 8 --tp 2 --pp 2 --gbs 64 --seq 8192",
        "--model gpt3-175b --framework megatron --tp 8 --pp 8 --gpus 128 --gbs 512 --zero 1 --recompute full",
        "--model llama-3-8b --framework deepspeed --zero 3 --gpus 8 --seq 2048 --offload-param cpu --offload-optimizer cpu",
        "--model llama-3-8b --framework device-map --gpus 2 --seq 2048",
    ):
        yield f"export {plan}"


def launched() -> Iterator[str]:
    """Launch files of every framework: their estimates, what became of each argument, and written anew."""
    for framework, file, more in (
        ("megatron", "t5.sh", "--gpu h100-80gb"),
        ("megatron", "t5.sh", "--set IMPL=local --set TP=4"),
        ("megatron", "gpt.sh", "--gpus 16 --vocab-size 50257"),
        ("megatron", "gpt.sh", "--gpus 16 --vocab-size 50257 --strict"),
        ("megatron", "llama.sh", "--set DTYPE=bf16 --set TP=2"),
        ("megatron", "llama.sh", ""),
        ("megatron", "bert.sh", "--vocab-size 30000"),
        ("megatron", "bert.sh", "--vocab-size 30000 --gpu h100-80gb"),
        ("megatron-deepspeed", "bigscience.sh", "--set SLURM_NNODES=8 --vocab-size 250100"),
        ("megatron-bridge", "bridge_overrides.yaml", "--model llama-3-8b --layers 4 --gpus 8 --gpu h100-80gb"),
        (
            "megatron-bridge",
            "bridge_overrides.yaml",
            "model.seq_length=8192 mixed_precision=fp16_with_mxfp8_mixed --model llama-3-8b --layers 4 --gpus 8 --gpu b200",
        ),
        (
            "deepspeed",
            "ds_trainer.json",
            "--model gpt2 --gpus 4 --mbs 2 --gbs 16 --seq 512 --dtype bf16 --gradient-clipping 1",
        ),
        ("deepspeed", "ds_zero2.json", "--model gpt2-large --layers 4 --gpus 4 --seq 512"),
        ("deepspeed", "ds_zero3.json", "--model llama-3-8b --layers 3 --gpus 8 --seq 1024"),
        ("torchtitan", "torchtitan_december_2024.toml", "--gpus 8 --layers 6"),
        ("torchtitan", "torchtitan_summer_2024.toml", "--gpus 8 --layers 6"),
        ("torchtitan", "torchtitan_release_0_1.toml", "--gpus 16 --layers 6"),
        ("torchtitan", "torchtitan_release_0_2.toml", "--gpus 8 --layers 6"),
        ("torchtitan", "torchtitan_release_0_2.toml", "--gpus 8 --set parallelism.pipeline_parallel_degree=2"),
        ("torchtitan", "torchtitan_saved.json", "--gpus 8 --layers 6"),
        ("torchtitan", "torchtitan_registry.py", "--gpus 8 --layers 6 --set CONFIG=selective"),
        ("torchtitan", "torchtitan_registry.py", "--gpus 8 --layers 6 --set CONFIG=in_parts --loss vocab-parallel"),
        ("torchtitan", "torchtitan_registry.py", "--gpus 8 --layers 6 --set CONFIG=older"),
        ("torchtitan", "torchtitan_registry.py", "--gpus 8 --layers 6 --set CONFIG=as_shipped"),
        ("torchtitan", "torchtitan_registry.py", "--gpus 8 --layers 6 --set CONFIG=in_parts"),
        ("torchtitan", "torchtitan_registry.py", "--gpus 8 --gpu h200 --layers 4 --set CONFIG=gpt_oss"),
        ("trainer", "trainer.json", "--model llama-3-8b --layers 4 --seq 1024"),
        ("trainer", "trainer.json", "--model llama-3-8b --layers 4 --seq 1024 --versions transformers=4.57.1"),
        ("trainer", "trainer.json", "--model llama-2-7b --layers 4 --seq 1024 --trainer sft"),
        ("trainer", "trainer_ddp.json", "--model gpt2 --seq 512 --gpus 4"),
        ("trainer", "trainer_ddp.json", "--model gpt2 --seq 512 --framework device-map --gpus 2"),
        ("trainer", "swift.sh", "--layers 4"),
        ("trainer", "swift.yaml", "--layers 4"),
    ):
        given = f"--from {framework} tests/golden/launch/{file} {more}".rstrip()
        yield f"estimate {given}"
        yield f"estimate {given} --text"
        yield f"export {given}"
        if framework.startswith("megatron"):
            yield f"estimate {given} --explain-args --text"


def searches() -> Iterator[str]:
    job = "--model llama-3-8b --seq 4096 --gpu h100-80gb --dtype bf16"
    for flags in (
        f"{job} --framework megatron --gpus 16 --gbs 64",
        f"{job} --framework megatron --gpus 16 --gbs 64 --objective memory --fix tp=2 --fix mbs=1",
        "--model gpt3-175b --seq 2048 --gpu a100-80gb --dtype bf16 --framework megatron --gpus 64 --gbs 64 --fix recompute=full",
        "--model gpt2-xl --seq 1024 --gpu a100-40gb --framework megatron --gpus 8 --gbs 32 --transformer-impl local",
        f"{job} --framework fsdp --gpus 8 --gbs 32",
        f"{job} --framework fsdp --fsdp-code torchtitan --gpus 16 --gbs 64",
        f"{job} --framework fsdp --fsdp-code torchtitan --gpus 8 --gbs 32 --objective memory",
        f"{job} --framework deepspeed --gpus 8 --gbs 32",
        "--model gpt2-xl --seq 1024 --gpu v100-16gb --dtype fp16 --framework deepspeed --gpus 4 --gbs 16 --objective memory",
        f"{job} --framework ddp --gpus 8 --gbs 32",
        "--model gpt2-xl --seq 1024 --gpu a100-40gb --dtype bf16 --framework ddp --gpus 4 --gbs 16",
        "--model gpt2-xl --seq 1024 --gpu a100-40gb --dtype bf16 --framework single",
        f"{job} --framework single --optimizer adam8bit",
        "--model gpt2-xl --seq 1024 --gpu v100-16gb --dtype fp16 --framework device-map --gpus 4",
        "gpt2-xl-8gpu",
        "--model bigscience-104b --seq 2048 --gpu v100-32gb --dtype fp16 --framework megatron-deepspeed --gpus 64 --gbs 64 --layers 30 --fix tp=4",
        "bigscience-104b-250k --fix tp=4 --fix pp=32",
        "--model gpt2-xl --seq 1024 --gpu a100-40gb --framework megatron-deepspeed --gpus 8 --gbs 32",
        "--model llama-3-8b --layers 8 --seq 1024 --gpu a100-80gb --dtype bf16 --framework deepspeed --gpus 4 --gbs 8 --zero 3",
        f"{job} --framework single --lora-rank 16 --quantisation nf4 --gpu rtx-4090",
        f"{job} --framework megatron --gpus 3 --gbs 64",
        "--model llama-3-70b --seq 8192 --gpu h100-80gb --framework fsdp --gpus 4 --gbs 16",
        "--model mixtral-8x7b --layers 8 --seq 4096 --gpu h100-80gb --framework megatron --gpus 8 --gbs 16 --fix cp=1",
        "--model deepseek-v2-lite --layers 9 --seq 4096 --gpu h100-80gb --framework megatron --gpus 8 --gbs 32 --fix mbs=1",
        "--model phi-2 --seq 2048 --gpu h100 --framework fsdp --gpus 8 --gbs 64",
        "--model phi-2 --seq 2048 --gpu h100 --framework deepspeed --gpus 8 --gbs 64",
        "--model olmo-7b --seq 2048 --gpu h100 --framework ddp --gpus 8 --gbs 64 --objective memory",
    ):  # fmt: skip
        yield f"suggest-partition {flags}"


# -- parts ----------------------------------------------------------------------------------------------------

SMALL_SEARCHES = (
    "suggest-partition --model gpt2-xl --seq 1024 --gpu a100-40gb --dtype bf16 --framework ddp --gpus 4 --gbs 16",
    "suggest-partition bigscience-104b-250k --fix tp=4 --fix pp=32",
)


def fast() -> list[str]:
    """About 45 plans over everything and two small searches."""
    quick = [one for one in commands() if one.startswith("estimate") and "--text" not in one]
    return [*quick[11::15], *SMALL_SEARCHES]


def smoke() -> list[str]:
    """One or two of each part."""
    firsts = [
        f"estimate {flags}"
        for part in (plain, tuned, losses, trainer, autocast, ddp, device_map, fsdp, torchtitan, megatron, pipelines,
                     megatron_deepspeed, refused)
        for flags in list(part())[3:12:8]
    ]  # fmt: skip
    zero = [f"estimate {flags}" for flags in list(deepspeed())[4::12]]
    return list(dict.fromkeys([*firsts, *zero, *SMALL_SEARCHES]))
