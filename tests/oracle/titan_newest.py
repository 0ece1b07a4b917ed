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


class LoRALinear(nn.Linear):
    """``LoRALinear`` of ``torchtitan/components/lora.py``."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        base_out = super().forward(input)
        lora_out = self.lora_b(self.lora_a(input))
        return base_out + 2.0 * lora_out


def with_adapters(decoder: type[Decoder], rank: int, targets: set[str]) -> type[Decoder]:
    """``decoder`` as ``LoRAConverter.convert`` changes it."""

    class Adapted(decoder):  # type: ignore[misc, valid-type]
        def __init__(self, sizes: Sizes) -> None:
            super().__init__(sizes)
            self.requires_grad_(False)
            for name, module in list(self.named_modules()):
                if name.rpartition(".")[2] in targets:
                    around = self.get_submodule(name.rpartition(".")[0])
                    setattr(around, name.rpartition(".")[2], LoRALinear(module, rank))

    return Adapted


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
        trained = self.inner_experts.w1.requires_grad
        super().shared_among(sizes, group)
        self.inner_experts = GroupedExperts(replace(sizes, experts=sizes.experts // dist.get_world_size(group)))
        self.inner_experts.requires_grad_(trained)


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


@torch.library.custom_op("memplan_tests::latent_varlen", mutates_args=())
def latent_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``_varlen_attn`` of values of another width, for which PyTorch's fake kernel gives queries' width."""
    raise NotImplementedError


@latent_varlen.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    state = torch.empty(2, dtype=torch.int64)
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), state


def _latent_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _latent_backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v, *_ = ctx.saved_tensors
    return tuple(torch.empty_like(one, memory_format=torch.contiguous_format) for one in (q, k, v))


latent_varlen.register_autograd(_latent_backward, setup_context=_latent_setup)


class LatentAttention(nn.Module):
    """``Attention`` of DeepSeek V3."""

    across: Any = None

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.sizes, both = sizes, sizes.plain + sizes.turned
        if sizes.q_rank:
            self.wq_a = nn.Linear(sizes.hidden, sizes.q_rank, bias=False)
            self.q_norm = Norm(sizes.q_rank)
            self.wq_b = nn.Linear(sizes.q_rank, sizes.heads * both, bias=False)
        else:
            self.wq = nn.Linear(sizes.hidden, sizes.heads * both, bias=False)
        self.wkv_a = nn.Linear(sizes.hidden, sizes.kv_rank + sizes.turned, bias=False)
        self.kv_norm = Norm(sizes.kv_rank)
        self.wkv_b = nn.Linear(sizes.kv_rank, sizes.heads * (sizes.plain + sizes.width), bias=False)
        self.wo = nn.Linear(sizes.heads * sizes.width, sizes.hidden, bias=False)
        self.rope = titan_muse.RoPE(replace(sizes, head_dim=sizes.turned))

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        sizes, n = self.sizes, x.shape[0]
        if sizes.q_rank:
            q = self.wq_a(x)
            q = self.wq_b(self.q_norm(q))
        else:
            q = self.wq(x)
        q = q.view(n, -1, sizes.plain + sizes.turned)
        q_nope, q_pe = torch.split(q, [sizes.plain, sizes.turned], dim=-1)
        kv = self.wkv_a(x)
        kv, k_pe = torch.split(kv, [sizes.kv_rank, sizes.turned], dim=-1)
        q_pe, k_pe = self.rope(q_pe, k_pe.unsqueeze(1), positions)
        q = torch.cat([q_nope, q_pe], dim=-1)
        kv = self.wkv_b(self.kv_norm(kv))
        kv = kv.view(n, -1, sizes.plain + sizes.width)
        k_nope, v = torch.split(kv, [sizes.plain, sizes.width], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, k_nope.size(1), -1)], dim=-1)
        output = self.inner_attention(q, k, v).contiguous()
        output = output.view(n, -1)
        return self.wo(output)  # type: ignore[no-any-return]

    def inner_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.across is not None:
            k, v = Gathered.apply(k, self.across), Gathered.apply(v, self.across)  # type: ignore[no-untyped-call]
        out: torch.Tensor = latent_varlen(q, k, v)[0]
        return out


class GroupRouter(Router):
    """``TokenChoiceTopKRouter`` with either score, and with groups of experts."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes: Any = self.sizes
        scores = functional.linear(*self.wide(x))
        scores = torch.sigmoid(scores) if sizes.score == "sigmoid" else functional.softmax(scores, dim=-1)
        choice = scores + bias
        if sizes.groups:
            choice = self.limited(choice)
        _, chosen = torch.topk(choice, k=sizes.top_k, dim=-1, sorted=False)
        top = scores.gather(dim=-1, index=chosen)
        if sizes.normed:
            total = top.sum(dim=-1, keepdim=True) + 1e-20
            top = top / total
        top = top * 1.0
        return top, chosen, scores

    def limited(self, choice: torch.Tensor) -> torch.Tensor:
        sizes: Any = self.sizes
        grouped = choice.unflatten(-1, (sizes.groups, sizes.experts // sizes.groups))
        best, _ = grouped.topk(2, dim=-1)
        of_group = best.sum(dim=-1)
        _, groups = torch.topk(of_group, k=sizes.group_top_k, dim=-1, sorted=False)
        # ``ones_like`` there, by which a trace knows the gradient of the loss
        mask = torch.full_like(of_group, True, dtype=torch.bool)
        mask.scatter_(-1, groups, False)
        choice = grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).flatten(-2)
        return choice  # noqa: RET504 (a variable, as there)


class SharedMoE(MoE):
    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.router = GroupRouter(sizes)
        self.shared_experts = feed_forward(sizes.hidden, sizes.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top, chosen, scores = self.router(x, self.expert_bias)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        counts = routing_map.sum(dim=0)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        out = self.routed_experts(x, top, chosen, counts)
        shared = self.shared_experts(x)
        out = out + shared
        return out  # type: ignore[no-any-return]  # noqa: RET504 (a variable, as there)


class DeepSeekBlock(nn.Module):
    def __init__(self, sizes: Any, layer: int) -> None:
        super().__init__()
        self.attention = LatentAttention(sizes)
        self.attention_norm = Norm(sizes.hidden)
        self.ffn_norm = Norm(sizes.hidden)
        if layer < sizes.dense:
            self.feed_forward = feed_forward(sizes.hidden, sizes.ffn)
        else:
            self.moe = SharedMoE(sizes)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), masks, positions)
        x = x + (self.moe(self.ffn_norm(x)) if hasattr(self, "moe") else self.feed_forward(self.ffn_norm(x)))
        return x  # noqa: RET504 (a variable, as there)


class DeepSeek(Decoder):
    block = DeepSeekBlock


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
