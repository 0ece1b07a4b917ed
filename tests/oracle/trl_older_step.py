"""What trainers of trl before 1.0 hold, on real tensors of the CPU: added to JSON under their release.

Run with one of ``RELEASES`` importable, the transformers beside it and a peft of its time:
``python -m tests.oracle.trl_older_step``. Trainers are made without their ``__init__``: attributes are those that it
sets by default. Autocast is the CPU's, as in ``trl_whole_step``. ``log_softmax`` of a view copies it first, as CUDA's
kernel does inside (``SoftMax.cu``, ``host_softmax``).
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers

from .trl_step import COMPLETION, LENGTH, LLAMA, PAIRS, SAMPLES, evaluation_peak, peaks, policy

STEPS = Path(__file__).parents[1] / "frameworks" / "trl_older_steps.json"
RELEASES = {
    "0.11.4": "4.45.2", "0.12.2": "4.46.3", "0.14.0": "4.48.3", "0.15.2": "4.48.3", "0.17.0": "4.51.3",
    "0.18.2": "4.51.3",
    "0.19.1": "4.51.3", "0.22.2": "4.57.6", "0.24.0": "4.57.6", "0.28.0": "4.57.6", "0.29.1": "4.57.6",
    "1.0.0": "4.57.6", "1.4.0": "4.57.6", "1.9.0": "4.57.6",
}  # fmt: skip
"""Of trl, and the transformers that each ran with."""
WIDE: dict[str, Any] = {**LLAMA, "num_key_value_heads": LLAMA["num_attention_heads"]}
DEEP: dict[str, Any] = {**WIDE, "hidden_size": 256, "num_hidden_layers": 6, "vocab_size": 1024}
"""Whose hidden states are not lost beside its logits."""
of_any = torch.Tensor.log_softmax


def contiguous(x: torch.Tensor, dim: int) -> torch.Tensor:
    return of_any(x.contiguous(), dim)


def converted(model: Any) -> None:
    """As ``Accelerator.prepare_model`` wraps a model under mixed precision."""
    from accelerate.utils import convert_outputs_to_fp32

    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))


def same(x: Any, *others: Any, **named: Any) -> Any:
    return x


def accelerator() -> Any:
    return SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=same, gather=same, reduce=same, unwrap_model=same,
        num_processes=1, is_main_process=True, autocast=contextlib.nullcontext, parallelism_config=None,
    )  # fmt: skip


def made(name: str, **attributes: Any) -> Any:
    """A trainer with ``attributes`` alone."""
    import trl  # type: ignore[import-untyped]

    own = object.__new__(getattr(trl, name))
    shared = {"accelerator": accelerator(), "aux_loss_enabled": False, "is_peft_model": False, "_tp_size": 1}
    own.__dict__.update(shared | attributes)
    return own


def release() -> tuple[int, ...]:
    import trl

    return tuple(map(int, trl.__version__.split(".")[:2]))


def metrics() -> Any:
    """By mode, which 0.15 has not."""
    return defaultdict(list) if release() == (0, 15) else defaultdict(lambda: defaultdict(list))


def dpo(model: Any, reference: Any, *, precomputed: bool) -> Any:
    args = SimpleNamespace(
        rpo_alpha=None, max_length=None, ld_alpha=None, report_to=[], use_liger_loss=False, use_liger_kernel=False,
        device=torch.device("cpu"), gradient_checkpointing_kwargs=None,
    )  # fmt: skip
    several = release() >= (0, 20)
    own = made(
        "DPOTrainer", model=model, ref_model=reference, args=args, is_encoder_decoder=False, is_vision_model=False,
        label_pad_token_id=-100, padding_value=0, pad_token_id=0, use_weighting=False, beta=0.1, label_smoothing=0.0,
        loss_type=["sigmoid"] if several else "sigmoid", loss_types=["sigmoid"], loss_weights=[1.0] * (several or 1),
        reference_free=False, f_divergence_type="reverse_kl", f_divergence_params=None, padding_free=False,
        precompute_ref_log_probs=precomputed, precompute_ref_logps=precomputed, _peft_has_been_casted_to_bf16=False,
        use_num_logits_to_keep=False, use_logits_to_keep=False, max_length=None, truncation_mode="keep_end",
        _stored_metrics=defaultdict(lambda: defaultdict(list)), _metrics=defaultdict(lambda: defaultdict(list)),
        use_dpo_data_collator=True, model_adapter_name=None, ref_adapter_name=None, ld_alpha=None,
        _total_train_tokens=0, dpo_loss_fn=None,
    )  # fmt: skip
    if hasattr(type(own), "get_batch_loss_metrics"):
        return lambda inputs: own.get_batch_loss_metrics(model, inputs, train_eval="train")[0]
    return lambda inputs: own._compute_loss(model, inputs, False)


def pairs(vocab: int, *, precomputed: bool) -> dict[str, torch.Tensor]:
    """A batch as each release's collator makes it, of whole sequences, whose first token alone is a prompt."""
    prompt = 1

    def ids(length: int, rows: int = PAIRS) -> torch.Tensor:
        return torch.randint(1, vocab, (rows, length))

    if release() >= (0, 29):
        both, mask = ids(LENGTH, 2 * PAIRS), torch.ones(2 * PAIRS, LENGTH, dtype=torch.int64)
        completion = mask.clone()
        completion[:, :prompt] = 0
        made = {"input_ids": both, "attention_mask": mask, "completion_mask": completion}
    elif release() >= (0, 12):
        made = {
            "prompt_input_ids": ids(prompt),
            "chosen_input_ids": ids(LENGTH - 1),
            "rejected_input_ids": ids(LENGTH - 1),
        }
        made |= {name.replace("input_ids", "attention_mask"): torch.ones_like(one) for name, one in made.items()}
    else:
        made = {"prompt_input_ids": ids(prompt), "prompt_attention_mask": torch.ones(PAIRS, prompt, dtype=torch.int64)}
        for name in ("chosen", "rejected"):
            tokens = ids(LENGTH)
            labels = tokens.clone()
            labels[:, :prompt] = -100
            made |= {
                f"{name}_input_ids": tokens,
                f"{name}_attention_mask": torch.ones_like(tokens),
                f"{name}_labels": labels,
            }
    if precomputed:
        prefix = "ref" if release() >= (0, 12) else "reference"
        made |= {f"{prefix}_{name}_logps": torch.zeros(PAIRS) for name in ("chosen", "rejected")}
    return made


