#!/bin/bash
model_args() { echo "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"; }
ARGS=( $(model_args) )
ARGS+=( --micro-batch-size 1 --global-batch-size 64 --bf16 )
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" --tokenizer-type NullTokenizer --vocab-size 32000
