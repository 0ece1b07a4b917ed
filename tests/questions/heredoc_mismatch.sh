#!/usr/bin/env bash
set -euo pipefail
NNODES=${SLURM_NNODES:-2}
GPUS_PER_NODE=8
BS=1; ACC=1
cat > ds.json <<EOF
{
 "train_micro_batch_size_per_gpu": $BS,
 "gradient_accumulation_steps": $ACC,
 "zero_optimization": {"stage": 3},
 "bf16": {"enabled": true}
}
EOF
torchrun --nnodes $NNODES --nproc_per_node $GPUS_PER_NODE train.py --deepspeed ds.json --model_name_or_path meta-llama/Llama-3.1-8B --max_seq_length 4096 --bf16
