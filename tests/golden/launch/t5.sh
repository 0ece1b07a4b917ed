#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1

torchrun --nproc_per_node 8 pretrain_t5.py \
    --encoder-num-layers 12 \
    --decoder-num-layers 12 \
    --hidden-size 768 \
    --num-attention-heads 12 \
    --kv-channels 64 \
    --ffn-hidden-size 3072 \
    --encoder-seq-length 512 \
    --decoder-seq-length 128 \
    --max-position-embeddings 512 \
    --micro-batch-size 16 \
    --global-batch-size 512 \
    --bf16 \
    --vocab-extra-ids 100 \
    --tensor-model-parallel-size ${TP:-2} \
    --sequence-parallel \
    --transformer-impl ${IMPL:-transformer_engine} \
    --tokenizer-type NullTokenizer \
    --vocab-size 29000
