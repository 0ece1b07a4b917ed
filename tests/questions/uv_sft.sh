uv run --with trl python sft.py --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name x --output_dir o
