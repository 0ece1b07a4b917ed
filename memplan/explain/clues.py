"""What the frames of a traceback say of the tensor that was asked for: the phase, and what the tensor is about.

The names are those of functions and variables in PyTorch, Megatron-LM, DeepSpeed, transformers, torchtitan,
bitsandbytes and Accelerate, of any release: they have stayed the same where the lines around them have not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..values import dataclass
from .log import Frame


@dataclass(frozen=True, slots=True)
class About:
    """A kind of tensor that a frame names."""

    name: str
    """For people: ``the logits``."""
    frame: re.Pattern[str]
    tensor: re.Pattern[str]
    """What the plan calls such tensors: searched for in ``module tensor category``."""


@dataclass(frozen=True, slots=True)
class Clues:
    """What a traceback says."""

    phase: str = ""
    """``forward``, ``backward``, ``step``, ``evaluation`` or ``loading``; empty where nothing says it."""
    about: tuple[About, ...] = ()
    """From the innermost frame outwards, each kind once."""
    fp32: bool = False
    """The innermost frame casts to fp32."""
    frame: Frame | None = None
    """The innermost one that says something."""
    files: tuple[str, ...] = ()
    """Of all frames, from the innermost outwards."""


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


PHASES = (
    (
        "evaluation",
        _pattern(
            r":evaluation_loop|:prediction_(?:loop|step)|:evaluate(?:_and_print\w*)?\b|:validation_step|:nested_concat"
            r"|:predict\b|:torch_pad_and_concatenate"
        ),
    ),
    (
        "loading",
        _pattern(
            r"_move_model_to_device|:from_pretrained|:_load_pretrained_model|:_load_state_dict|:load_checkpoint"
            r"|:get_model\b|\bload_(?:model|weights)\w*|module\.py:(?:convert|_apply|to|cuda)\b"
            r"|\b(?:self|model|module)\.cuda\(|\bmodel\.to\(|initialize_optimizer_states|:flatten_params"
            r"|:setup_model_and_optimizer|:_configure_(?:zero_|fp16_|bf16_)?optimizer|:initialize\b|_init_param_handle"
            r"|:fully_shard\b|:_setup_for_real_optimizer|:_create_fp(?:16|32)_\w+"
        ),
    ),
    (
        "backward",
        _pattern(
            r":backward(?:_step)?\b|\.backward\(|:allreduce_params|:finalize_model_grads|run_backward"
            r"|:_(?:post|pre)_backward"
        ),
    ),
    (
        "step",
        _pattern(
            r"optimizer\.step\(|:_?optimizer_step|torch/optim/|distrib_optimizer\.py:|exp_avg"
            r"|(?:adam\w*|lamb|lion|sgd|adafactor)\.py:(?:step|_\w*adam\w*|update)"
        ),
    ),
    (
        "forward",
        _pattern(
            r":forward(?:_step)?\b|\.forward\(|forward_call|:compute_loss|_exec_forward|:\w+Loss\b|cross_entropy\b|loss_utils\.py:"
        ),
    ),
)
"""Phases by what marks them, the telling ones first: backward runs forward frames again, evaluation has a forward."""


def _about(name: str, frame: str, tensor: str) -> About:
    return About(name, _pattern(frame), _pattern(tensor))


ABOUT = (
    _about("the copy of second moments that the step makes", r"_foreach_sqrt|\.sqrt\(\)|\bdenom\b", "sqrt|denom"),
    _about(
        "optimizer states",
        "exp_avg|init_state|initialize_optimizer_states|_init_group|momentum_buffer",
        "optimizer_states|exp_avg|momentum",
    ),
    _about(
        "fp32 copies of the parameters", r"_create_fp32_partitions|fp32_(?:groups_flat|partition)", "main_parameters"
    ),
    _about(
        "gathered parameters",
        r"unshard|all_?gather|fetch_sub_module|partition_parameters\.py",
        "all_gather|gathered|unsharded",
    ),
    _about("dequantised weights", "dequantize", "dequantised"),
    _about(
        "weights that are moved to the GPU",
        r"_move_model_to_device|\bt\.to\(|Params4bit|model\.to\(|super\(\)\.to\(device|\b(?:self|model|module)\.cuda\(",
        r"\bloading\b",
    ),
    _about(
        "gradients",
        "_flatten_dense_tensors|all_?reduce|reduce_scatter|(?:ipg|reduce)_bucket|grad_buffer|flat_grad",
        "gradients|reduce|bucket|flat",
    ),
    _about(
        "the logits",
        "logits|cross_entropy|lm_head|output_layer|float16_to_fp32|post_language_model|log_softmax|log_probs",
        r"\blogits|log_prob|\bloss\b",
    ),
    _about(
        "attention",
        r"attn_(?:weights|output)|attention_(?:probs|scores)|core_attention|dot_product|self_attn|attention\.py"
        "|query_states|baddbmm|flash_attn|attn_mask|_canonical_mask",
        "scores|probab|attention|context|query|key|value|qkv|mask",
    ),
    _about(
        "the MLP",
        r"\bmlp\b|act_fn|(?:down|gate|up)_proj|\bfc[12]\b|gelu|silu|swiglu|c_fc|h_to_4h|intermediate",
        r"gate|\bup\b|up_|down|mlp|gelu|silu|tanh",
    ),
    _about("an embedding", r"\bwte\b|embed_tokens|embedding", "embedding|word"),
    _about("a norm", "(?:layer|rms)_?norm", "norm"),
)

_FP32 = _pattern(r"\.float\(\)|torch\.float32|float16_to_fp32")


def clues(frames: Sequence[Frame]) -> Clues:
    """What ``frames`` say, from the outermost to the innermost."""
    texts = [str(frame) for frame in frames]
    whole = "\n".join(texts)
    phase = next((name for name, pattern in PHASES if pattern.search(whole)), "")
    about: dict[str, About] = {}
    told: Frame | None = None
    for frame, text in zip(reversed(frames), reversed(texts), strict=True):
        for one in ABOUT:
            if one.frame.search(text):
                about.setdefault(one.name, one)
                told = told or frame
    fp32 = any(map(_FP32.search, texts[-2:]))
    return Clues(phase, tuple(about.values()), fp32, told, tuple(frame.file for frame in reversed(frames)))
