#!/bin/bash
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
