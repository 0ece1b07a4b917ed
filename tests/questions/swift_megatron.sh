NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-32B --tensor_model_parallel_size 8 --micro_batch_size 1 --global_batch_size 16 --max_length 8192 --sequence_parallel true
