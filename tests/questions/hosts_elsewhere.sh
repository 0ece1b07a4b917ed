deepspeed --hostfile /job/hosts --num_gpus 8 run_clm.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --bf16
