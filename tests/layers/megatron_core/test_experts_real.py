"""What a layer with experts keeps for backward, against Megatron-Core's own ``MoELayer`` on the CPU.

Skipped where ``megatron.core`` is not on the path; no GPU is needed. The real layer runs as one rank, with the
allgather dispatcher and experts one after the other; Transformer Engine's linear layers save what Megatron's save.
Every storage that autograd saves, but for parameters and the input, is compared by its bytes. Numbers of up to eight
bytes are left out: Python makes some of them on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from warnings import catch_warnings, simplefilter
from weakref import WeakSet

import pytest
import torch
from torch._inductor import config as inductor

from memplan.layers.autograd import Recorder
from memplan.layers.megatron_core import moe
from memplan.layers.megatron_core.shape import CoreShape, ExpertShape
from memplan.plan.spec import ModelSpec
from memplan.tape.events import Drop, Hold

with catch_warnings():
    simplefilter("ignore")
    pytest.importorskip("megatron.core.transformer.moe.moe_layer", exc_type=ImportError)
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

pytestmark = pytest.mark.filterwarnings("ignore")

ACTIVATIONS = {"swiglu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "quick_geglu": quick_gelu}

S, B, H, F, E = 32, 2, 64, 48, 8
FP32 = {"router_dtype": "fp32"}
ROUTED: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax first": {"router_score_first": True, "router_scaling": 2.0},
    "fp32": FP32,
    "sigmoid": {"router_score": "sigmoid", "router_scaling": 2.0, "router_dtype": "fp32"},
    "sigmoid with a bias": {"router_score": "sigmoid", "router_expert_bias": True, "router_dtype": "fp32"},
    "groups": {"router_groups": 4, "router_group_top_k": 2, "router_score_first": True},
    "balancing loss": {"router_aux_loss": 0.01, "router_score_first": True},
    "sequence loss": {
        "router_aux_loss": 0.01, "router_balancing": "seq_aux_loss", "router_score": "sigmoid", "router_dtype": "fp32",
    },
    "z loss": {"router_z_loss": 0.001},
    "sinkhorn": {"router_balancing": "sinkhorn", "expert_top_k": 1},
    "gelu": {"activation": "gelu"},
    "shared experts": {"shared_expert_ffn": 96},
    "shared experts with a gate": {"shared_expert_ffn": 96, "shared_expert_gate": True},
    "deterministic": {"deterministic": True},
    "scores of inputs": {"router_weighs_inputs": True, "expert_top_k": 1, "router_score": "sigmoid", **FP32},
    "quick_geglu, clamped": {"activation": "quick_geglu", "activation_clamp": 7.0},
}  # fmt: skip


def shape(*, deterministic: bool = False, implementation: Any = "transformer_engine", **changes: Any) -> CoreShape:
    fields: dict[str, Any] = {
        "name": "small", "family": "gpt", "layers": 1, "hidden": H, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": F,
        "vocab": 64, "positions_max": S, "norm": "rmsnorm", "positions": "none", "activation": "swiglu",
        "attention_bias": False, "attention_output_bias": False, "mlp_bias": False, "embedding_dropout": 0.0,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "experts": E, "expert_top_k": 2, "expert_ffn": F,
    }  # fmt: skip
    experts = ExpertShape(1, 1, "allgather", False, False, False, None, False, 1.0, False)
    spec = ModelSpec(**fields | changes)
    return CoreShape(
        spec, B, S, 1, "bf16", 64, gradient_fusion=False, bias_activation_fusion=False, experts=experts,
        deterministic=deterministic, implementation=implementation,
    )  # fmt: skip


@contextmanager
def one_rank() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    without_te = mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True)
    with without_te, mock.patch("torch.cuda.current_device", return_value="cpu"):
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def config(spec: ModelSpec) -> Any:
    return TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=4, ffn_hidden_size=F, params_dtype=torch.bfloat16, bf16=True,
        add_bias_linear=False, gated_linear_unit=spec.gated, use_cpu_initialization=True, perform_initialization=False,
        activation_func=ACTIVATIONS[spec.activation], activation_func_clamp_value=spec.activation_clamp,
        glu_linear_offset=1.0 if spec.activation == "quick_geglu" else 0.0,
        bias_activation_fusion=False, gradient_accumulation_fusion=False,
        num_moe_experts=E, moe_router_topk=spec.expert_top_k, moe_ffn_hidden_size=F,
        moe_token_dispatcher_type="allgather", moe_router_score_function=spec.router_score,
        moe_router_pre_softmax=spec.router_score_first, moe_router_enable_expert_bias=spec.router_expert_bias,
        moe_router_num_groups=spec.router_groups or None, moe_router_group_topk=spec.router_group_top_k or None,
        moe_router_topk_scaling_factor=spec.router_scaling, moe_router_dtype=spec.router_dtype,
        moe_router_load_balancing_type=spec.router_balancing, moe_aux_loss_coeff=spec.router_aux_loss,
        moe_z_loss_coeff=spec.router_z_loss or None,
        moe_shared_expert_intermediate_size=spec.shared_expert_ffn or None,
        moe_shared_expert_gate=spec.shared_expert_gate, moe_apply_probs_on_input=spec.router_weighs_inputs,
    )  # fmt: skip


def balanced() -> torch.Tensor:
    """Tokens of which as many like one expert as another, in different groups, where the router's weight is a part of
    the identity."""
    tokens = torch.arange(S * B)
    x = 0.01 * torch.randn(S * B, H)
    x[tokens, tokens % E], x[tokens, (tokens + E // 2) % E] = 3.0, 2.0
    return x.view(S, B, H).to(torch.bfloat16)


class Kept:
    """What a node of the graph has of a saved tensor; it ends with the node."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved_by_megatron(like: CoreShape) -> Counter[int]:
    """Bytes of every storage that autograd keeps, and how many there are. What is compiled has no vector instructions:
    those that Inductor finds depend on what ran in this process before. What is saved is decided before it writes code
    (AOTAutograd's partitioner)."""
    with one_rank():
        own = config(like.spec)
        submodules = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False).submodules.mlp.submodules
        layer = MoELayer(own, submodules)
        layer.set_layer_number(1)
        layer.train()
        for parameter in layer.parameters():
            parameter.data = torch.randn_like(parameter.data, dtype=torch.float32).to(torch.bfloat16)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias = layer.router.expert_bias.float()
        layer.router.weight.data = torch.eye(E, H, dtype=torch.bfloat16)
        x = balanced().requires_grad_()
        given = {parameter.untyped_storage().data_ptr() for parameter in (*layer.parameters(), x)}
        found: WeakSet[Kept] = WeakSet()

        def keep(tensor: torch.Tensor) -> Kept:
            kept = Kept(tensor)
            found.add(kept)
            return kept

        scalar = inductor.patch({"cpp.simdlen": 1})
        with scalar, torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
            out = layer(x)
        storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage() for kept in found}
        del out
    sizes = (storage.nbytes() for address, storage in storages.items() if address not in given)
    return Counter(size for size in sizes if size > 8)


