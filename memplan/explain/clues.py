"""What the frames of a traceback say of the tensor that was asked for: the phase, and what the tensor is about.

The names are those of functions and variables in PyTorch, Megatron-LM, DeepSpeed, transformers, torchtitan,
bitsandbytes and Accelerate, of any release: they have stayed the same where the lines around them have not.

Without a plan: what of the known models has the size in a message. Logits factor as tokens × vocabulary × bytes,
scores of attention as sequences × heads × length² × bytes, matrices as their two sides.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from math import prod
from typing import NamedTuple

from ..plan.library import learned_models, model_specs
from ..plan.spec import ModelSpec
from ..values import dataclass
from .log import Frame
from .message import OutOfMemory, Size


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
    shape: tuple[int, ...] = ()
    """What the innermost frame allocates, where it is code that torch.compile wrote; empty elsewhere."""
    itemsize: int = 0
    """Bytes of an element of it."""


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
            r"_move_model_to_device|Loading checkpoint|:from_pretrained|:_load_pretrained_model|:_?load_state_dict"
            r"|:load_checkpoint|:get_model\b|\bload_model(?:\b$|\()|\b(?:self|model|module)\.cuda\(|\bmodel\.to\("
            r"|module\.py:(?:convert|_apply|to|cuda)\b|:set_module_tensor_to_device"
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
        "logits|cross_entropy|lm_head|output_layer|float16_to_fp32|convert_\\w*to_fp32|post_language_model|log_softmax"
        "|log_probs",
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

SAVED = _about("a parameter that is copied", "$^", "$^")
"""While a checkpoint is saved, whatever layer a frame names it by."""

_ALLOCATES = re.compile(
    r"empty_strided_?\w{0,8}\(\(([0-9]{1,12}(?:, [0-9]{1,12}){0,7}),?\), .{1,120}torch\.[a-z]+([0-9]{1,2})"
)
"""Inductor's ``buf706 = empty_strided_cuda((65536, 65536), (65536, 1), torch.bfloat16)``."""
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
    made = _ALLOCATES.search(texts[-1]) if texts else None
    phase = moment(texts)
    kinds = (SAVED,) if about and phase == "checkpoint" else tuple(about.values())
    return Clues(
        phase,
        kinds,
        fp32,
        told or (frames[-1] if made else None),
        tuple(frame.file for frame in reversed(frames)),
        tuple(map(int, made[1].split(", "))) if made else (),
        int(made[2]) // 8 if made else 0,
    )


SEGMENT = 2 << 20
"""Large requests are rounded to it (``kRoundLarge``)."""
LEAST = 24 << 20
"""Bytes below which too much has any size."""
USUAL_TOKENS = tuple(
    sorted(factor << power for factor, powers in ((1, range(9, 18)), (3, range(9, 16))) for power in powers)
)
"""Micro-batch × sequence as people choose them, from 512 to 131,072: powers of two, and three times such."""
BYTES_A_PARAMETER = 1 / 16
"""Half a byte on each of eight GPUs: a model with more parameters would not be in what the message says is
allocated."""
MOST = 3


@dataclass(frozen=True, slots=True)
class Guess:
    """A tensor that has the size."""

    what: str
    """``logits``, ``attention scores`` or ``weights``."""
    factors: str
    """``16,384 tokens × 128,256 × 2 bytes``."""
    of: str
    """Models that have it."""


class _Spec(NamedTuple):
    name: str
    vocab: int
    hidden: int
    ffn: int
    heads: int
    layers: int

    @property
    def parameters(self) -> int:
        """About as many: attention's four and the MLP's three matrices, embedding and head."""
        return self.layers * self.hidden * (4 * self.hidden + 3 * self.ffn) + 2 * self.vocab * self.hidden


