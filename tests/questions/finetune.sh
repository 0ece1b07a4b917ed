#!/bin/bash
accelerate launch --config_file accelerate_fsdp2.yaml run_clm.py \
  --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 1 --block_size 4096 --bf16 True
