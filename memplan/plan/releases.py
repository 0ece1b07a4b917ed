"""Releases of the libraries that fine-tuning runs: which are followed, which go together, and where their code changed.

A plan names them (``versions``); the newest is the default. Where the code of a release differs in what it allocates,
its first release stands here under a name, with file and function; recipes compare with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from ..device.gpus import GPUS
from ..values import dataclass

if TYPE_CHECKING:
    from .plan import Plan

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Library:
    """What is followed of a library."""

    oldest: Version
    newest: Version
    needs: tuple[tuple[Version, Mapping[str, Version]], ...] = ()
    """From a release on, the lowest releases of others that its metadata asks for (``setup.py``, ``requirements.txt``,
    ``pyproject.toml``), or that its code refuses to run without."""


TRANSFORMERS_OF_TRL: tuple[tuple[Version, Version], ...] = (
    ((0, 10), (4, 45)),
    ((0, 12), (4, 46)),
    ((0, 13), (4, 47)),
    ((0, 14), (4, 48)),
    ((0, 16), (4, 50)),
    ((0, 17), (4, 51)),
    ((0, 18), (4, 52)),
    ((0, 20), (4, 54)),
    ((0, 21), (4, 55)),
    ((0, 22), (4, 56)),
    ((0, 24), (4, 57)),
)
"""From a release of trl on, the newest transformers that was out with it, or for 0.10 and 0.11 the oldest that is
followed;"""

TRL_TAKES_5: Version = (1, 1)
"""before this one trl takes none from 5 on (``pyproject.toml``, 0.28 to 1.0: ``transformers<5.0.0``), or was out before
there was one."""

LIBRARIES: Mapping[str, Library] = {
    "transformers": Library(
        (4, 45),
        (5, 23),
        (
            ((4, 45), {"accelerate": (0, 26)}),
            ((5, 0), {"accelerate": (1, 1)}),
            ((5, 23), {"peft": (0, 20)}),  # integrations/peft.py, MIN_PEFT_VERSION
        ),
    ),
    "peft": Library((0, 12), (0, 21)),
    "trl": Library(
        (0, 10),
        (1, 14),
        (
            ((0, 10), {"transformers": (4, 40)}),
            ((0, 12), {"transformers": (4, 46), "accelerate": (0, 34)}),
            ((0, 18), {"transformers": (4, 50), "accelerate": (0, 34)}),
            ((0, 19), {"transformers": (4, 51), "accelerate": (1, 4)}),
            ((0, 20), {"transformers": (4, 53, 2), "accelerate": (1, 4)}),
            ((0, 21), {"transformers": (4, 55), "accelerate": (1, 4)}),
            ((0, 24), {"transformers": (4, 56, 1), "accelerate": (1, 4)}),
        ),
    ),
    "accelerate": Library((0, 26), (1, 15)),
    "bitsandbytes": Library((0, 43), (0, 50)),
    "torch": Library((2, 4), (2, 13)),
}
"""By the name under which pip installs them. trl is a training loop of its own: only a plan that names it has it."""

OLDEST_TORCH: Version = (1, 6)
"""What the oldest code runs on (code 2020); a plan's ``torch``, without releases of other libraries, may be as old."""

# -- transformers

LOSS_FUNCTION: Version = (4, 46)
"""Logits are upcast in the loss (``loss/loss_utils.py``, ``ForCausalLMLoss``); before, the model's ``forward`` upcasts
them and returns them in fp32 (``models/llama/modeling_llama.py``, ``LlamaForCausalLM.forward``)."""

PADDED_LABELS: Version = (4, 49)
"""Labels are padded and shifted; before, logits are, in a contiguous copy (``ForCausalLMLoss``)."""

LOGITS_TO_KEEP: Version = (4, 49)
"""``forward`` has the argument of this name; before, it is ``num_logits_to_keep``, which trl calls it no longer."""

ATTENTION_FUNCTIONS: Version = (4, 48)
"""Models share attention functions: each projection is seen as heads at once, and ``integrations/sdpa_attention.py``
makes queries, keys and values contiguous, whatever the mask."""

GROUPED_SDPA: Version = (4, 54)
"""sdpa takes fewer key heads as they are, from PyTorch 2.5 (``use_gqa_in_sdpa``); before, they are repeated."""

STRIDED_SDPA: Version = (4, 56)
"""sdpa takes queries, keys and values as they lie."""

SCALED_ANGLES: Version = (4, 51)
"""Cosines are made and scaled before sines (``LlamaRotaryEmbedding.forward``); before, both are made, then scaled."""

