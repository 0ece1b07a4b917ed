"""The cases of a campaign, in order of worth: what would be missed most comes first.

``seconds`` of a case are what it should take on an H200 beside 16 cores: a validation starts three Python processes
that import torch (about 12 s together), builds a model twice and runs some ten iterations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Flags = dict[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """One question, asked by a process of its own, which prints one JSON object."""

    name: str
    asks: str
    seconds: float
    """That it should take."""
    kind: Literal["validate", "probe"]
    command: tuple[str, ...]
    """``memplan validate``'s arguments, or a module of this package with its own."""
    small: tuple[str, ...] | None
    """The same with small shapes, for a CPU; ``None``: needs a GPU."""

    @property
    def limit(self) -> float:
        """Seconds after which it is ended."""
        return max(60.0, 3 * self.seconds)


def flags_of(text: str) -> Flags:
    """``model=gpt2 emulate`` as ``{"model": "gpt2", "emulate": ""}``."""
    pairs = (word.partition("=") for word in text.split())
    return {name: value for name, _, value in pairs}


def words_of(flags: Flags) -> tuple[str, ...]:
    """As a command line has them."""
    return tuple(word for name, value in flags.items() for word in ((f"--{name}", value) if value else (f"--{name}",)))


def validated(name: str, asks: str, seconds: float, flags: str, small: str) -> Case:
    """``memplan validate`` with ``flags``; ``small`` changes them for a CPU."""
    wanted = flags_of(flags)
    return Case(name, asks, seconds, "validate", words_of(wanted), words_of({**wanted, **flags_of(small)}))


def probe(name: str, asks: str, seconds: float, command: str, small: str | None) -> Case:
    return Case(name, asks, seconds, "probe", tuple(command.split()), None if small is None else tuple(small.split()))


SMALL_GPT = "layers=2 hidden=64 heads=4 ffn=256 vocab=512 seq=64 mbs=1"
SMALL = f"{SMALL_GPT} kv-heads=2 head-dim=16"
EMULATED = "emulate"
UNFUSED = "no-gradient-accumulation-fusion no-bias-dropout-fusion no-masked-softmax-fusion"
MEGATRON = f"framework=megatron with=megatron transformer-impl=local attention=eager {UNFUSED} {EMULATED}"
"""Without Transformer Engine, apex and what ``torch.compile`` would make first."""
UNFUSED_GPT = "no-bias-gelu-fusion"
UNFUSED_LLAMA = "no-bias-swiglu-fusion no-rope-fusion"
GPT2_XL = "model=gpt2-xl seq=1024"
LLAMA = "model=llama-3-8b dtype=bf16"
TITAN = f"{LLAMA} framework=fsdp fsdp-code=torchtitan {EMULATED}"


def cases() -> tuple[Case, ...]:
    """All, first things first."""
    return (*ALLOCATOR, *PLAIN, *TUNED, *SHARDED, *EDGES, *LIBRARIES, *MORE)


ALLOCATOR = (
    probe("allocator", "allocated, reserved and retries, request by request", 25, "allocator", None),
    probe("allocator-expandable", "the same with expandable segments", 25, "allocator --conf expandable", None),
    probe("allocator-limited", "the same under a limit of memory", 25, "allocator --limited", None),
    probe("allocator-expandable-limited", "both", 25, "allocator --conf expandable --limited", None),
    probe("allocator-split", "max_split_size_mb and roundup_power2_divisions", 20, "allocator --conf split", None),
)

PLAIN = (
    validated("gpt2-xl-bf16-flash", "a step of GPT-2 XL", 22, f"{GPT2_XL} dtype=bf16 attention=flash mbs=4", SMALL_GPT),
    validated("gpt2-xl-fp32-eager", "", 25, f"{GPT2_XL} dtype=fp32 attention=eager mbs=2", SMALL_GPT),
    validated("gpt2-xl-recompute", "", 22, f"{GPT2_XL} dtype=bf16 attention=flash mbs=8 recompute=full", SMALL_GPT),
    validated(
        "logits-256k",
        "logits that outweigh the model",
        22,
        "model=gpt2 vocab=256000 seq=1024 mbs=8 dtype=bf16",
        SMALL_GPT + " vocab=4096",
    ),
    validated("llama-3-8b-l8", "Llama 3 8B, 8 layers", 24, f"{LLAMA} layers=8 seq=4096 mbs=2", SMALL),
    validated("gpt2-xl-bf16-eager", "", 22, f"{GPT2_XL} dtype=bf16 attention=eager mbs=4", SMALL_GPT),
    validated("gpt2-xl-fp16-flash", "", 22, f"{GPT2_XL} dtype=fp16 attention=flash mbs=4", SMALL_GPT),
    validated(
        "gpt2-xl-fused",
        "the fused AdamW",
        22,
        f"{GPT2_XL} dtype=bf16 attention=flash mbs=2 optimizer-implementation=fused",
        SMALL_GPT,
    ),
    validated("bert-large", "BERT", 22, "model=bert-large seq=512 mbs=8 dtype=fp32 attention=eager", SMALL_GPT),
    validated("qwen3-8b-l6", "Qwen 3, 6 layers", 24, "model=qwen3-8b layers=6 seq=4096 mbs=1 dtype=bf16", SMALL),
    validated(
        "gpt2-autocast", "fp32 weights, bf16 compute", 22, "model=gpt2 seq=1024 mbs=8 dtype=bf16 autocast", SMALL_GPT
    ),
)

