deepspeed --include localhost:0,1,2,3 run_clm.py --deepspeed ds_auto.json --model_name_or_path gpt2 --per_device_train_batch_size 2 --bf16