def grouped(model: Any, reference: Any, *, scored: bool) -> Any:
    """``scored``: the loss has a KL term, whose reference is ``reference`` or the model without adapters."""
    args = SimpleNamespace(
        delta=None,
        beta=0.0,
        steps_per_generation=1,
        loss_type="bnpo",
        use_liger_loss=False,
        use_liger_kernel=False,
        report_to=[],
    )
    own = made(
        "GRPOTrainer", model=model, ref_model=reference, args=args, beta=0.04 * scored,
        epsilon_low=0.2, epsilon_high=0.2, num_iterations=1, temperature=1.0, loss_type="bnpo",
        importance_sampling_level="token", use_vllm=False,
        top_entropy_quantile=1.0, model_kwarg_keys={"logits_to_keep"}, use_liger_loss=False, use_liger_kernel=False,
        control=SimpleNamespace(should_evaluate=False), current_gradient_accumulation_steps=1,
        off_policy_mask_threshold=None, vllm_importance_sampling_correction=False, state=SimpleNamespace(global_step=0),
        _metrics=metrics(), tools=None, _step=0, max_completion_length=COMPLETION,
    )  # fmt: skip
    vocab, prompt = model.config.vocab_size, LENGTH - COMPLETION
    inputs = {
        "prompt_ids": torch.randint(0, vocab, (SAMPLES, prompt)),
        "prompt_mask": torch.ones(SAMPLES, prompt, dtype=torch.int64),
        "completion_ids": torch.randint(0, vocab, (SAMPLES, COMPLETION)),
        "completion_mask": torch.ones(SAMPLES, COMPLETION, dtype=torch.int64),
        "advantages": torch.randn(SAMPLES),
        "num_items_in_batch": torch.tensor(SAMPLES * COMPLETION),
        "old_per_token_logps": None,
    }
    if release() == (0, 15):  # whatever the factor of the KL term
        inputs["ref_per_token_logps"] = torch.zeros(SAMPLES, COMPLETION, dtype=next(model.parameters()).dtype)
    step = getattr(own, "_compute_loss", None) or own.compute_loss
    return lambda: step(model, inputs), {name: one for name, one in inputs.items() if one is not None}


