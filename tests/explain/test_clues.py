"""The moment that frames prove: of the frameworks' own functions, from the outermost to the innermost."""

from __future__ import annotations

import pytest

from memplan.explain.clues import clues, guesses
from memplan.explain.log import Frame
from memplan.explain.message import parse

MOMENTS = {
    "initialisation": [
        "deepspeed/__init__.py:initialize deepspeed/runtime/zero/stage3.py:_setup_for_real_optimizer "
        "deepspeed/runtime/zero/stage3.py:_create_fp32_partitions",
        "deepspeed/runtime/zero/stage_1_and_2.py:__init__ "
        "deepspeed/runtime/zero/stage_1_and_2.py:initialize_optimizer_states torch/optim/adamw.py:step",
        "accelerate/accelerator.py:_prepare_fsdp torch/distributed/fsdp/_flat_param.py:flatten_params",
        "megatron/training/training.py:setup_model_and_optimizer "
        "megatron/core/optimizer/__init__.py:get_megatron_optimizer",
    ],
    "loading": [
        "transformers/trainer.py:_move_model_to_device torch/nn/modules/module.py:to",
        "deepspeed/__init__.py:initialize deepspeed/runtime/engine.py:_configure_distributed_model "
        "torch/nn/modules/module.py:_apply",
    ],
    "forward": [
        "transformers/trainer.py:training_step transformers/loss/loss_utils.py:ForCausalLMLoss "
        "transformers/loss/loss_utils.py:fixed_cross_entropy",
        "torchtitan/train.py:forward_backward_step torch/nn/modules/module.py:_wrapped_call_impl",
        "megatron/training/training.py:train_step "
        "megatron/core/pipeline_parallel/schedules.py:forward_backward_no_pipelining "
        "megatron/core/pipeline_parallel/schedules.py:forward_step",
        "torch/optim/optimizer.py:step lightning/pytorch/core/module.py:training_step module.py:forward",
        "torch/nn/modules/module.py:_call_impl accelerate/hooks.py:pre_forward "
        "accelerate/utils/modeling.py:set_module_tensor_to_device",
    ],
    "backward": [
        "train.py:main torch/_tensor.py:backward torch/utils/checkpoint.py:unpack_hook modeling_llama.py:forward",
        "deepspeed/runtime/engine.py:backward deepspeed/runtime/zero/stage3.py:__reduce_and_partition_ipg_grads",
        "torch/optim/optimizer.py:step lightning/pytorch/strategies/strategy.py:backward",
        "torch/distributed/fsdp/_runtime_utils.py:_pre_backward_hook torch/distributed/fsdp/_flat_param.py:unshard",
    ],
    "step": [
        "deepspeed/runtime/engine.py:_take_model_step deepspeed/runtime/zero/stage3.py:step "
        "deepspeed/runtime/zero/stage3.py:_optimizer_step",
        "accelerate/optimizer.py:step torch/optim/lr_scheduler.py:wrapper torch/optim/adamw.py:_multi_tensor_adamw",
        "megatron/core/optimizer/distrib_optimizer.py:step_with_ready_grads",
    ],
    "evaluation": [
        "transformers/trainer.py:_maybe_log_save_evaluate transformers/trainer.py:evaluation_loop "
        "transformers/trainer.py:prediction_step modeling_llama.py:forward",
        "transformers/trainer_pt_utils.py:torch_pad_and_concatenate",
        "accelerate/utils/operations.py:_pad_across_processes",
    ],
    "checkpoint": [
        "transformers/trainer.py:_save_checkpoint torch/nn/modules/module.py:state_dict "
        "bitsandbytes/nn/modules.py:undo_layout",
        "megatron/core/dist_checkpointing/serialization.py:save",
    ],
    "": ["train.py:main", "torch/optim/lr_scheduler.py:wrapper"],
}


def frames(text: str) -> list[Frame]:
    return [Frame(place.partition(":")[0], 7, place.partition(":")[2]) for place in text.split()]


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_moment(moment: str) -> None:
    for text in MOMENTS[moment]:
        assert clues(frames(text)).phase == moment, text


def test_sizes_are_guessed_where_little_else_has_them() -> None:
    """1.96 GiB: 4,096 × 128,256 × 4 bytes are 2,004 MiB, of Llama 3 first; of gradients or the step nothing is said."""

    def guessed(size: str, text: str = "", allocated: str = "20.00 GiB") -> list[str]:
        message = parse(f"Tried to allocate {size} (GPU 0; 80.00 GiB total capacity; {allocated} already allocated)")
        return [one.factors for one in guesses(message, clues(frames(text)))]

    assert guessed("1.96 GiB")[0] == "4,096 tokens × 128,256 × 4 bytes, or 8,192 × 2 bytes"
    assert guessed("1.96 GiB", "loss_utils.py:fixed_cross_entropy")[0].startswith("4,096 tokens × 128,256")
    assert guessed("3.50 GiB") == guessed("2.29 GiB", "torch/_utils.py:_flatten_dense_tensors") == []
    assert guessed("1.96 GiB", "torch/optim/adamw.py:step") == guessed("1.96 GiB", "trainer.py:evaluation_loop") == []
    assert guessed("1.96 GiB", allocated="10.00 MiB") == [], "no such model is in 10 MiB"
    assert guessed("2.00 GiB", "modeling_x.py:attn_weights")[0].endswith("² × 2 bytes")
