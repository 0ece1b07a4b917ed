litgpt finetune_lora meta-llama/Llama-3.1-8B --train.micro_batch_size 2 --train.max_seq_length 2048 --lora_r 16
