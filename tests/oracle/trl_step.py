"""What trl's fused head, DPOTrainer, GRPOTrainer and RewardTrainer hold, on real tensors of the CPU: written to JSON,
since trl is no dependency.

Run with trl 1.16 (and datasets) importable: ``python -m tests.oracle.trl_step``. Triton's kernels, which allocate
nothing, take the place of the code for devices without them, and sums of products in fp32 that of copies (CUDA's
``addmm`` with ``out_dtype``).
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import transformers

from .tracer import Follow, Trace

HEADS = Path(__file__).parents[1] / "layers" / "trl_head_steps.json"
STEPS = Path(__file__).parents[1] / "frameworks" / "trl_dpo_steps.json"
MIXED_STEPS = Path(__file__).parents[1] / "frameworks" / "trl_sft_expert_steps.json"
AVERAGED_STEPS = Path(__file__).parents[1] / "frameworks" / "trl_sft_steps.json"
SCORED_STEPS = Path(__file__).parents[1] / "frameworks" / "trl_reward_steps.json"
GROUPED_STEPS = Path(__file__).parents[1] / "frameworks" / "trl_grpo_steps.json"

OUTPUTS = ["log_probs", "entropy", "mean_logits", "is_top1"]
BF16: dict[str, Any] = {"dtype": "bfloat16", "stored": "bfloat16", "autocast": False}
FP32: dict[str, Any] = {"dtype": "float32", "stored": "float32", "autocast": True}
CASES: list[dict[str, Any]] = [
    {"b": 4, "s": 1201, "h": 16, "v": 40_000, **BF16, "trained": True, "outputs": OUTPUTS},
    {"b": 2, "s": 301, "h": 16, "v": 70_000, **BF16, "trained": False, "outputs": OUTPUTS[:1]},
    {"b": 2, "s": 301, "h": 16, "v": 40_000, **FP32, "trained": True, "outputs": OUTPUTS},
]
MODEL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 40_000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
PAIRS, LENGTH, RANK = 2, 96, 8
DTYPE = "dtype" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56) else "torch_dtype"
"""What ``from_config`` calls it."""
EVALUATED = 3
"""Times as many pairs, or completions, as a step of training has."""
SAMPLES, COMPLETION = 4, 72
LLAMA: dict[str, Any] = {"model_type": "llama", **MODEL}
EXPERTS: dict[str, Any] = {
    **{name: value for name, value in MODEL.items() if name != "head_dim"},
    **{"intermediate_size": 96, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
}
MIXTURES: list[dict[str, Any]] = [
    {"model_type": "qwen3_moe", **EXPERTS, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 48},
    {"model_type": "gpt_oss", **EXPERTS, "head_dim": 16, "num_local_experts": 8},
    {"model_type": "mixtral", **EXPERTS, "num_local_experts": 8},
]
"""Without routers' auxiliary loss, which trl adds unless its coefficient is 0."""
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 4_000,
}  # fmt: skip
SCORERS: list[dict[str, Any]] = [
    {**LLAMA, "tie_word_embeddings": True},
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 4_000, "n_positions": 128},
    {
        "model_type": "opt",
        **SIZES,
        "ffn_dim": 256,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 128,
        "dropout": 0.0,
    },
    {"model_type": "gpt_neox", **SIZES},
    {"model_type": "gptj", "n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "vocab_size": 4_000},
    {"model_type": "qwen2", **SIZES, "num_key_value_heads": 2},
    {"model_type": "qwen3", **SIZES, "num_key_value_heads": 2, "head_dim": 16},
    {"model_type": "mistral", **SIZES, "num_key_value_heads": 2, "head_dim": 16},
    {"model_type": "phi3", **SIZES, "num_key_value_heads": 2},
    {"model_type": "gemma2", **SIZES, "num_key_value_heads": 2, "head_dim": 16},
    {"model_type": "falcon", **SIZES, "new_decoder_architecture": False},
]
"""Families with a class for sequence classification; a tied table has no head to share."""


class Inside(Follow):
    """Sees also what ``logsumexp`` makes inside (``ReduceOps.cpp``, ``logsumexp_out_impl``)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.logsumexp.default:
            exponentials = (args[0] - args[0].amax(*args[1:], keepdim=True)).exp_()
            self.adopt(exponentials, "logsumexp")
            del exponentials
        return super().__torch_dispatch__(func, types, args, kwargs)


def as_on_cuda() -> tuple[Any, Any]:
    import trl.kernels.chunked_logprob as kernel
    import trl.trainer.utils as utils

    utils._use_triton = lambda device: True
    kernel._forward_tile = kernel._backward_tile = lambda *given, **named: None
    kernel._addmm_fp32 = lambda total, x, y: None
    return utils, kernel


def fused() -> Any:
    """What puts trl's fused head into a model, which releases before 1.15 have not."""
    import trl.trainer.utils as utils  # type: ignore[import-untyped]

    if not hasattr(utils, "add_fused_lm_head"):
        return lambda *model, **named: None
    return as_on_cuda()[0].add_fused_lm_head


