"""Arguments of a framework's forks that make another model or engine than the framework has: refused by name.

An argument that nobody knows is a note alone, since most change no memory; with one of these the note would stand
beside figures of another model.
"""

from __future__ import annotations

from collections.abc import Mapping

_MICROSOFT = (
    "is of Microsoft's Megatron-DeepSpeed, which is not modelled; BigScience's is. Say the job in flags for one like "
    "it: --framework megatron, or deepspeed for ZeRO without a pipeline"
)
_OTHER_LAYERS = """
    swiglu squared-relu normalization num-key-value-heads use-rotary-position-embeddings rotary-percent
    untie-embeddings-and-output-weights disable-bias-linear use-flash-attn use-flash-attn-v1 use-flash-attn-v2
    use-flash-attn-triton use-flash-attn-builder transformer-impl embedding-weights-in-fp32 mlp-type use-tutel mos kd
    load-teacher num-experts moe-expert-parallel-size ds-sequence-parallel-size force-ds-sequence-parallel
    ds-sequence-parallel-fpdt sequence-parallel recompute-granularity recompute-method recompute-activations
    no-pipeline-parallel enable-zbh1-pipeline enable-zbh1-exact-semantics fp8-e4m3 fp8-hybrid random-ltd
    standalone-embedding-stage
"""
"""``megatron/arguments.py`` of microsoft/Megatron-DeepSpeed; BigScience's fork has none of them."""
_OTHER_RUNS = """
    lr-warmup-tokens log-optimizer-states-to-tensorboard override-opt_param-scheduler use-checkpoint-opt_param-scheduler
    create-moe-param-group disable-moe-token-dropping moe-train-capacity-factor moe-eval-capacity-factor
    moe-min-capacity moe-loss-coeff data-efficiency-curriculum-learning train-data-exact-num-epochs return-data-index
"""
"""Arguments of the same file that change no model: where one stands, it is that fork that runs."""
_MULTIQUERY = (
    "is of BigCode's Megatron-LM: one head of keys and values for all heads of queries; write --group-query-attention "
    "--num-query-groups 1 in its place"
)
_PAI = {
    "--intermediate-size": "--ffn-hidden-size",
    "--n-head-kv": "--group-query-attention with --num-query-groups",
    "--use-llama2-rotary-position-embeddings": "--position-embedding-type rope",
    "--enable-shared-expert": "--moe-shared-expert-intermediate-size",
    "--shared-moe-ffn-hidden-size": "--moe-shared-expert-intermediate-size",
    "--disable-bias-linear-fc": "--disable-bias-linear",
    "--disable-bias-attn-fc": "--disable-bias-linear",
}
"""Arguments of Pai-Megatron-Patch, and what says the same in Megatron-LM."""
OF_MEGATRON_DEEPSPEED: Mapping[str, str] = {
    f"--{name}": _MICROSOFT for name in (*_OTHER_LAYERS.split(), *_OTHER_RUNS.split())
}
OF_MEGATRON_LM: Mapping[str, str] = {
    **OF_MEGATRON_DEEPSPEED,
    "--attention-head-type": _MULTIQUERY,
    **{name: f"is of Pai-Megatron-Patch; Megatron-LM's is {same}, which is read" for name, same in _PAI.items()},
}
"""Both by the argument: what it is. Microsoft's fork runs without DeepSpeed, too, as Megatron-LM does."""
AS_HERE: Mapping[str, str] = {"--attention-head-type": "multihead"}
"""Values of them with which nothing differs. Of Microsoft's there are none: whatever they say, the fork is another."""
