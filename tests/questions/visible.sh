CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch run_clm.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --bf16