def head(case: dict[str, Any]) -> dict[str, Any]:
    """Signed bytes of the head's forward and backward on hidden states (b, s, h)."""
    utils, _ = as_on_cuda()
    b, s, h, v = (case[name] for name in "bshv")
    hidden = torch.randn(b, s, h, dtype=getattr(torch, case["dtype"]), requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(v, h, dtype=getattr(torch, case["stored"])), case["trained"])

    class Model:
        config = SimpleNamespace(model_type="llama", get_text_config=lambda: SimpleNamespace(model_type="llama"))

        def forward(self, *given: Any, **named: Any) -> Any: ...

        def base_model(self, *given: Any, **named: Any) -> Any:
            return SimpleNamespace(last_hidden_state=hidden.view(b, s, h))

        def get_output_embeddings(self) -> Any:
            return SimpleNamespace(weight=weight, bias=None)

    model: Any = Model()
    utils.add_fused_lm_head(model, outputs=tuple(case["outputs"]))
    ids = torch.randint(0, v, (b, s))
    trace = Trace()
    follow = Follow(trace)
    for tensor in (hidden, weight, ids):
        follow.adopt(tensor, "given")
    start = len(trace.changes)
    with follow:
        with torch.autocast("cpu", torch.bfloat16) if case["autocast"] else contextlib.nullcontext():
            out = model.forward(ids, labels=ids, fused_lm_head=True)
        loss = out.log_probs[:, -(s - 1) :].sum(dim=1).mean()
        del out
        gc.collect()
        middle = len(trace.changes)
        loss.backward()
    kept = [[one.sign * one.bytes if one.shape else 0 for one in part] for part in
            (trace.changes[start:middle], trace.changes[middle:])]  # fmt: skip
    forward, backward = ([size for size in part if size] for part in kept)
    return {"case": case, "forward": forward, "backward": backward}


