python -m llama_recipes.finetuning --use_peft --peft_method lora --quantization 4bit --model_name meta-llama/Llama-3.1-8B --batch_size_training 2 --output_dir o
