"""Two jobs as torchtitan's configurations are written in August 2026, and one of March 2026."""

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

LENGTH = 8 * 1024


def selective() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        loss=CrossEntropyLoss.Config(global_vocab_size=128256),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=LENGTH, max_context_length=LENGTH, disable_cuda_graphs=True
        ),
        activation_checkpoint=SelectiveAC.Config(),
    )


def in_parts() -> Trainer.Config:
    config = selective()
    config.loss = ChunkedLossWrapper.Config(loss_fn=config.loss)
    config.parallelism = ParallelismConfig(tensor_parallel_degree=2)
    config.activation_checkpoint = FullAC.Config()
    return config


def older() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        optimizer=OptimizersContainer.Config(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=LENGTH),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective", selective_ac_option="2"),
    )


def gpt_oss() -> Trainer.Config:
    from torchtitan.models.gpt_oss import model_registry

    config = selective()
    config.model_spec = model_registry("20b")
    config.activation_checkpoint = FullAC.Config()
    return config


def as_shipped() -> Trainer.Config:
    """As torchtitan's own: loss in chunks, and a CUDA graph, which is there unless it is turned off."""
    config = selective()
    config.loss = ChunkedLossWrapper.Config(loss_fn=config.loss)
    config.training = TrainingConfig(num_tokens_per_microbatch_per_dp_rank=LENGTH, max_context_length=LENGTH)
    return config