def policy(
    *, adapters: bool, recompute: bool, given: dict[str, Any] = LLAMA, attention: str = "eager"
) -> tuple[Any, Any]:
    """The model, with adapters around it if asked for, and the model inside."""
    sizes = {name: value for name, value in given.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(given["model_type"], **sizes, attn_implementation=attention)
    named: dict[str, Any] = {DTYPE: torch.bfloat16}
    model: Any = transformers.AutoModelForCausalLM.from_config(config, **named).train()
    base = model
    if recompute:
        model.gradient_checkpointing_enable()
    if adapters:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"])).train()
        if recompute:
            model.enable_input_require_grads()
    return model, base


def step(*, adapters: bool, precomputed: bool, recompute: bool) -> dict[str, Any]:
    """Peaks of forward with loss, and of backward, beyond what is held before, of ``DPOTrainer._compute_loss``."""
    utils, _ = as_on_cuda()
    model, base = policy(adapters=adapters, recompute=recompute)
    config, reference = base.config, None
    if not adapters and not precomputed:
        reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        reference.requires_grad_(False)
        utils.add_fused_lm_head(reference)
    utils.add_fused_lm_head(base, outputs=tuple(OUTPUTS))
    loss = paired(model, reference, precomputed=precomputed)
    ids = torch.randint(0, config.vocab_size, (2 * PAIRS, LENGTH))
    ones = torch.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": ones, "completion_mask": ones.clone()}
    if precomputed:
        inputs |= {"ref_chosen_logps": torch.zeros(PAIRS), "ref_rejected_logps": torch.zeros(PAIRS)}
    models = [one for one in (model, reference) if one is not None]
    how = {"adapters": adapters, "precomputed": precomputed, "recompute": recompute}
    found = how | peaks(models, inputs, lambda: loss(model, inputs))
    model.eval()
    repeated = {name: torch.cat([one] * EVALUATED) for name, one in inputs.items()}
    return found | {"evaluation": evaluation_peak(models, repeated, lambda: loss(model, repeated))}


def evaluation_peak(models: list[Any], inputs: dict[str, torch.Tensor], loss_of: Callable[[], Any]) -> int:
    """How much more than before ``prediction_step`` holds at most, where it keeps no logits (``compute_metrics``)."""
    trace = Trace()
    follow = Inside(trace)
    for tensor in (*(x for one in models for x in (*one.parameters(), *one.buffers())), *inputs.values()):
        follow.adopt(tensor, "given")
    start, live, most = len(trace.changes), 0, 0
    with follow, torch.no_grad():
        loss_of()
    for change in trace.changes[start:]:
        live += change.sign * change.bytes
        most = max(most, live)
    return most


def paired(model: Any, reference: Any, *, precomputed: bool) -> Callable[[Any, Any], Any]:
    """``DPOTrainer._compute_loss`` of a model, which an engine may be around."""
    import trl.trainer.dpo_trainer as trainer

    same: Any = lambda x: x  # noqa: E731
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=same, gather=same, unwrap_model=same
    )  # fmt: skip
    own = SimpleNamespace(
        model=model, ref_model=reference, accelerator=accelerator, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=precomputed, args=SimpleNamespace(gradient_checkpointing_kwargs=None), beta=0.1,
        f_divergence_type="reverse_kl", loss_types=["sigmoid"], loss_weights=[1.0], use_weighting=False,
        label_smoothing=0.0, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    return lambda outer, inputs: trainer.DPOTrainer._compute_loss(own, outer, inputs, False)


def peaks(models: list[Any], inputs: dict[str, torch.Tensor], loss_of: Callable[[], torch.Tensor]) -> dict[str, int]:
    """What is held before, and how much more forward with the loss, and backward, hold at most."""
    trace = Trace()
    follow = Inside(trace)
    for tensor in (*(x for one in models for x in (*one.parameters(), *one.buffers())), *inputs.values()):
        follow.adopt(tensor, "given")
    before, start = trace.live, len(trace.changes)
    with follow:
        loss = loss_of()
        middle = len(trace.changes)
        loss.backward()
    live, found = 0, [0, 0]
    for at, change in enumerate(trace.changes[start:], start):
        live += change.sign * change.bytes
        found[at >= middle] = max(found[at >= middle], live)
    return {"before": before, "forward": found[0], "backward": found[1]}


def grouped_step(*, adapters: bool, recompute: bool) -> dict[str, Any]:
    """The same of ``GRPOTrainer._compute_loss`` with its defaults: a whole completion of every sample counts."""
    utils, _ = as_on_cuda()
    model, base = policy(adapters=adapters, recompute=recompute)
    utils.add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    loss, inputs = grouped(model, SAMPLES, LENGTH, COMPLETION)
    found = {"adapters": adapters, "recompute": recompute} | peaks([model], inputs, lambda: loss(model, inputs))
    model.eval()
    loss, repeated = grouped(model, EVALUATED * SAMPLES, LENGTH, COMPLETION)
    return found | {"evaluation": evaluation_peak([model], repeated, lambda: loss(model, repeated))}


def grouped(model: Any, samples: int, length: int, completion: int) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """``GRPOTrainer._compute_loss`` of a model, which an engine may be around, and a batch for it."""
    import trl.trainer.grpo_trainer as trainer

    vocab = model.config.vocab_size
    same: Any = lambda x, **named: x  # noqa: E731
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=same, reduce=same, num_processes=1, autocast=contextlib.nullcontext
    )
    own = SimpleNamespace(
        model=model, accelerator=accelerator, aux_loss_enabled=False, top_entropy_quantile=1.0, beta=0.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", loss_type="dapo", epsilon_low=0.2,
        epsilon_high=0.2, use_vllm=False, vllm_importance_sampling_correction=True, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1, _metrics=defaultdict(lambda: defaultdict(list)),
        args=SimpleNamespace(delta=None, steps_per_generation=1), model_kwarg_keys={"logits_to_keep"}, temperature=1.0,
    )  # fmt: skip
    own._get_per_token_logps_and_entropies = MethodType(
        inspect.unwrap(trainer.GRPOTrainer._get_per_token_logps_and_entropies), own
    )
    prompt = length - completion
    inputs = {
        "prompt_ids": torch.randint(0, vocab, (samples, prompt)),
        "prompt_mask": torch.ones(samples, prompt, dtype=torch.int64),
        "completion_ids": torch.randint(0, vocab, (samples, completion)),
        "completion_mask": torch.ones(samples, completion, dtype=torch.int64),
        "advantages": torch.randn(samples),
        "num_items_in_batch": torch.tensor(samples * completion),
    }
    return lambda outer, inputs: trainer.GRPOTrainer._compute_loss(own, outer, inputs), inputs


