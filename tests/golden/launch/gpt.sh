#!/bin/bash
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
