"""What Megatron-Core refuses, and what is not modelled: every rule, in the order in which they are asked."""

from __future__ import annotations

from .adapters import check_adapters
from .kernel_rules import (
    check_buckets,
    check_environment,
    check_kernels,
    check_low_attention,
    check_low_output,
    check_low_precision,
    check_modules,
    check_user_buffers,
)
from .layout_rules import (
    check_blocks,
    check_context_parallel,
    check_decoder,
    check_distributed,
    check_experts,
    check_further_layers,
    check_groups,
    check_hybrid,
    check_overlap,
    check_sharding,
    check_torch_sharding,
    check_virtual_stages,
)
from .memory_rules import (
    check_deferral,
    check_graphs,
    check_layer_offload,
    check_offloading,
    check_optimizer,
    check_recomputed,
    check_saved,
    check_step_graph,
)
from .part_rules import check_chain, check_delta, check_grouped_tensor, check_router

RULES = (
    check_low_precision,
    check_low_attention,
    check_low_output,
    check_experts,
    check_router,
    check_overlap,
    check_optimizer,
    check_recomputed,
    check_offloading,
    check_layer_offload,
    check_deferral,
    check_step_graph,
    check_saved,
    check_groups,
    check_blocks,
    check_modules,
    check_buckets,
    check_graphs,
    check_user_buffers,
    check_decoder,
    check_hybrid,
    check_delta,
    check_grouped_tensor,
    check_chain,
    check_distributed,
    check_sharding,
    check_torch_sharding,
    check_kernels,
    check_context_parallel,
    check_virtual_stages,
    check_further_layers,
    check_environment,
    check_adapters,
)
