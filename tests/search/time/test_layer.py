from __future__ import annotations

import pytest

from memplan.search.time import entry_times, kernels as time_of, rates_of, shape_of
from memplan.search.time.host import HOST_WAIT, TRANSFORMERS_BACKWARD, TRANSFORMERS_OPERATOR

from .plans import EVERY_FRAMEWORK, megatron_22b, plan

TOLERANCE = 0.03


@pytest.mark.parametrize(
    ("flags", "forward", "backward", "recompute"),
    [
        ({}, 7.7, 11.9, 0.0),
        ({"sequence_parallel": "true"}, 7.2, 11.8, 0.0),
        ({"recompute": "full"}, 7.7, 11.9, 7.6),
        ({"recompute": "selective"}, 7.7, 11.9, 1.3),
        ({"recompute": "selective", "sequence_parallel": "true"}, 7.2, 11.8, 1.3),
    ],
)
def test_a_layer_of_the_22b_model(flags: dict[str, object], forward: float, backward: float, recompute: float) -> None:
    """Milliseconds of arXiv 2205.05198, table 4; nothing was fitted to them."""
    layer = entry_times(megatron_22b(**flags)).layer
    assert 1e3 * layer.forward == pytest.approx(forward, rel=TOLERANCE)
    assert 1e3 * layer.backward == pytest.approx(backward, rel=TOLERANCE)
    assert 1e3 * layer.recompute == pytest.approx(recompute, rel=0.16)


def test_what_selective_recompute_runs_again_is_the_core_of_attention() -> None:
    """Its two products, and not what is around them: 4 b s s a d / t FLOPs."""
    entries = shape_of(megatron_22b(recompute="selective")).entries
    assert entries.recomputed.flops - entries.layer.flops == 4.0 * 4 * 2048 * 2048 * 64 * 96 / 8


def test_plans_with_equal_layers_share_their_times() -> None:
    """Stages, replicas and layers change nothing that was computed."""
    flags = {"gpus": 64, "gbs": 64, "pp": 4}
    assert entry_times(megatron_22b(**flags)).layer is entry_times(megatron_22b(**flags, layers=24)).layer


def test_tensor_parallelism_divides_products_but_not_communication() -> None:
    flags = {"model": "llama-3-70b", "framework": "megatron", "gpu": "h100-80gb", "seq": 4096}
    one = entry_times(plan(**flags)).layer
    eight = entry_times(plan(**flags, tp=8)).layer
    assert one.forward / 8 < eight.forward < one.forward
    assert one.parallel == 0.0
    assert eight.parallel > 0.0


def test_eager_attention_takes_longer_than_flash() -> None:
    flash, eager = (
        entry_times(plan(model="llama-3-8b", gpu="a100-80gb", dtype="bf16", seq=4096, attention=kind)).layer
        for kind in ("flash", "eager")
    )
    assert eager.forward > 1.2 * flash.forward


def test_waiting_for_every_kernel_takes_longer() -> None:
    flags = {"model": "gpt2-xl", "gpu": "a100-80gb", "dtype": "bf16"}
    usual = entry_times(plan(**flags)).layer
    blocking = entry_times(plan(**flags, env="CUDA_LAUNCH_BLOCKING=1")).layer
    assert blocking.forward > usual.forward


def test_nothing_runs_beside_python_that_waits_for_every_kernel() -> None:
    """Megatron-DeepSpeed's modules are called as transformers' are: each operator's Python and the waiting add up."""
    job = plan(**{**EVERY_FRAMEWORK["megatron-deepspeed"], "recompute": "none"}, env="CUDA_LAUNCH_BLOCKING=1")
    shape, layer = shape_of(job), entry_times(job).layer
    for work, spent, operator in (
        (shape.entries.layer.forward, layer.forward, TRANSFORMERS_OPERATOR),
        (shape.entries.layer.backward, layer.backward, TRANSFORMERS_BACKWARD),
    ):
        alone = time_of.seconds(work, rates_of(job), shape.ranks)
        assert spent == pytest.approx(alone.device + alone.exposed + alone.launches * (operator + HOST_WAIT))
        assert alone.launches > 10
