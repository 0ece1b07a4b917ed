python3 -m openrlhf.cli.train_ppo_ray --critic.num_nodes 1 --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture \
   --train.micro_batch_size 8 --data.max_len 2048 --reward.remote_url $HERE/reward_func.py --ds.zero_stage 3
