CUDA_VISIBLE_DEVICES=0,1 python run_clm.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --output_dir x --bf16
