#! /bin/bash
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
