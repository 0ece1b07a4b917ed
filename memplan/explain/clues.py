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
    """``forward``, ``backward``, ``step``, ``evaluation``, ``checkpoint``, ``initialisation`` or ``loading``; empty
    where nothing says it."""
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


MOMENTS = (
    (
        "evaluation",
        _pattern(
            r":evaluation_loop|:prediction_(?:loop|step)|:evaluate(?:_and_print\w*)?\b|:validation_step|:predict\b"
            r"|trainer_pt_utils\.py:|:nested_(?:concat|gather|numpify|detach)|:_?pad_across_processes"
        ),
    ),
    (
        "checkpoint",
        _pattern(
            r":(?:_save_to_)?state_dict\b|:_?save_(?:checkpoint|model|pretrained|state|16bit_model)\b|:undo_layout"
            r"|:_?consolidat|_state_dict_utils\.py:|:_?summon_full_params|dist_checkpointing/\S*:save"
            r"|serialization\.py:(?:save|_save)\b|Failed to clone\(\) tensor"
        ),
    ),
    (
        "initialisation",
        _pattern(
            r"initialize_optimizer_states|:flatten_params|:_init_(?:param_handle|flat_param|sharded_param)|:fully_shard\b"
            r"|:setup_model_and_optimizer|:get_megatron_optimizer|:_build_model_and_main_param_groups|:initialize\b"
            r"|:_configure_(?:zero_|fp16_|bf16_)?optimizer|:_prepare_(?:deepspeed|fsdp2?)\b|:_setup_for_real_optimizer"
            r"|:_create_fp(?:16|32)_(?:partitions|sub_groups)|zero/stage\w*\.py:__init__|:_convert_to_deepspeed_param"
            r"|(?:param_and_grad_buffer|distrib_optimizer)\.py:__init__"
        ),
    ),
    (
        "loading",
        _pattern(
            r"_move_model_to_device|:from_pretrained|:_load_pretrained_model|:_?load_state_dict|:load_checkpoint"
            r"|:_load_state_dict|:get_model\b|\bload_model(?:\b$|\()|\b(?:self|model|module)\.cuda\(|\bmodel\.to\(|module\.py:(?:convert|_apply|to|cuda)\b|:set_module_tensor_to_device"
        ),
    ),
    (
        "backward",
        _pattern(
            r":(?:_exec_|custom_)?backward(?:_step|_pass)?\b|\.backward\(|:allreduce_params|:finalize_model_grads|run_backward"
            r"|:_(?:post|pre)_backward|zero/stage\w*\.py:\w*(?:reduce|ipg|partition_grad)|:foreach_reduce\b"
        ),
    ),
    (
        "step",
        _pattern(
            r"optimizer\.step\(|:_?(?:exec_)?optimizer_step|torch/optim/(?!lr_scheduler)|distrib_optimizer\.py:|exp_avg"
            r"|(?:zero/stage\w*|runtime/engine|optimizer\w*|adam\w*|lamb|lion|sgd|adafactor|muon)\.py:step"
            r"|:_take_model_step|adam\w*\.py:(?:_\w*adam\w*|update)|:step_with_ready_grads"
        ),
    ),
    (
        "forward",
        _pattern(
            r":forward(?:_step)?\b|\.forward\(|forward_call|:compute_loss|_exec_forward|:_(?:wrapped_)?call_impl\b"
            r"|loss/loss_utils\.py:|torch/nn/functional\.py:|cross_entropy_loss\(|log_softmax\("
        ),
    ),
)
"""Moments by what marks them in a frame, the telling ones first.

Evaluation has a forward pass, and saving a checkpoint gathers what a forward pass does, so the outer frame tells. Of
DeepSpeed's ``runtime/zero/stage3.py`` initialisation is ``_setup_for_real_optimizer``, ``_create_fp32_partitions``,
``initialize_optimizer_states`` (which calls the optimizer's step), and the step ``_optimizer_step``; transformers'
``loss/loss_utils.py`` (``ForCausalLMLoss``, ``fixed_cross_entropy``) runs in forward alone; ``trainer_pt_utils.py``
(``nested_concat``, ``torch_pad_and_concatenate``) keeps what evaluation predicts."""
BEFORE_TRAINING = ("initialisation", "loading")


def moment(texts: Sequence[str]) -> str:
    """When the innermost of the frames ``texts`` was called, as far as they prove it; else empty.

    Recompute runs forward frames again within backward; a closure of the optimizer's step runs forward and backward
    within it; what is offloaded moves to the GPU within forward.
    """
    at = {name: [number for number, text in enumerate(texts) if one.search(text)] or [-1] for name, one in MOMENTS}
    begun, forward = at["forward"][0], at["forward"][-1]
    for told in (("evaluation",), ("checkpoint",), BEFORE_TRAINING, ("backward", "step")):
        found = max(told, key=lambda name: at[name][-1])
        last = at[found][-1]
        if last >= 0 and not (told == BEFORE_TRAINING and 0 <= begun < last):
            return "forward" if found == "step" and forward > last else found
    return "forward" if forward >= 0 else ""


def _about(name: str, frame: str, tensor: str) -> About:
    return About(name, _pattern(frame), _pattern(tensor))


ABOUT = (
    _about("the copy of second moments that the step makes", r"_foreach_sqrt|\.sqrt\(\)|\bdenom\b", "sqrt|denom"),
    _about(
        "optimizer states",
        "exp_avg|init_state|initialize_optimizer_states|_init_group|momentum_buffer",
        "optimizer_states|exp_avg|momentum",
    ),
    _about("main parameters", r"_create_fp32_partitions|fp32_partitioned_groups|main_param", "main_parameters"),
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
    about: dict[str, About] = {}
    told: Frame | None = None
    for frame, text in zip(reversed(frames), reversed(texts), strict=True):
        for one in ABOUT:
            if one.frame.search(text):
                about.setdefault(one.name, one)
                told = told or frame
    fp32 = any(map(_FP32.search, texts[-2:]))
    return Clues(moment(texts), tuple(about.values()), fp32, told, tuple(frame.file for frame in reversed(frames)))
