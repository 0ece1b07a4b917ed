"""A plan as the arguments of Megatron-Core's ``pretrain_gpt.py`` and ``pretrain_bert.py``, in a script that starts it.

Names and what they mean: ``megatron/training/arguments.py`` of Megatron-LM (``validate_args`` and the groups of
arguments) and the configuration classes that it makes arguments of, at the commit of ``plan/launch/arguments/
megatron.txt``. Data, tokenizer and learning rate are in no plan: the last group of arguments stands for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .. import __version__
from ..plan.completion import launched_plan
from ..plan.launch.files import words_of
from ..plan.launch.read import Choices, launched
from ..plan.plan import Plan
from ..plan.read import Flags
from .exported import PLACE, READ_BACK, Draft, Target
from .sameness import largest_chunk
from .script import Arguments, array, comment, exports, nodes, started

POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}

BESIDE = (
    "hardware",
    "headroom",
    "torch",
    "megatron.transformer_engine",
    "model.name",
    "model.family",
    "environment",
)
"""The machine, versions of libraries, and names."""

LAUNCHER = (
    "torchrun",
    "--nproc_per_node {per_node}",
    "--nnodes {nodes}",
    '--node_rank "${{NODE_RANK:-0}}"',
    '--master_addr "${{MASTER_ADDR:-localhost}}"',
    '--master_port "${{MASTER_PORT:-6000}}"',
)


def write(plan: Plan) -> Draft:
    """The script that trains ``plan``."""
    arguments = Arguments()
    for step in (_model, _layout, _batch, _precision, _optimizer, _recompute, _layers, _training, _yours):
        step(arguments, plan)
    environment = _environment(plan)
    script = "pretrain_bert.py" if plan.model.family == "bert" else "pretrain_gpt.py"
    lines = [*_head(plan, script), *exports(environment)]
    for group, given in arguments.groups.items():
        if group == "YOURS":
            lines += [
                "",
                "# Not in a plan, and yours to replace: the tokenizer (here one of as many tokens), data, steps.",
            ]
        else:
            lines.append("")
        lines += array(group, given)
    count, per_node = nodes(plan)
    launcher = [word.format(per_node=per_node, nodes=count) for word in LAUNCHER]
    lines += ["", *started(launcher, script, list(arguments.groups))]
    content = {"environment": environment, "script": script, "arguments": arguments.content()}
    return Draft("\n".join(lines) + "\n", content)


def _head(plan: Plan, script: str) -> Iterator[str]:
    layout = plan.layout
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "vpp", "cp", "dp"))
    yield "#!/bin/bash"
    yield from comment(f"{plan.model.name}: Megatron-LM's {script} on {plan.hardware.gpus:,} GPUs ({sizes}).")
    yield f"# Written by memplan {__version__}. Estimate it with"
    yield READ_BACK


def _environment(plan: Plan) -> dict[str, str]:
    """The plan's variables, and the one that ``validate_args`` demands of tensor and context parallelism."""
    parallel = plan.layout.tp > 1 or plan.layout.cp > 1
    return {**({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if parallel else {}), **plan.environment}


def _model(arguments: Arguments, plan: Plan) -> None:
    spec, group = plan.model, "MODEL"

    def add(name: str, *values: object) -> None:
        arguments.add(group, name, *values)

    def switch(name: str, on: bool) -> None:
        arguments.switch(group, name, on)

    add("--num-layers", spec.layers)
    add("--hidden-size", spec.hidden)
    add("--ffn-hidden-size", spec.ffn)
    add("--num-attention-heads", spec.heads)
    add("--kv-channels", spec.head_dim)
    if spec.kv_heads != spec.heads:
        add("--group-query-attention")
        add("--num-query-groups", spec.kv_heads)
    add("--max-position-embeddings", spec.positions_max)
    if spec.family != "bert":
        add("--position-embedding-type", POSITIONS.get(spec.positions, spec.positions))
    add("--normalization", NORMS[spec.norm])
    switch("--swiglu", spec.activation == "swiglu")
    switch("--disable-bias-linear", not spec.mlp_bias)
    switch("--add-qkv-bias", spec.attention_bias and not spec.mlp_bias)
    switch("--qk-layernorm", spec.qk_norm)
    switch("--untie-embeddings-and-output-weights", not spec.tied_embeddings)
    switch("--bert-no-binary-head", spec.family == "bert" and not spec.token_types)
    add("--make-vocab-size-divisible-by", plan.megatron.vocab_multiple)
    add("--hidden-dropout", spec.hidden_dropout)
    add("--attention-dropout", spec.attention_dropout)


def _layout(arguments: Arguments, plan: Plan) -> None:
    layout, pipeline, group = plan.layout, plan.pipeline, "PARALLEL"
    arguments.add(group, "--tensor-model-parallel-size", layout.tp)
    arguments.add(group, "--pipeline-model-parallel-size", layout.pp)
    if layout.cp > 1:
        arguments.add(group, "--context-parallel-size", layout.cp)
        arguments.add(group, "--cp-comm-type", plan.megatron.cp_communication)
    arguments.switch(group, "--sequence-parallel", layout.sequence_parallel)
    if pipeline.layout is not None:
        arguments.add(group, "--pipeline-model-parallel-layout", pipeline.layout)
    elif layout.vpp > 1:
        arguments.add(group, "--num-virtual-stages-per-pipeline-rank", layout.vpp)
    for name, layers in (("first", pipeline.first_layers), ("last", pipeline.last_layers)):
        if layers is not None:
            arguments.add(group, f"--decoder-{name}-pipeline-num-layers", layers)
    arguments.switch(group, "--account-for-embedding-in-pipeline-split", pipeline.count_embedding)
    arguments.switch(group, "--account-for-loss-in-pipeline-split", pipeline.count_loss)
    if layout.vpp > 1 and pipeline.group is not None:
        arguments.add(group, "--microbatch-group-size-per-virtual-pipeline-stage", pipeline.group)
    arguments.switch(group, "--no-overlap-p2p-communication", layout.vpp > 1 and not pipeline.overlap_p2p)
    arguments.switch(group, "--overlap-p2p-communication-warmup-flush", pipeline.overlap_p2p_warmup)


def _batch(arguments: Arguments, plan: Plan) -> None:
    arguments.add("BATCH", "--micro-batch-size", plan.batch.mbs)
    arguments.add("BATCH", "--global-batch-size", plan.batch.gbs)
    arguments.add("BATCH", "--seq-length", plan.batch.seq)


def _precision(arguments: Arguments, plan: Plan) -> None:
    """bf16 is accumulated in fp32 unless gradients are reduced in bf16; fp16 only if it is asked for."""
    dtype, gradients, group = plan.precision.dtype, plan.precision.gradients, "PRECISION"
    arguments.switch(group, f"--{dtype}", dtype != "fp32")
    arguments.switch(group, "--grad-reduce-in-bf16", dtype == gradients == "bf16")
    arguments.switch(group, "--accumulate-allreduce-grads-in-fp32", dtype != "fp32" and gradients == "fp32")


def _optimizer(arguments: Arguments, plan: Plan) -> None:
    """Adam is AdamW there (``OptimizerConfig.decoupled_weight_decay``)."""
    optimizer, megatron, group = plan.optimizer, plan.megatron, "OPTIMIZER"
    arguments.add(group, "--optimizer", "sgd" if optimizer.name == "sgd" else "adam")
    arguments.add(group, "--clip-grad", megatron.clip_grad)
    arguments.switch(group, "--use-distributed-optimizer", plan.layout.zero == 1)
    if megatron.distributed_optimizer_instances > 1:
        arguments.add(group, "--num-distributed-optimizer-instances", megatron.distributed_optimizer_instances)
    if optimizer.precision_aware:
        arguments.add(group, "--use-precision-aware-optimizer")
        arguments.add(group, "--main-params-dtype", optimizer.main_parameters)
        arguments.add(group, "--exp-avg-dtype", optimizer.exp_avg)
        arguments.add(group, "--exp-avg-sq-dtype", optimizer.exp_avg_sq)


def _recompute(arguments: Arguments, plan: Plan) -> None:
    recompute, group = plan.recompute, "RECOMPUTE"
    if recompute.mode == "none":
        return
    arguments.add(group, "--recompute-granularity", recompute.mode)
    if recompute.mode == "selective":
        arguments.add(group, "--recompute-modules", *(recompute.modules or ()))
        return
    arguments.add(group, "--recompute-method", recompute.method)
    arguments.add(group, "--recompute-num-layers", recompute.layers or largest_chunk(plan))


def _layers(arguments: Arguments, plan: Plan) -> None:
    """Implementations, and what is not fused though it could be."""
    megatron, model, group = plan.megatron, plan.model, "LAYERS"
    local = megatron.transformer_impl == "local"
    if plan.model.family == "bert":
        if local:
            arguments.add(group, "--spec", "local")
    else:
        arguments.add(group, "--transformer-impl", megatron.transformer_impl)
    if megatron.attention_backend != "auto":
        arguments.add(group, "--attention-backend", megatron.attention_backend)
    for on, name in (
        (megatron.deterministic, "--deterministic-mode"),
        (not megatron.gradient_accumulation_fusion, "--no-gradient-accumulation-fusion"),
        (not megatron.bias_gelu_fusion and model.mlp_bias and not model.gated, "--no-bias-gelu-fusion"),
        (not megatron.bias_swiglu_fusion and model.gated, "--no-bias-swiglu-fusion"),
        (not megatron.bias_dropout_fusion, "--no-bias-dropout-fusion"),
        (not megatron.rope_fusion and model.positions == "rotary", "--no-rope-fusion"),
        (not megatron.masked_softmax_fusion, "--no-masked-softmax-fusion"),
        (megatron.rotary_interleaved, "--rotary-interleaved"),
        (megatron.query_key_layer_scaling, "--apply-query-key-layer-scaling"),
        (
            megatron.attention_softmax_in_fp32 and not megatron.query_key_layer_scaling,
            "--attention-softmax-in-fp32",
        ),
        (megatron.fp32_residual, "--fp32-residual-connection"),
        (megatron.per_token_loss, "--calculate-per-token-loss"),
        (not megatron.attention_mask_in_dataloader, "--no-create-attention-mask-in-dataloader"),
    ):
        arguments.switch(group, name, on)
    if megatron.cross_entropy_fusion != "none":
        arguments.add(group, "--cross-entropy-loss-fusion")
        arguments.add(group, "--cross-entropy-fusion-impl", megatron.cross_entropy_fusion)


def _training(arguments: Arguments, plan: Plan) -> None:
    """Reductions, and what is looked at after them."""
    megatron, group = plan.megatron, "REDUCTION"
    arguments.switch(group, "--overlap-grad-reduce", megatron.overlap_grad_reduce)
    arguments.switch(group, "--overlap-param-gather", megatron.overlap_param_gather)
    if megatron.bucket_size is not None:
        arguments.add(group, "--ddp-bucket-size", megatron.bucket_size)
    arguments.switch(group, "--log-num-zeros-in-grad", megatron.log_num_zeros_in_grad)
    arguments.switch(group, "--log-params-norm", megatron.log_params_norm)
    looks = megatron.check_for_nan or plan.precision.dtype == "fp16"  # which turns it off by itself
    arguments.switch(group, "--no-check-for-nan-in-loss-and-grad", not looks)


def _yours(arguments: Arguments, plan: Plan) -> None:
    """A tokenizer of as many tokens, mock data, and a schedule: what makes the script start."""
    group = "YOURS"
    arguments.add(group, "--tokenizer-type", "NullTokenizer")
    arguments.add(group, "--vocab-size", plan.model.vocab)
    arguments.add(group, "--mock-data")
    arguments.add(group, "--split", "99,1,0")
    arguments.add(group, "--train-iters", 10)
    arguments.add(group, "--lr", "1.0e-4")
    arguments.add(group, "--eval-iters", 0)


def read(text: str, flags: Flags, settings: tuple[str, ...]) -> Plan:
    """What ``--from megatron`` makes of the script."""
    words = words_of(text, "train.sh", "megatron", {}, Path())
    return launched_plan(launched(words, "megatron", Choices({})), flags).plan


TARGET = Target(
    name="megatron",
    framework="megatron",
    what="Megatron-LM's arguments",
    write=write,
    read=read,
    command=("--from", "megatron", PLACE),
    beside=BESIDE,
)