TUNED = (
    validated("llama-3-8b-lora", "LoRA on all of Llama 3 8B", 30, f"{LLAMA} seq=2048 mbs=1 lora-rank=16", SMALL),
    validated("llama-3-8b-adam8bit", "8-bit Adam", 30, f"{LLAMA} layers=8 seq=2048 optimizer=adam8bit", SMALL),
    validated(
        "llama-3-8b-qlora",
        "a 4-bit base",
        40,
        f"{LLAMA} seq=2048 mbs=1 lora-rank=16 quantisation=nf4",
        SMALL,
    ),
)

SHARDED = (
    validated("fsdp-8", "one rank of 8", 26, f"{LLAMA} framework=fsdp gpus=8 seq=4096 {EMULATED}", SMALL),
    validated("fsdp-64", "one rank of 64", 26, f"{LLAMA} framework=fsdp gpus=64 seq=4096 {EMULATED}", SMALL),
    validated("torchtitan-tp2", "tensor parallelism", 26, f"{TITAN} layers=16 tp=2 gpus=8 seq=4096", SMALL),
    validated("ddp-8", "", 22, f"model=gpt2 seq=1024 mbs=4 dtype=bf16 framework=ddp gpus=8 {EMULATED}", SMALL_GPT),
    validated(
        "zero1-8", "", 22, f"model=gpt2 seq=1024 mbs=4 dtype=bf16 framework=ddp zero=1 gpus=8 {EMULATED}", SMALL_GPT
    ),
    validated(
        "megatron-llama-tp2-pp2",
        "Megatron-Core's stages",
        45,
        f"{LLAMA} {MEGATRON} layers=8 tp=2 pp=2 gpus=4 gbs=8 seq=2048 {UNFUSED_LLAMA}",
        f"{SMALL} layers=4 gbs=4",
    ),
    validated(
        "bigscience-104b-tp4-pp32",
        "first, middle and last stage of 104 billion parameters",
        70,
        f"model=bigscience-104b dtype=bf16 {MEGATRON} tp=4 pp=32 gpus=128 gbs=128 stage=0,15,31 {UNFUSED_GPT}",
        f"{SMALL_GPT} layers=8 tp=2 pp=4 gpus=8 gbs=8 stage=0,1,3",
    ),
    validated(
        "torchtitan-pp2-tp2",
        "stages of torch.distributed.pipelining (torch 2.13)",
        45,
        f"{TITAN} layers=8 tp=2 pp=2 gpus=4 gbs=8 seq=2048",
        f"{SMALL} layers=4 gbs=4",
    ),
)

EDGES = (
    probe(
        "edge-gpt2-xl",
        "the largest micro-batch that fits, and the next",
        75,
        "edges --model gpt2-xl --seq 1024 --dtype bf16 --attention flash",
        "edges --device cpu --model gpt2 --layers 2 --hidden 64 --heads 4 --ffn 256 --vocab 512 --seq 64 "
        "--dtype fp32 --attention eager",
    ),
    probe(
        "edge-llama-3-8b",
        "the same",
        75,
        "edges --model llama-3-8b --layers 16 --seq 2048 --dtype bf16",
        None,
    ),
    probe(
        "edge-logits",
        "the same",
        75,
        "edges --model gpt2 --vocab 256000 --seq 1024 --dtype bf16",
        None,
    ),
)

LIBRARIES = (
    probe("libraries", "the context, and what cuBLAS, cuBLASLt, cuDNN and flash attention take", 20, "libraries", None),
    probe("products", "seconds of products", 20, "kernels products", "kernels products --device cpu"),
    probe("attention", "seconds of attention", 20, "kernels attention", "kernels attention --device cpu"),
    probe(
        "elementwise", "seconds of kernels that stream", 15, "kernels elementwise", "kernels elementwise --device cpu"
    ),
    probe("updates", "seconds of AdamW", 15, "kernels updates", "kernels updates --device cpu"),
)

MARKED = "marked tests/trace/test_cuda.py tests/validate/test_nvml.py"
MORE = (
    validated("llama-3-8b", "all of Llama 3 8B", 40, f"{LLAMA} seq=4096 mbs=1", SMALL),
    probe(
        "fake-cuda", "fake CUDA tensors beside those of a CPU, and both ways of asking the driver", 60, MARKED, MARKED
    ),
    probe("learned", "an architecture that memplan learns", 60, "learned", "learned --device cpu"),
    validated("mistral-7b-l8", "", 24, "model=mistral-7b layers=8 seq=2048 dtype=bf16", SMALL),
    validated("opt-6.7b-l8", "", 24, "model=opt-6.7b layers=8 seq=2048 dtype=bf16 mbs=2", SMALL_GPT),
    validated("gpt-j-6b-l6", "", 24, "model=gpt-j-6b layers=6 seq=2048 dtype=bf16", SMALL_GPT),
    validated("gpt-neox-20b-l6", "", 24, "model=gpt-neox-20b layers=6 seq=2048 dtype=bf16", SMALL_GPT),
    validated("falcon-7b-l8", "", 24, "model=falcon-7b layers=8 seq=2048 dtype=bf16", f"{SMALL_GPT} kv-heads=1"),
    validated("gemma-2-9b-l6", "", 26, "model=gemma-2-9b layers=6 seq=2048 dtype=bf16 attention=eager", SMALL),
    validated("phi-3-mini-l8", "", 24, "model=phi-3-mini layers=8 seq=1024 mbs=4 dtype=bf16", f"{SMALL} kv-heads=4"),
    validated(
        "llama-3-8b-offload",
        "shards and states on the host",
        32,
        f"{LLAMA} layers=16 framework=fsdp gpus=64 seq=4096 {EMULATED} fsdp-offload",
        SMALL,
    ),
    validated("gpt2-sgd", "SGD", 20, "model=gpt2 seq=1024 mbs=8 dtype=fp32 optimizer=sgd", SMALL_GPT),
)
