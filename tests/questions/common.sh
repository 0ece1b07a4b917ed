HIDDEN=4096
LAYERS=32
MODEL_ARGS=(--num-layers $LAYERS --hidden-size $HIDDEN --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope
  --disable-bias-linear --untie-embeddings-and-output-weights)
