#!/bin/bash
deepspeed --num_gpus 8 run_clm.py --deepspeed ds_auto.json --model_name_or_path Qwen/Qwen2.5-7B \
  --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --bf16 --block_size 4096 --gradient_checkpointing