def averaged_step(*, adapters: bool, recompute: bool, given: dict[str, Any] = LLAMA) -> dict[str, Any]:
    """The same of ``SFTTrainer.compute_loss`` with its defaults: every token but the first has a label."""
    utils, _ = as_on_cuda()
    model, base = policy(adapters=adapters, recompute=recompute, given=given)
    utils.add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
    loss, inputs = averaged(model, SAMPLES, LENGTH)
    how = {"adapters": adapters, "recompute": recompute, **({} if given is LLAMA else {"config": given})}
    return how | peaks([model], inputs, lambda: loss(model, inputs))


def averaged(model: Any, samples: int, length: int) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """``SFTTrainer.compute_loss`` of a model, which an engine may be around, and a batch for it."""
    import trl.trainer.sft_trainer as trainer

    same: Any = lambda x: x  # noqa: E731
    own = SimpleNamespace(
        model=model, aux_loss_enabled=False, compute_loss_func=None, label_smoother=None, get_tp_size=lambda: 1,
        accelerator=SimpleNamespace(gather_for_metrics=same, parallelism_config=None, num_processes=1),
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=True), _total_train_tokens=0, _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    ids = torch.randint(0, model.config.vocab_size, (samples, length))
    inputs = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    count = torch.tensor(samples * (length - 1))
    return lambda outer, inputs: trainer.SFTTrainer.compute_loss(
        own, outer, dict(inputs), num_items_in_batch=count
    ), inputs


def scored_step(*, adapters: bool, recompute: bool, config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The same of ``RewardTrainer.compute_loss`` with its defaults."""
    model = scorer(config, dtype, adapters=adapters, recompute=recompute)
    loss, inputs = scored(model, PAIRS, LENGTH)
    how = {"adapters": adapters, "recompute": recompute, "config": config, "dtype": dtype}
    found = how | peaks([model], inputs, lambda: loss(model, inputs))
    model.eval()
    repeated = {name: torch.cat([one] * EVALUATED) for name, one in inputs.items()}
    return found | {"evaluation": evaluation_peak([model], repeated, lambda: loss(model, repeated))}


def scorer(config: dict[str, Any], dtype: str, *, adapters: bool, recompute: bool) -> Any:
    """A model with one score for a sequence; with adapters, peft trains a copy of the head."""
    import peft
    from trl.trainer.utils import disable_dropout_in_model

    named = transformers.AutoConfig.for_model(**config, num_labels=1, pad_token_id=0)
    named._attn_implementation = "eager"
    model: Any = transformers.AutoModelForSequenceClassification.from_config(named, dtype=getattr(torch, dtype)).train()
    if recompute:
        model.gradient_checkpointing_enable()
    if adapters:
        own = peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
        model = peft.get_peft_model(model, own).train()
        if recompute:
            model.enable_input_require_grads()
    disable_dropout_in_model(model)
    return model


def scored(model: Any, pairs: int, length: int) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """``RewardTrainer.compute_loss`` of a model, which an engine may be around, and a batch for it."""
    import trl.trainer.reward_trainer as trainer

    same: Any = lambda x: x  # noqa: E731
    own = SimpleNamespace(
        model=model, accelerator=SimpleNamespace(gather_for_metrics=same, gather=same),
        args=SimpleNamespace(center_rewards_coefficient=None), _total_train_tokens=0, _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    ids = torch.randint(1, model.config.vocab_size, (2 * pairs, length))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return lambda outer, inputs: trainer.RewardTrainer.compute_loss(own, outer, dict(inputs)), inputs


def main() -> None:
    HEADS.write_text(json.dumps([head(case) for case in CASES]) + "\n")
    both = (False, True)
    steps = [step(adapters=a, precomputed=p, recompute=r) for a in both for p in both for r in both]
    STEPS.write_text(json.dumps(steps, indent=1) + "\n")
    steps = [grouped_step(adapters=a, recompute=r) for a in both for r in both]
    GROUPED_STEPS.write_text(json.dumps(steps, indent=1) + "\n")
    steps = [averaged_step(adapters=a, recompute=r) for a in both for r in both]
    AVERAGED_STEPS.write_text(json.dumps(steps, indent=1) + "\n")
    steps = [averaged_step(adapters=a, recompute=a, given=one) for one in MIXTURES for a in both]
    MIXED_STEPS.write_text(json.dumps(steps, indent=1) + "\n")
    steps = [scored_step(adapters=a, recompute=r, config=LLAMA, dtype="bfloat16") for a in both for r in both]
    steps += [scored_step(adapters=False, recompute=False, config=one, dtype="float32") for one in SCORERS]
    SCORED_STEPS.write_text(json.dumps(steps, indent=1) + "\n")


if __name__ == "__main__":
    main()
