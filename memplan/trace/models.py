"""Models of Hugging Face transformers from a configuration alone (no weights, no hub, no code of others), and where
their layers are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from .job import Job
from .recording import Buffer, Outline, Registered
from .storages import parameters_on_meta

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class UnknownModelError(Exception):
    """The installed transformers has no model for the configuration."""


def made(job: Job, *, on_meta: bool = False) -> torch.nn.Module:
    """The model in training mode, in the job's dtype, with its own loss; ``on_meta`` without memory for its
    parameters."""
    import transformers
    from transformers import initialization

    config = config_of(job)
    dtype = job.fsdp.parameters if job.fsdp is not None else job.dtype
    attention = "sdpa" if job.attention == "flash" else "eager"
    with initialization.no_init_weights(), parameters_on_meta() if on_meta else nullcontext():
        model = model_class(config)._from_config(config, dtype=DTYPES[dtype], attn_implementation=attention)
    for buffer in _kept_in_fp32(model):
        buffer.data = buffer.data.float()
    model.tie_weights()
    model.config.use_cache = False
    model.train()
    if job.recompute:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    assert isinstance(model, transformers.PreTrainedModel)
    return model


def _kept_in_fp32(model: Any) -> Iterator[torch.Tensor]:
    """Buffers that ``from_pretrained`` keeps in fp32 whatever the dtype (``modeling_utils.py``,
    ``_keep_in_fp32_modules_strict``)."""
    kept = model._keep_in_fp32_modules_strict or ()
    return (one for name, one in model.named_buffers() if any(part in name for part in kept))


def config_of(job: Job) -> Any:
    import transformers

    settings = {name: value for name, value in job.config.items() if name not in ("model_type", "auto_map")}
    try:
        config = transformers.AutoConfig.for_model(job.config["model_type"], **settings)
    except ValueError as error:
        raise UnknownModelError(f"transformers {transformers.__version__}: {error}") from None
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0  # which token changes no size
    if (getattr(config, "pad_token_id", None) or 0) >= (getattr(config, "vocab_size", None) or math.inf):
        config.pad_token_id = None
    return config


def model_class(config: Any) -> Any:
    """The class with a head: that of the configuration's ``architectures``, else masked, causal, sequence-to-
    sequence language model or image classifier, the first that there is; with an encoder, one that runs it."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if named is not None and name.endswith(_WITH_LOSS):
            return named
    mappings: tuple[Any, ...] = (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
    if not config.is_encoder_decoder:  # else its decoder alone
        mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING, *mappings)
    mappings = (*mappings, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING)
    if not getattr(config, "is_decoder", False) and not config.is_encoder_decoder:
        mappings = (auto.MODEL_FOR_MASKED_LM_MAPPING, *mappings)
    for mapping in mappings:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, list | tuple) else found
    raise UnknownModelError(f"transformers {transformers.__version__} has no model with a loss for {config.model_type}")


_WITH_LOSS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForImageClassification")


def example_inputs(job: Job, model: Any) -> dict[str, torch.Tensor]:
    """Inputs of one micro-batch and its labels."""
    b, s, config = job.b, job.s, model.config
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.empty(b, config.num_channels, height, width, dtype=DTYPES[job.dtype])
        return {"pixel_values": pixels, "labels": torch.zeros(b, dtype=torch.int64)}
    if model.main_input_name == "input_features":
        frames = 2 * config.max_source_positions
        features = torch.empty(b, config.num_mel_bins, frames, dtype=DTYPES[job.dtype])
        return {"input_features": features, "labels": torch.zeros(b, s, dtype=torch.int64)}
    ids = torch.zeros(b, s, dtype=torch.int64)
    return {"input_ids": ids, "labels": torch.zeros(b, s, dtype=torch.int64)}


def randomise(inputs: dict[str, torch.Tensor], vocab: int) -> None:
    """Tokens of ``vocab`` at random, each its own label, so that a model can learn something; noise elsewhere."""
    for tensor in inputs.values():
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.random_(0, vocab)
    if "input_ids" in inputs:
        inputs["labels"].copy_(inputs["input_ids"])


def outline_of(model: torch.nn.Module) -> Outline:
    """Lists of equal modules that are in no other such list, and the norm that is registered behind the last."""
    modules = dict(model.named_modules())
    blocks: list[str] = []
    for name, module in modules.items():
        is_inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if isinstance(module, torch.nn.ModuleList) and len(module) and not is_inside and _are_layers(module):
            blocks.append(name)
    parameters = sum(_elements(one) for one in model.parameters())
    norm = _norm_behind(model, blocks[-1]) if blocks else ""
    return Outline(tuple(blocks), norm, parameters, tuple(_parameters(model)), tuple(_buffers(model)))


def _parameters(model: torch.nn.Module) -> Iterator[Registered]:
    roles = _roles(model)
    for path, one in model.named_parameters():
        yield Registered(path, tuple(one.shape), _dtype(one), one.requires_grad, roles.get(id(one), ""))


def _buffers(model: torch.nn.Module) -> Iterator[Buffer]:
    """A storage that several share is there once."""
    seen = set()
    for path, one in model.named_buffers():
        key = one.untyped_storage()._cdata
        if key not in seen and one.numel():
            seen.add(key)
            yield Buffer(path, one.untyped_storage().nbytes(), _dtype(one))


def _roles(model: torch.nn.Module) -> dict[int, str]:
    """What optimizers treat apart: tables of embeddings, and the head, unless it is one of them."""
    module: Any = model
    result: dict[int, str] = {}
    for one in (module.get_output_embeddings(),) if hasattr(model, "get_output_embeddings") else ():
        result |= {id(one.weight): "head"} if hasattr(one, "weight") else {}
    words = module.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    for one in model.modules():
        if isinstance(one, torch.nn.Embedding):
            result[id(one.weight)] = "word" if one is words else "position"
    return result


def _dtype(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bool": "uint8"}.get(name, name)


def _elements(parameter: torch.Tensor) -> int:
    state = getattr(parameter, "quant_state", None)  # bitsandbytes packs two numbers in a byte
    return parameter.numel() if state is None else math.prod(state.shape)


def _are_layers(modules: torch.nn.ModuleList) -> bool:
    return len({type(one) for one in modules}) == 1 and any(True for _ in modules[0].parameters())


def _norm_behind(model: torch.nn.Module, blocks: str) -> str:
    path, _, name = blocks.rpartition(".")
    siblings = [child for child, _ in model.get_submodule(path).named_children()]
    for child in siblings[siblings.index(name) + 1 :]:
        if "Norm" in type(model.get_submodule(f"{path}.{child}".lstrip("."))).__name__:
            return f"{path}.{child}".lstrip(".")
    return ""