@lru_cache(maxsize=1)
def _specs() -> tuple[_Spec, ...]:
    """Sizes of the built-in models, read without checking: they are this package's own files."""
    found = []
    fields = _Spec._fields[1:]
    wanted = re.compile(rf"^({'|'.join(fields)}): *(\d+)", re.MULTILINE)
    for name, path in model_specs().items():
        numbers = dict(wanted.findall(path.read_text(encoding="utf-8")))
        if "hidden" in numbers:
            numbers.setdefault("ffn", 4 * int(numbers["hidden"]))
        if len(numbers) == len(fields):
            found.append(_Spec(name, *(int(numbers[key]) for key in fields)))
    return tuple(found)


@lru_cache(maxsize=1)
def _learned_specs() -> tuple[_Spec, ...]:
    """Sizes of the models that ship learned, by the keys of their ``config.json``."""
    keys = (
        ("vocab_size", "padded_vocab_size"),
        ("hidden_size",),
        ("intermediate_size", "ffn_hidden_size"),
        ("num_attention_heads",),
        ("num_hidden_layers", "num_layers"),
    )
    found = []
    for name, model in learned_models().items():
        config = model.configuration()
        numbers = [next((config[key] for key in named if key in config), None) for named in keys]
        if all(isinstance(number, int) for number in numbers):
            found.append(_Spec(name, *(int(number) for number in numbers if number is not None)))
    return tuple(found)


def guesses(message: OutOfMemory, clues: Clues, model: ModelSpec | None = None) -> tuple[Guess, ...]:
    """What may have been asked for, the likeliest first, by the run's ``model`` where that is known; nothing where the
    frames are of something else, or many things have this size as well."""
    tried = message.tried
    if tried is None or tried.most < LEAST:
        return ()
    about = next((one.name for one in clues.about), "")
    allowed = (message.allocated or 1 << 60) / BYTES_A_PARAMETER
    named = _named(clues)
    specs = named or tuple(sorted((one for one in _specs() if one.parameters <= allowed), key=_is_large(message)))
    if model is not None and model.has_sizes:
        specs = (_Spec(model.name, model.vocab, model.hidden, model.ffn, model.heads, model.layers),)
        named = specs if about == "the logits" else ()
    if about == "the logits":
        found = _logits(tried, specs, clues, named=bool(named))
    elif about == "attention":
        found = _scores(tried, specs)
    elif about in ("dequantised weights", "weights that are moved to the GPU", SAVED.name) or clues.phase == "loading":
        found = _matrices(tried, specs)
    elif clues.shape and _fits(tried, clues.itemsize * prod(clues.shape)):
        factors = f"{' × '.join(f'{side:,}' for side in clues.shape)} × {clues.itemsize} bytes"
        found = iter([Guess("buffer", factors, "the line that torch.compile wrote")])
    elif not about and clues.phase in ("", "forward", "backward"):
        logits = [*_logits(tried, specs, clues, named=bool(named))]
        weights = [*_matrices(tried, (*specs, *(() if named else _learned_specs())))]
        found = iter([*logits[:1], *weights[:1], *logits[1:], *weights[1:]])
    else:
        return ()
    return tuple(islice(found, MOST if about else 2))


def _is_large(message: OutOfMemory) -> Callable[[_Spec], bool]:
    """Whether a model's weights in 16 bits are more than what was allocated: only a sharded or quantised one is."""
    most = (message.allocated or 1 << 60) // 2
    return lambda spec: spec.parameters > most


def _named(clues: Clues) -> tuple[_Spec, ...]:
    """The models whose code the frames name: ``transformers/models/qwen2/modeling_qwen2.py``."""
    for file in [*([clues.frame.file] if clues.frame else []), *clues.files]:
        match = re.search(r"modeling_([a-z0-9]{2,30})\.py", file)
        if match:
            return tuple(one for one in _specs() if one.name.replace("-", "").startswith(match[1].replace("_", "")))
    return ()