def saved_by_recipe(like: CoreShape) -> Counter[int]:
    r = Recorder()
    x, _ = r.leaf(r.outside((S, B, H), "bf16"))
    out = moe.layer(r, x, like)
    r.hand_over(out)
    holds = {event.tensor: event for event in r.events if isinstance(event, Hold)}
    for event in r.events:
        if isinstance(event, Drop):
            holds.pop(event.tensor, None)
    holds.pop(out.storage.id, None)
    kinds = {"bf16": 2, "fp32": 4, "int64": 8, "int32": 4, "bool": 1, "fp64": 8}
    sizes = (torch.Size(event.shape).numel() * kinds[event.dtype] for event in holds.values())
    return Counter(size for size in sizes if size > 8)


ROUTED |= {
    "local": {"implementation": "local"},
    "local, shared experts": {"implementation": "local", "shared_expert_ffn": 96, "shared_expert_gate": True},
}
"""Megatron-Core's own linear layers, as they run here, in the recipe, too."""


@pytest.mark.parametrize("case", ROUTED)
def test_a_layer_keeps_what_megatron_keeps(case: str) -> None:
    like = shape(**ROUTED[case])
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(like.deterministic)
    try:
        assert total(saved_by_recipe(like)) == total(saved_by_megatron(like))
    finally:
        torch.use_deterministic_algorithms(False)


def total(found: Counter[int]) -> dict[int, int]:
    return dict(sorted(found.items()))
