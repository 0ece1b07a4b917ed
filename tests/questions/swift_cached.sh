swift export --model Qwen/Qwen2.5-7B-Instruct --dataset data --to_cached_dataset true --output_dir cached
NPROC_PER_NODE=2 swift sft --model Qwen/Qwen2.5-7B-Instruct --cached_dataset cached/train --lora_rank 8 \
    --external_plugins plugins/loss.py --torch_dtype bfloat16 --per_device_train_batch_size 1 --max_length 2048
