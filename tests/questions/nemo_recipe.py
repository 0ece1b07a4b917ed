from nemo.collections import llm


def configure_recipe(nodes: int = 1, gpus_per_node: int = 8):
    recipe = llm.llama3_8b.pretrain_recipe(
        name="llama3_pretraining",
        num_nodes=nodes,
        num_gpus_per_node=gpus_per_node,
    )
    recipe.trainer.strategy.tensor_model_parallel_size = 2
    recipe.data.micro_batch_size = 1
    recipe.data.global_batch_size = 128
    recipe.data.seq_length = 8192
    return recipe