def supervised(model: Any) -> Any:
    args = SimpleNamespace(
        use_liger=False, use_liger_kernel=False, average_tokens_across_devices=True, past_index=-1, loss_type="nll",
        n_gpu=1, prediction_loss_only=True, report_to=[],
    )  # fmt: skip
    own = made(
        "SFTTrainer", model=model, args=args, control=SimpleNamespace(should_evaluate=False), num_virtual_tokens=0,
        compute_loss_func=None, label_smoother=None, model_accepts_loss_kwargs=True, _total_train_tokens=0,
        _metrics=metrics(), compute_metrics=None, padding_free=False,
        preprocess_logits_for_metrics=None,
    )  # fmt: skip
    ids = torch.randint(0, model.config.vocab_size, (SAMPLES, LENGTH))
    inputs = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    count = torch.tensor(SAMPLES * (LENGTH - 1))
    return lambda: own.compute_loss(model, dict(inputs), num_items_in_batch=count), inputs


def step(loop: str, *, config: dict[str, Any], adapters: bool, recompute: bool, precomputed: bool = False,
         autocast: bool = False, scored: bool = False) -> dict[str, Any]:  # fmt: skip
    model, base = policy(adapters=adapters, recompute=recompute, given=config, attention="sdpa")
    if autocast:
        model.float()
    reference: Any = None
    if (scored or (loop == "dpo" and not precomputed)) and not adapters:
        reference = transformers.AutoModelForCausalLM.from_config(base.config).to(next(base.parameters()).dtype).eval()
        reference.requires_grad_(False)
    models = [one for one in (model, reference) if one is not None]
    for one in models if autocast else ():
        converted(one)
    if loop == "dpo":
        loss = dpo(model, reference, precomputed=precomputed)
        inputs = pairs(base.config.vocab_size, precomputed=precomputed)

        def run() -> Any:
            return loss(inputs)

    elif loop == "grpo":
        run, inputs = grouped(model, reference, scored=scored)
    else:
        run, inputs = supervised(model)
    which = {"loop": loop, "adapters": adapters, "recompute": recompute, "precomputed": precomputed}
    which |= {"scored": True} if scored else {}
    how = which | {"autocast": autocast, "deep": config is DEEP}
    with patch.object(torch.Tensor, "log_softmax", contiguous):
        found = how | peaks(models, inputs, run)
        model.eval()
        found["evaluation"] = evaluation_peak(models, inputs, run)
    return found


def main() -> None:
    import trl

    assert RELEASES[trl.__version__] == transformers.__version__, (trl.__version__, transformers.__version__)
    loops = ["dpo"] * (release() < (1,)) + ["grpo"] * ((0, 15) <= release() < (1,)) + ["sft"] * (release() >= (0, 15))
    rows = []
    for loop in loops:
        rows.append(step(loop, config=WIDE, adapters=False, recompute=True))
        rows.append(step(loop, config=WIDE, adapters=True, recompute=True, autocast=True))
    if release() == (0, 18):
        rows += [
            step("grpo", config=one, adapters=a, recompute=a, scored=True)
            for one in (WIDE, DEEP)
            for a in (False, True)
        ]
        rows.append(step("grpo", config=WIDE, adapters=True, recompute=True, autocast=True, scored=True))
    if "dpo" in loops:
        rows.append(step("dpo", config=WIDE, adapters=True, recompute=False, precomputed=True))
        rows += [step("dpo", config=DEEP, adapters=a, recompute=a) for a in (False, True)]
    named = {"trl": trl.__version__, "transformers": transformers.__version__}
    kept = json.loads(STEPS.read_text()) if STEPS.exists() else []
    others = [one for one in kept if one["trl"] != trl.__version__ and one["trl"] in RELEASES]
    order = [*RELEASES]
    every = sorted([*others, *(named | one for one in rows)], key=lambda one: order.index(one["trl"]))
    STEPS.write_text("[\n" + ",\n".join(json.dumps(one) for one in every) + "\n]\n")


if __name__ == "__main__":
    main()
