swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset x
