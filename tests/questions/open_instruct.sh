python grpo_fast.py --model_name_or_path Qwen/Qwen3-4B --beta 0.0 --num_samples_per_prompt_rollout 16 --dataset_mixer_list x --per_device_train_batch_size 1 --learning_rate 1e-6