MASKS: Version = (4, 53)
"""Masks of eager attention are made as today, and packed rows are looked for (``masking_utils.py``)."""

PACKAGES: Mapping[str, Version] = {"flash_attention_2": (), "flash_attention_3": (), "flash_attention_4": (5, 4)}
"""Releases 2 to 4 of the flash-attention package, as ``attn_implementation`` names them, and the transformers since
which there is one that not all have (``modeling_flash_attention_utils.py``)."""

MULTIPLIED_ANGLES: Version = (5, 23)
"""Angles are a product of numbers; up to 5.2 at least of matrices, and positions in fp32 stay in a variable
(``LlamaRotaryEmbedding.forward``)."""

SUMMED_POSITIONS: Version = (5, 0)
"""Positions are counted from nought and what was seen before is added (``LlamaModel.forward``); before, they are
counted from there."""

STACKED_EXPERTS: Version = (5, 0)
"""All experts of a layer are two parameters, and run as one (``integrations/moe.py``); before, each is a module of its
own, and one runs after the other (``models/mixtral/modeling_mixtral.py``, ``MixtralSparseMoeBlock.forward``)."""

SORTED_ONCE: Version = (5, 23)
"""Rows are sorted as they are chosen (``grouped_mm_experts_forward``); in 5.0 they are chosen, then sorted."""

NOT_REENTRANT: Version = (5, 0)
"""``gradient_checkpointing_enable`` asks for ``use_reentrant=False`` (``modeling_utils.py``); before, for ``True``."""

WEIGHTS_ON_META: Version = (5, 23)
"""Under FSDP all ranks but the first leave parameters on the meta device (``modeling_utils.py``,
``_move_missing_keys_from_meta_to_device``); 5.22 and before made zeros, or nothing, on the CPU."""

ARGUMENTS_OF_SGD: Version = (5, 3)
"""The Trainer's SGD takes ``optim_args`` (``trainer_optimizer.py``, ``_get_sgd``); before, none of them."""

CHECKPOINT_DTYPE: Version = (5, 0)
"""``from_pretrained`` without a dtype loads parameters as the checkpoint has them (``modeling_utils.py``, ``dtype =
"auto"``; ``_get_dtype``: what ``config.json`` says); before, in torch's default, fp32."""

# -- torch

CLAMPED_SLICES: Version = (2, 9)
"""``x[:]`` is an alias; before, a slice of all (``ATen/TensorIndexing.h``, ``applySlice``: ``sym_le``, once
``sym_eq``)."""

FLUSHES_MIB: Version = (2, 6)
"""Comes with Triton 3.2, which flushes the L2 cache with 256 MiB (``backends/nvidia/driver.py``,
``get_empty_cache_for_benchmark``); before, with 256 MB (``testing.py``, ``do_bench``)."""

# -- peft

GPTQ_CASTS: Version = (0, 16)
"""Inputs of adapters on GPTQ's weights are cast under autocast, too, and their outputs are added to a new tensor
(``tuners/lora/gptq.py``, ``GPTQLoraLinear.forward``)."""

# -- trl, SFTTrainer

TRL_NOT_REENTRANT: Version = (0, 27)
"""``SFTConfig.__post_init__`` asks for ``use_reentrant=False``."""

TRL_FORCES_REENTRANCE: Version = (0, 28)
"""Beside adapters under ZeRO-3, ``SFTTrainer.__init__`` sets ``use_reentrant`` to true, whatever was asked for; the
trainers of 1.16 all do."""

TRL_16_BIT_ADAPTERS: Version = (0, 26)
"""4-bit models are not prepared (``prepare_model_for_kbit_training``), and adapters beside them are cast to bf16;
before, they are prepared, and with bf16 head and embeddings are cast back (``trainer/utils.py``,
``peft_module_casting_to_bf16``)."""

TRL_LOADS_FP32: Version = (0, 27)
"""A model that a trainer is given by name, and that of trl's scripts, is loaded in fp32 (``trainer/utils.py``,
``create_model_from_path``; ``trainer/model_config.py``, ``dtype``); before, as transformers does by itself."""

TRL_TILES: Version = (1, 15)
"""SFTTrainer and DPOTrainer make no logits (``trainer/utils.py``, ``add_fused_lm_head``)."""

TRL_SCORES_IN_STEP: tuple[Version, Version] = ((0, 18), (0, 19))
"""From the first of these until the second GRPOTrainer's reference runs within the loss (``trainer/grpo_trainer.py``,
``_compute_loss``); before and after, where completions are scored (``_generate_and_score_completions``)."""

