"""Launch scripts in the style of Megatron-LM's and BigScience's own, in a minimal form."""

# ruff: noqa: E501 (tables of scripts, arguments and the lines that they get)

from __future__ import annotations

GPT = r"""#!/bin/bash
# A GPT on one node.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_IB_TIMEOUT=19

GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))

CHECKPOINTS=$1 # where checkpoints go
VOCAB_FILE=$2

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048   # not 4096
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    # --swiglu
)
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size=64
    --train-iters 100
    --lr 6.0e-5
    --clip-grad 1.0
    --bf16
)
PARALLEL_ARGS=(
	--tensor-model-parallel-size 2
	--pipeline-model-parallel-size 4
	--use-distributed-optimizer
	--sequence-parallel
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    "${TRAINING_ARGS[@]}" \
    ${PARALLEL_ARGS[@]} \
    --vocab-file $VOCAB_FILE --save "$CHECKPOINTS" 2>&1 | tee log.txt
"""

LLAMA = r"""#!/usr/bin/env bash
set -euo pipefail
TP=${TP:=1}; CP=1
TOKENIZER=${3:-"MOCK"}
DTYPE="fp8"
OPTIONS=()
if [[ "$DTYPE" == "fp8" && -n "$TP" ]]; then
    OPTIONS+=("--fp8-format hybrid" "--fp8-param-gather")
elif [ "$DTYPE" = bf16 ]; then
    OPTIONS+=(--bf16)
fi
if [[ "$TOKENIZER" == MOCK ]] || [[ -z "$TOKENIZER" ]]; then
    OPTIONS+=("--tokenizer-type NullTokenizer" "--vocab-size 128256")
else
    OPTIONS+=("--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $TOKENIZER")
fi
if [ ! -f pretrain_gpt.py ]; then
    echo "pretrain_gpt.py is not here"
    exit 1
fi
torchrun --nproc-per-node=8 pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --kv-channels 128 \
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope \
    --rotary-base 1000000 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu \
    --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear \
    --micro-batch-size 1 --global-batch-size 128 --bf16 --cross-entropy-loss-fusion \
    --tensor-model-parallel-size "$TP" --context-parallel-size $CP --sequence-parallel \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --no-create-attention-mask-in-dataloader --lr 1e-4 ${OPTIONS[@]}
"""

BERT = r"""#! /bin/bash
GPUS=4
RUN="python -m torch.distributed.launch --nproc_per_node $GPUS --nnodes 1"
OUTPUT_ARGS="--log-interval 10 \
             --save-interval 500 --log-params-norm"
NVTE_FLASH_ATTN=0 exec $RUN examples/bert/pretrain_bert.py \
       --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
       --seq-length 512 --max-position-embeddings 512 \
       --micro-batch-size 4 --global-batch-size 128 --spec local --attention-backend local \
       --tensor-model-parallel-size 2 --fp16 --vocab-file 'my vocab.txt' \
       $OUTPUT_ARGS &
"""

BIGSCIENCE = r"""#!/bin/bash
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1          # one launcher on each
#SBATCH --gres=gpu:8
set -x -e
source $HOME/start-env   # not followed
ROOT=$WORK/code
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
GPUS_PER_NODE=8
NNODES=$SLURM_NNODES
PP_SIZE=8
TP_SIZE=4
MICRO_BATCH_SIZE=2
GLOBAL_BATCH_SIZE=2048
ZERO_STAGE=1
config_json="./ds_config.$SLURM_JOBID.json"
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": $MICRO_BATCH_SIZE,
  "train_batch_size": $GLOBAL_BATCH_SIZE,
  "zero_optimization": {
    "stage": $ZERO_STAGE
  },
  "bf16": { "enabled": true }
}
EOT
GPT_ARGS=" \
    --num-layers 38 \
    --hidden-size 5120 --num-attention-heads 40 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size $MICRO_BATCH_SIZE --global-batch-size $GLOBAL_BATCH_SIZE \
    --rampup-batch-size 32 32 1_000 \
    --tokenizer-type GPT2BPETokenizer --embed-layernorm --position-embedding-type alibi \
    --checkpoint-activations --bf16 \
    "
DEEPSPEED_ARGS=" \
    --deepspeed --deepspeed_config ${config_json} --zero-stage ${ZERO_STAGE} \
    --deepspeed-activation-checkpointing \
    "
export LAUNCHER="python -u -m torch.distributed.launch \
    --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES \
    --master_addr $MASTER_ADDR --master_port 6000 \
    "
export CMD=" \
    `pwd`/pretrain_gpt.py \
    --tensor-model-parallel-size $TP_SIZE \
    --pipeline-model-parallel-size $PP_SIZE \
    --pp-partition-method 'type:transformer|embedding' \
    $GPT_ARGS --save $ROOT/checkpoints $DEEPSPEED_ARGS \
    "
echo $CMD
srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a $ROOT/main_log.txt
"""

SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
"""The arguments that Megatron needs."""


def script(*lines: str, arguments: str = "") -> str:
    """A script of ``lines`` that trains a small model with ``arguments``."""
    return "\n".join(["#!/bin/bash", *lines, f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} {arguments}", ""])
