#!/usr/bin/env bash
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