TRL_NEWEST: Version = (1, 16)
"""The newest release whose SFTTrainer, DPOTrainer, GRPOTrainer and RewardTrainer are followed."""

# -- accelerate

ENDS_APART: Version = (1, 14)
"""``fully_shard`` on the embedding, and on final norm and head together, and the model's own unit stays gathered
(``utils/fsdp_utils.py``, ``fsdp2_prepare_model``); before, that unit has them all, and is resharded as the layers."""

TIED_TOGETHER: Version = (1, 15)
"""A head that is the embedding is in one unit with it; in 1.14 it is outside (``fsdp2_prepare_model``)."""

# -- bitsandbytes

CODE_COPIED: Version = (0, 46)
"""Every doubly quantised weight has a copy of the table of 8-bit values (``functional.py``, ``quantize_blockwise``);
before, all share one."""

LOOKED_UP: Version = (0, 48)
"""4-bit values are looked up in a table; before, branches lead to each (``dDequantizeNF4``; pull request 1746)."""


def parsed(version: str) -> Version:
    return tuple(int(part) for part in version.split("."))


def release(plan: Plan, library: str) -> Version:
    """The release of ``library`` that the plan runs."""
    named = plan.versions.get(library)
    return parsed(named) if named is not None else LIBRARIES[library].newest


def beyond_known(torch: str | None) -> str | None:
    """What is taken for a release of torch that came out after all that are followed; ``None`` for others."""
    newest = LIBRARIES["torch"].newest
    if torch is None or parsed(torch)[: len(newest)] <= newest:
        return None
    return f"torch {torch} is assumed to behave like {shown(newest)}, the newest release that memplan knows"


def transformers_of(trl: str) -> Version | None:
    """What runs beside a release of trl, where nobody says so; ``None`` for the newest, and for what is no release."""
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3}){1,2}", trl) or parsed(trl) >= TRL_TAKES_5:
        return None
    return next((its for first, its in reversed(TRANSFORMERS_OF_TRL) if first <= parsed(trl)), None)


def has_trl(plan: Plan) -> bool:
    """One of trl's trainers runs the model."""
    kind = plan.trainer.kind
    return kind.run_by_trl if kind.own_loss else "trl" in plan.versions


def prepares(plan: Plan) -> bool:
    """Whether trl prepares quantised models (``prepare_model_for_kbit_training``), as all of its trainers did before
    0.26, and those of pairs without a reference do (``experimental/orpo/orpo_trainer.py``)."""
    return has_trl(plan) and (plan.trainer.kind.prepares or release(plan, "trl") < TRL_16_BIT_ADAPTERS)


def adapters_in_16_bits(plan: Plan) -> bool:
    """Whether trl casts adapters to bf16, as it does beside 4-bit weights since 0.26, whatever the run's own dtype."""
    return has_trl(plan) and not prepares(plan) and plan.quantisation.kind != "none"


def reentrant(plan: Plan) -> bool:
    """Gradient checkpointing's default."""
    if has_trl(plan) and release(plan, "trl") >= TRL_NOT_REENTRANT:
        return False
    return release(plan, "transformers") < NOT_REENTRANT


def forces_reentrance(plan: Plan) -> bool:
    """Whether trl makes checkpoints reentrant that were asked for without reentrance."""
    adapted = plan.lora.rank is not None and plan.layout.zero == 3 and plan.recompute.mode == "full"
    return adapted and has_trl(plan) and release(plan, "trl") >= TRL_FORCES_REENTRANCE


def casts_back(plan: Plan) -> bool:
    """After ``prepare_model_for_kbit_training``, trl casts head and embeddings to bf16 again, where the Trainer is told
    to train in bf16."""
    told = plan.precision.autocast and plan.precision.dtype == "bf16"
    return told and prepares(plan)


WIDEST_FLASH = 256
"""Features of a head that the flash kernel takes (``check_head_dim_size_flash``)."""


def sdpa_kernel(plan: Plan, *, full: bool = False) -> Literal["flash", "memory-efficient", "math"]:
    """What ``scaled_dot_product_attention`` runs without a mask (``sdp_utils.cpp``), in layers that see all tokens if
    ``full``. The flash kernel takes 16 bits (``check_tensor_dtype``) and heads of up to 256 features, beyond which
    transformers repeats those of keys (``sdpa_attention.py``, ``use_gqa_in_sdpa``); in fp32 the memory-efficient one
    takes neither fewer heads of keys than of queries (``check_batch_size_and_num_heads_dense``) nor rows of broken
    words (``check_head_dim_size_mem_efficient``), and what is left is ``_scaled_dot_product_attention_math``, operator
    by operator."""
    spec = plan.model.of_full_layers if full else plan.model
    wide = full and spec.head_dim > WIDEST_FLASH
    if plan.precision.dtype != "fp32" and (not plan.quantisation.prepared or plan.precision.autocast):
        return "flash" if not wide else "math" if spec.head_dim % (2 * FP32_HEAD_MULTIPLE) else "memory-efficient"
    fewer = not wide and spec.heads > spec.kv_heads and release(plan, "transformers") >= GROUPED_SDPA
    return "math" if fewer or spec.head_dim % FP32_HEAD_MULTIPLE else "memory-efficient"