def _fits(tried: Size, size: int) -> bool:
    return tried.is_printed_of(-(-size // SEGMENT) * SEGMENT)


def _logits(tried: Size, specs: tuple[_Spec, ...], clues: Clues, *, named: bool) -> Iterator[Guess]:
    """Of a usual number of tokens, the vocabulary of most models first; of the model that a frame names any number,
    the roundest. In fp32, which losses compute in, or in 16 bits and twice as many. Megatron pads vocabularies and
    cuts them."""
    megatron = any("megatron" in file.lower() for file in clues.files)
    known: defaultdict[int, list[_Spec]] = defaultdict(list)
    for spec in specs:
        known[spec.vocab].append(spec)
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for vocab, models in known.items():
        for parts in (1, 2, 4, 8) if megatron else (1,):
            padded = -(-vocab // (128 * parts)) * 128 * parts if megatron else vocab
            row = padded // parts * 4
            usual = [tokens for tokens in USUAL_TOKENS if _fits(tried, tokens * row)]
            tokens = (
                usual[0] if usual else named and _roundest(max((tried.least - SEGMENT) // row, 1), tried.most // row)
            )
            if tokens and _fits(tried, tokens * row):
                found.setdefault((parts, tokens), []).append((len(models), padded, vocab))
    for (parts, tokens), alike in sorted(found.items(), key=lambda one: (one[0][0], -max(one[1])[0])):
        alike.sort(key=lambda one: -one[0])
        sides = [f"{padded:,}" for _, padded, _ in alike]
        side = _or(sides) if parts == 1 else f"{_or(sides)} / {parts}"
        names = [spec.name for _, _, vocab in alike for spec in known[vocab]]
        yield Guess("logits", f"{tokens:,} tokens × {side} × 4 bytes, or {2 * tokens:,} × 2 bytes", _listed(names))


def _or(sides: list[str]) -> str:
    """Vocabularies that are so alike that the size is the same, the commonest first."""
    if len(sides) > 3:
        return f"{', '.join(sides[:3])} or {len(sides) - 3} like it"
    return " or ".join(filter(None, (", ".join(sides[:-1]), sides[-1])))


def _roundest(least: int, most: int) -> int:
    """The number from ``least`` to ``most`` with the most factors of 2; 0 where there is none."""
    for power in range(24, -1, -1):
        number = most >> power << power
        if number >= least and number:
            return number
    return 0


def _listed(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 2 else " and ".join(names)


def _scores(tried: Size, specs: tuple[_Spec, ...]) -> Iterator[Guess]:
    heads: dict[int, str] = {}
    for spec in specs:
        heads.setdefault(spec.heads, spec.name)
    found = []
    for count, name in heads.items():
        for width in (2, 4):
            for length in (512, 1024, 2048, 4096, 8192, 16384, 32768):
                one = count * length * length * width
                batch = tried.most // one
                if 1 <= batch <= 64 and batch & batch - 1 == 0 and _fits(tried, batch * one):
                    found.append((batch, -length, width, count, name))
    for batch, length, width, count, name in sorted(found):
        many = f"{batch} sequences × " if batch > 1 else ""
        yield Guess(
            "attention scores", f"{many}{count} heads × {-length:,}² × {width} bytes", f"{name}, eager attention"
        )


def _matrices(tried: Size, specs: tuple[_Spec, ...]) -> Iterator[Guess]:
    """Those that most models have first; 8-bit weights, and a gate in one with what it gates (GLM, Phi-3), after the
    others. Embedding and head stay in 16 bits or more."""
    shapes: dict[tuple[bool, str, str], list[_Spec]] = {}
    for spec in specs:
        for half_bytes, text in ((8, "4 bytes"), (4, "2 bytes"), (2, "1 byte"), (1, "half a byte")):
            for times, side, what in ((1, spec.ffn, "MLP"), (2, spec.ffn, "MLP"), (1, spec.vocab, "embedding or head")):
                if (
                    (half_bytes < 4 and side == spec.vocab)
                    or (half_bytes == 8 and times == 2)
                    or not _fits(tried, times * side * spec.hidden * half_bytes // 2)
                ):
                    continue
                factors = f"{'2 × ' * (times - 1)}{side:,} × {spec.hidden:,} × {text}"
                shapes.setdefault((half_bytes == 2 or times == 2, factors, what), []).append(spec)
    for (_, factors, what), alike in sorted(shapes.items(), key=lambda one: (one[0][0], -len(one[1]))):
        yield Guess("weights", factors, f"{what} of {_listed([one.name for one in alike])}")
