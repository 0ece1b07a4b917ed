"""torchtitan's Llama and Qwen 3 in plain PyTorch: reference modules whose operators, saved tensors and names are those
of ``torchtitan/models/llama3/model.py``, ``qwen3/model.py`` and ``models/common`` of 21 August 2026 (b5bcd76)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import Shard
from torch.nn import functional

from . import titan_gpt_oss, titan_muse
from .fsdp import undivided
from .titan_gpt_oss import Gathered, Metadata
from .titan_models import Norm, feed_forward
from .titan_muse import Sizes


class FusedQKV(titan_gpt_oss.FusedQKV):
    def __init__(self, sizes: Sizes) -> None:
        given: Any = sizes
        super().__init__(given)
        features = self.wqkv.out_features
        self.wqkv = nn.Linear(sizes.hidden, features, bias=False)


class Attention(nn.Module):
    """``GQAttention``."""

    across: Any = None
    """Ranks of context parallelism."""

    def __init__(self, sizes: Sizes, *, norms: bool) -> None:
        super().__init__()
        given: Any = sizes
        self.rope = titan_gpt_oss.RoPE(given) if norms else titan_muse.RoPE(sizes)
        self.qkv_linear = FusedQKV(sizes)
        self.wo = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)
        self.inner_attention = titan_muse.Varlen()
        self.q_norm = Norm(sizes.head_dim) if norms else None
        self.k_norm = Norm(sizes.head_dim) if norms else None

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        xq, xk, xv = self.qkv_linear(x)
        if self.q_norm is not None or self.k_norm is not None:
            assert self.q_norm is not None
            assert self.k_norm is not None
            xq = self.q_norm(xq)
            xk = self.k_norm(xk)
        xq, xk = self.rope(xq, xk, positions)
        if self.across is not None:
            out = self.gathering(xq, xk, xv, masks)
        else:
            out = self.inner_attention(xq, xk, xv, masks=masks).contiguous()
        out_of_tokens = out.view(out.shape[0], -1)
        return self.wo(out_of_tokens)  # type: ignore[no-any-return]

    def gathering(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Metadata) -> torch.Tensor:
        """``set_gqa_inner_attention_local_map``."""
        every: Any = Gathered.apply(k, self.across), Gathered.apply(v, self.across)  # type: ignore[no-untyped-call]
        return self.inner_attention(q, *every, masks=masks).contiguous()  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, sizes: Sizes, *, norms: bool) -> None:
        super().__init__()
        self.attention = Attention(sizes, norms=norms)
        self.feed_forward = feed_forward(sizes.hidden, sizes.ffn)
        self.attention_norm = Norm(sizes.hidden)
        self.ffn_norm = Norm(sizes.hidden)


class LlamaBlock(_Block):
    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__(sizes, norms=False)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), masks, positions)
        out = h + self.feed_forward(self.ffn_norm(h))
        return out  # type: ignore[no-any-return]  # noqa: RET504 (a variable, as there)


class Qwen3Block(_Block):
    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__(sizes, norms=True)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), masks, positions)
        x = x + self.feed_forward(self.ffn_norm(x))
        return x  # noqa: RET504 (a variable, as there)


class Decoder(titan_muse.Decoder):
    """With blocks of another kind, and a plain norm, head and embedding."""

    block: type[nn.Module]

    def __init__(self, sizes: Sizes) -> None:
        nn.Module.__init__(self)
        self.tok_embeddings: Any = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleDict({str(layer): self.block(sizes, layer) for layer in range(sizes.layers)})
        self.norm: Any = Norm(sizes.hidden)
        self.lm_head: Any = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.skips_head = False


class Llama(Decoder):
    block = LlamaBlock


class Qwen3(Decoder):
    block = Qwen3Block


class Router(titan_gpt_oss.Router):
    """``TokenChoiceTopKRouter`` whose gate has no bias."""

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.gate = nn.Linear(sizes.hidden, sizes.experts, bias=False)

    def wide(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        weight = self.gate.weight.float()
        return x.float(), weight


class GroupedExperts(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        e, h, f = sizes.experts, sizes.hidden, sizes.expert_ffn
        self.w1 = nn.Parameter(torch.empty(e, f, h))
        self.w2 = nn.Parameter(torch.empty(e, h, f))
        self.w3 = nn.Parameter(torch.empty(e, f, h))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = self.w1, self.w2, self.w3
        multiply: Any = torch._grouped_mm
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = functional.silu(multiply(x.bfloat16(), w1.bfloat16().transpose(-2, -1), offs=offsets))
        h = h * multiply(x.bfloat16(), w3.bfloat16().transpose(-2, -1), offs=offsets)
        return multiply(h, w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)  # type: ignore[no-any-return]


class RoutedExperts(titan_gpt_oss.RoutedExperts):
    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.inner_experts: Any = GroupedExperts(sizes)

    def shared_among(self, sizes: Any, group: Any) -> None:
        super().shared_among(sizes, group)
        self.inner_experts = GroupedExperts(replace(sizes, experts=sizes.experts // dist.get_world_size(group)))


class MoE(titan_gpt_oss.MoE):
    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.routed_experts = RoutedExperts(sizes)
        self.router = Router(sizes)


class Qwen3MoeBlock(nn.Module):
    def __init__(self, sizes: Any, layer: int) -> None:
        super().__init__()
        self.attention = Attention(sizes, norms=True)
        self.moe = MoE(sizes)
        self.attention_norm = Norm(sizes.hidden)
        self.ffn_norm = Norm(sizes.hidden)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), masks, positions)
        x = x + self.moe(self.ffn_norm(x))
        return x  # noqa: RET504 (a variable, as there)


class Qwen3Moe(Decoder):
    block = Qwen3MoeBlock


def _prefetching(model: Any) -> None:
    """The end of ``apply_fsdp_to_decoder``, of a stage that may have no embedding, and no norm and head."""
    blocks = list(model.layers.values())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    if model.tok_embeddings is not None and blocks:
        model.tok_embeddings.set_modules_to_forward_prefetch(blocks[:1])
    ends = [[model.norm, model.lm_head]] if model.norm is not None else []
    for block, after in zip(blocks, [*([one] for one in blocks[1:]), *ends], strict=False):
        block.set_modules_to_forward_prefetch(after)
    if model.norm is not None and blocks:
        model.lm_head.set_modules_to_backward_prefetch(blocks[-1:])
    first = [model.tok_embeddings] if model.tok_embeddings is not None else []
    for block, before in zip(blocks[::-1], [*blocks[-2::-1], *first], strict=False):
        block.set_modules_to_backward_prefetch([before])


def stage(decoder: Callable[[Any], Any]) -> Callable[..., Any]:
    """What makes one stage's model of ``decoder`` (``pipeline_llm``, which leaves out what is another's;
    ``apply_fsdp_to_decoder`` with pipeline parallelism). Positions are those of one micro-batch for all."""

    class Staged(decoder):  # type: ignore[valid-type, misc]
        @property
        def output(self) -> Any:
            return self.lm_head

        def given(self) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.arange(self.n), torch.zeros(2, dtype=torch.int32)

        def take(self, positions: torch.Tensor, places: torch.Tensor) -> None:
            self.positions, self.masks = positions, Metadata(places, self.s)

        def forward(self, tokens: torch.Tensor) -> Any:
            h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
            for layer in self.layers.values():
                h = layer(h, self.masks, self.positions)
            h = self.norm(h) if self.norm is not None else h
            if self.skips_head:
                return h
            return self.lm_head(h) if self.lm_head is not None else h

    def made(sizes: Any, pipeline: Any, at: int, sharding: Any, mode: str, meshes: Any, *, ends_apart: bool) -> Any:
        assert ends_apart
        low, high = pipeline.edges[at : at + 2]
        ranks = meshes.data.size() if pipeline.context else 1
        model: Any = Staged(replace(sizes, s=ranks * sizes.s))
        for block in model.layers.values() if pipeline.context else ():
            block.attention.across = meshes.data.get_group()
        model.n, model.s = sizes.n, sizes.s
        for block in model.layers.values() if meshes.together is not None else ():
            block.moe.routed_experts.shared_among(sizes, meshes.together.get_group())
        first, last = not at, at == pipeline.stages - 1
        for name in list(model.layers):
            if not low <= int(name) < high:
                del model.layers[name]
        model.tok_embeddings = model.tok_embeddings if first else None
        model.norm, model.lm_head = (model.norm, model.lm_head) if last else (None, None)
        model.skips_head = last and pipeline.chunks > 0
        policy = sharding.policy
        policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
        common: dict[str, Any] = {"mesh": meshes.data, "mp_policy": policy, "reshard_after_forward": False}
        for name, block in list(model.layers.items()):
            if hasattr(block, "moe"):
                model.layers[name] = titan_gpt_oss.recomputed(block, sizes, mode)
            else:
                model.layers[name] = titan_muse.recomputed(block, mode)
        if first:
            fully_shard(model.tok_embeddings, **common)
        if last:
            fully_shard([model.norm, model.lm_head], **common)
        shares = meshes.together is not None
        infos: list[Any] = [_get_mesh_info(one) for one in (meshes.data, meshes.of_experts) if shares]
        across = shares and meshes.data.size() > sizes.experts
        for block in model.layers.values():
            experts = {id(one) for one in block.moe.routed_experts.inner_experts.parameters()} if shares else set()

            def placed(one: nn.Parameter, of: set[int] = experts) -> Any:
                return ShardPlacementResult(Shard(int(across and id(one) in of)), infos[id(one) in of])

            fully_shard(block, **common, shard_placement_fn=placed if shares else None)
        fully_shard(model, **common)
        undivided(model, sharding)
        if shares:
            _prefetching(model)
        return model

    return made