CUDNN_ATTENTION: Version = (2, 11)
"""PyTorch whose wheels are of CUDA 13, with a cuDNN whose attention ``scaled_dot_product_attention`` prefers on Hopper
and Blackwell,"""
DEPRIORITIZED = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
"""unless this variable is set (``sdp_utils.cpp``, ``check_prefer_cudnn_attention``)."""


def prefers_cudnn(plan: Plan) -> bool:
    """Whether that is cuDNN's in place of flash attention's: heads of up to 128 features, dropout in steps of 1/16
    (``check_cudnn_tensor_shapes``, ``check_cudnn_dropout``)."""
    gpu, spec = GPUS.get(plan.hardware.gpu or ""), plan.model
    major = gpu.compute_capability[0] if gpu is not None and gpu.compute_capability is not None else 0
    newer = plan.torch is None or parsed(plan.torch) >= CUDNN_ATTENTION
    preferred = newer and major in (9, 10) and not plan.environment.get(DEPRIORITIZED)
    widest = max(spec.head_dim, spec.full_head_dim)
    fits = widest <= 128 and not spec.head_dim % 8 and not spec.attention_dropout * 16 % 1
    return preferred and fits and sdpa_kernel(plan) == "flash"


FP32_HEAD_MULTIPLE = 4
"""Features of an fp32 head of the memory-efficient kernel: rows are of whole words of 16 bytes."""


def masked_kernel(plan: Plan) -> Literal["", "cudnn", "memory-efficient", "math"]:
    """What ``scaled_dot_product_attention`` runs where it is handed a mask: in layers with a sliding window from
    sequences as long as the window on, in all layers where a batch has padding (transformers' ``masking_utils.py``,
    ``_ignore_causal_mask_sdpa``) or an indexer picks keys, with heads of keys repeated (``sdpa_attention.py``,
    ``use_gqa_in_sdpa``); empty where there is none. The flash kernel takes no mask (``sdp_utils.cpp``,
    ``check_for_attn_mask``), the others do, in the order of ``priority_order``."""
    window, seq = plan.model.sliding_window, plan.batch.seq
    windowed = window is not None and seq is not None and seq >= window
    if plan.attention != "flash" or not (windowed or plan.padded or plan.model.index_heads):
        return ""
    if prefers_cudnn(plan):
        return "cudnn"
    return "memory-efficient" if takes_mask(plan) else "math"


def takes_mask(plan: Plan) -> bool:
    """Whether heads are whole words of the memory-efficient kernel, which takes masks."""
    words = FP32_HEAD_MULTIPLE if plan.precision.dtype == "fp32" else 2 * FP32_HEAD_MULTIPLE
    return not (plan.model.head_dim % words or plan.model.full_head_dim % words)


def takes_package(plan: Plan) -> bool:
    """Whether flash-attn's kernels run: in 16 bits, from Ampere on, with heads of up to 256 features
    (``csrc/flash_attn/flash_api.cpp``, ``mha_fwd``)."""
    gpu = GPUS.get(plan.hardware.gpu or "")
    capability = gpu.compute_capability if gpu is not None else None
    fits = plan.model.full_head_dim <= WIDEST_FLASH
    return fits and plan.precision.dtype != "fp32" and (capability is None or capability >= (8, 0))


def unmasked_scores(plan: Plan) -> bool:
    """Whether layers without a window keep scores (``sdpa_kernel``) beside others that are handed a mask."""
    spec = plan.model
    return plan.masks_windows and sdpa_kernel(plan, full=True) == "math" and any(map(spec.sees_all, range(spec.layers)))


def needed(name: str, version: Version) -> Mapping[str, Version]:
    """The lowest releases of other libraries that this one asks for."""
    found: Mapping[str, Version] = {}
    for first, needs in LIBRARIES[name].needs:
        found = needs if version >= first else found
    return found


def shown(version: Version) -> str:
    """As it is written."""
    return ".".join(map(str, version))
