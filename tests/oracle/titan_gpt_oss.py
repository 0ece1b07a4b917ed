"""torchtitan's gpt-oss in plain PyTorch: reference modules whose operators, saved tensors and names are those of
``torchtitan/models/gpt_oss`` and ``torchtitan/models/common`` of 21 August 2026 (commit b5bcd76), and what
``parallelize.py``, ``activation_checkpoint.py`` and ``fsdp.py`` do to them.

``varlen_attn`` is PyTorch's own. Stand-ins: the fused norm, and ``autocast`` to fp32, which CPUs do not have.
Shapes: n tokens of a micro-batch, k experts of a token, N = n k rows, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memplan.trace.torchtitan import cross_entropy

from . import titan_loss
from .compiled import compiled
from .fsdp import Sharding, undivided
from .titan_models import Norm


@dataclass(frozen=True)
class Sizes:
    """Of one model and one micro-batch."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    b: int
    s: int
    experts: int
    top_k: int
    expert_ffn: int

    @property
    def n(self) -> int:
        return self.b * self.s


class FusedQKV(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        a, g, d = sizes.heads, sizes.kv_heads, sizes.head_dim
        self.wqkv = nn.Linear(sizes.hidden, (a + 2 * g) * d, bias=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self.sizes
        per = sizes.heads // sizes.kv_heads
        qkv = self.wqkv(x)
        qkv = qkv.view(x.shape[0], -1, per + 2, sizes.head_dim)

        def split(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            n = t.shape[0]
            q, k, v = torch.split(t, [per, 1, 1], dim=-2)
            return (
                q.reshape(n, -1, sizes.head_dim).contiguous(),
                k.reshape(n, -1, sizes.head_dim).contiguous(),
                v.reshape(n, -1, sizes.head_dim).contiguous(),
            )

        return split(qkv)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


class RoPE(nn.Module):
    cache: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.register_buffer("cache", torch.empty(sizes.s, 2 * sizes.head_dim), persistent=False)

    def forward(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prepared = self.prepared(q, positions)
        return self.applied(q, k, prepared)

    def prepared(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        torch._assert_async(torch.all(positions <= self.cache.shape[0] - 1))
        rows = self.cache[positions]
        return rows.view(q.shape[0], 1, self.cache.shape[-1])

    @staticmethod
    def applied(q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        d = q.shape[-1]
        cos = cache[..., :d]
        sin = cache[..., d:]
        q_f = q.float()
        k_f = k.float()
        q_out = (q_f * cos) + (rotate_half(q_f) * sin)
        k_out = (k_f * cos) + (rotate_half(k_f) * sin)
        return q_out.type_as(q), k_out.type_as(k)


@dataclass(frozen=True)
class Metadata:
    """``VarlenMetadata``."""

    places: torch.Tensor
    longest: int


class Varlen(nn.Module):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, masks: Metadata, window: int, transform: Any
    ) -> torch.Tensor:
        result: Any = varlen_attn(
            q.to(torch.bfloat16),
            k.to(torch.bfloat16),
            v.to(torch.bfloat16),
            masks.places,
            masks.places,
            masks.longest,
            masks.longest,
            scale=0.125,
            window_size=(window, 0),
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        out, lse = result
        out = out.to(q.dtype)
        lse_of_tokens = lse.transpose(0, 1)
        return transform(out, lse_of_tokens)  # type: ignore[no-any-return]


def rescaled(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """``apply_attention_sink_rescale``."""
    sinks = sinks.view(*([1] * (lse.ndim - 1)), -1)
    scale = torch.sigmoid(lse - sinks).unsqueeze(-1)
    return out * scale.to(out.dtype)


def _waited(x: torch.Tensor) -> torch.Tensor:
    wait: Any = funcol.wait_tensor
    return wait(x)  # type: ignore[no-any-return]


class Gathered(torch.autograd.Function):
    """``_AllGatherShard`` of spmd_types 0.3.1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _waited(funcol.all_gather_tensor(x, 0, group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return _waited(funcol.reduce_scatter_tensor(gradient, "sum", 0, ctx.group)), None


class Output(nn.Linear):
    """``ScaledBiasRowwiseLinear``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        bias = self.bias
        bias = bias / 1
        return functional.linear(input, weight, bias)


class Attention(nn.Module):
    across: Any = None
    """Ranks of context parallelism."""

    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        self.window = 127 if layer % 2 == 0 else -1
        self.qkv_linear = FusedQKV(sizes)
        self.wo = Output(sizes.heads * sizes.head_dim, sizes.hidden, bias=True)
        self.sinks = nn.Parameter(torch.empty(sizes.heads))
        self.inner_attention = Varlen()
        self.rope = RoPE(sizes)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        q, k, v = self.qkv_linear(x)
        q, k = self.rope(q, k, positions)
        if self.across is not None:
            output = self.gathering(q, k, v, masks)
        else:
            output = self.inner_attention(q, k, v, masks=masks, window=self.window, transform=self.apply_sinks)
        output = output.reshape(n, -1).contiguous()
        return self.wo(output)  # type: ignore[no-any-return]

    def gathering(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Metadata) -> torch.Tensor:
        every: Any = Gathered.apply(k, self.across), Gathered.apply(v, self.across)  # type: ignore[no-untyped-call]
        return self.inner_attention(q, *every, masks=masks, window=self.window, transform=self.apply_sinks)  # type: ignore[no-any-return]

    def apply_sinks(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return rescaled(out, lse, self.sinks)


class Router(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.experts, bias=True)
        self.sizes = sizes

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = functional.linear(*self.wide(x))
        scores = functional.softmax(scores, dim=-1)
        choice = scores + bias
        _, chosen = torch.topk(choice, k=self.sizes.top_k, dim=-1, sorted=False)
        top = scores.gather(dim=-1, index=chosen)
        total = top.sum(dim=-1, keepdim=True) + 1e-20
        top = top / total
        top = top * 1.0
        return top, chosen, scores

    def wide(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``autocast``, which casts the last argument first."""
        bias = self.gate.bias.float()
        weight = self.gate.weight.float()
        return x.float(), weight, bias


def swiglu(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    x_glu, x_linear = x[..., ::2], x[..., 1::2]
    x_glu = x_glu.clamp(min=None, max=limit)
    x_linear = x_linear.clamp(min=-limit, max=limit)
    out_glu = x_glu * torch.sigmoid(alpha * x_glu)
    return torch.addcmul(out_glu, out_glu, x_linear)


class ScaleBias(torch.autograd.Function):
    """``ScaleBiasForward``."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, degree: int, dtype: torch.dtype) -> torch.Tensor:
        return bias.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None, None


class GroupedExperts(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        e, h, f = sizes.experts, sizes.hidden, sizes.expert_ffn
        self.mlp1_weight = nn.Parameter(torch.empty(e, f * 2, h))
        self.mlp1_bias = nn.Parameter(torch.empty(e, f * 2))
        self.mlp2_weight = nn.Parameter(torch.empty(e, h, f))
        self.mlp2_bias = nn.Parameter(torch.empty(e, h))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        mlp1_weight, mlp1_bias = self.mlp1_weight, self.mlp1_bias
        mlp2_weight, mlp2_bias = self.mlp2_weight, self.mlp2_bias
        multiply: Any = torch._grouped_mm
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        slack = (x.shape[0] - offsets[-1]).unsqueeze(0).to(counts.dtype)
        repeats = torch.cat([counts, slack]).long()
        h = multiply(x.bfloat16(), mlp1_weight.transpose(-2, -1).bfloat16(), offs=offsets)
        b1 = torch.cat([mlp1_bias, mlp1_bias.new_zeros(1, mlp1_bias.shape[-1])])
        b1_rows = b1.repeat_interleave(repeats, dim=0, output_size=x.shape[0])
        h = h + b1_rows.to(h.dtype)
        inner = swiglu(h, limit=7.0)
        out = multiply(inner, mlp2_weight.transpose(-2, -1).bfloat16(), offs=offsets)
        b2 = torch.cat([mlp2_bias, mlp2_bias.new_zeros(1, mlp2_bias.shape[-1])])
        b2_rows = b2.repeat_interleave(repeats, dim=0, output_size=x.shape[0])
        b2_rows = ScaleBias.apply(b2_rows, 1, out.dtype)  # type: ignore[no-untyped-call]
        return out + b2_rows  # type: ignore[no-any-return]


@torch.library.custom_op("memplan_tests::scatter_add", mutates_args=())
def scatter_add(out: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """``deterministic_scatter_add``."""
    return out.scatter_add(dim=0, index=index, src=src)


@scatter_add.register_fake
def _(out: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(out)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
    (index,) = ctx.saved_tensors
    grad_src = torch.gather(gradient, dim=0, index=index)
    return gradient, None, grad_src


def _setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    _out, index, _src = inputs
    ctx.save_for_backward(index)


scatter_add.register_autograd(_backward, setup_context=_setup)


@dataclass
class Dispatched:
    tokens: torch.Tensor
    scores: torch.Tensor


class Dispatcher:
    """``LocalTokenDispatcher``."""

    def __init__(self, sizes: Sizes) -> None:
        self.top_k = sizes.top_k

    def reordered(
        self, x: torch.Tensor, top: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = torch.argsort(chosen.view(-1), stable=True)
        scores = top.view(-1)[tokens]
        tokens = tokens // self.top_k
        rows = x[tokens]
        return rows, tokens, scores

    def dispatch(
        self, x: torch.Tensor, top: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Dispatched]:
        rows, tokens, scores = self.reordered(x, top, chosen)
        return rows, counts, Dispatched(tokens, scores)

    def combine(self, rows: torch.Tensor, given: Dispatched, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        rows = (rows.to(torch.float32) * given.scores.reshape(-1, 1)).to(rows.dtype)
        return scatter_add(out, given.tokens.reshape(-1, 1).expand(-1, x.shape[-1]), rows)


class _Exchange(torch.autograd.Function):
    """``_AllToAllUneven`` of spmd_types 0.3.1 (``_collectives.py``), of as many rows to every rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        ranks = dist.get_world_size(group)
        given = [one.contiguous() for one in torch.split(x, [x.shape[0] // ranks] * ranks, dim=0)]
        received = [torch.empty([len(one), *x.shape[1:]], dtype=x.dtype) for one in given]
        dist.all_to_all(received, given, group=group)
        return torch.cat(received, dim=0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        gradient = _Exchange.apply(gradient, ctx.group)  # type: ignore[no-untyped-call]
        return gradient, None


def exchanged_counts(counts: torch.Tensor, group: Any) -> torch.Tensor:
    """``_AllToAllStack``."""
    given = list(torch.unbind(counts, dim=0))
    received = [torch.empty_like(one) for one in given]
    dist.all_to_all(received, given, group=group)
    return torch.stack(received, dim=0)


@dataclass
class Exchanged(Dispatched):
    shape: torch.Size
    places: torch.Tensor


class AllToAll(Dispatcher):
    """``AllToAllTokenDispatcher``."""

    def __init__(self, sizes: Sizes, group: Any) -> None:
        super().__init__(sizes)
        self.group, self.ranks = group, dist.get_world_size(group)

    def dispatch(
        self, x: torch.Tensor, top: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Dispatched]:
        routed, tokens, scores = self.reordered(x, top, chosen)
        with torch.no_grad():
            every = exchanged_counts(counts.view(self.ranks, -1), self.group)
            every = self.split(counts, every)
        rows = _Exchange.apply(routed, self.group)  # type: ignore[no-untyped-call]
        shape, rows, places, here = self.permuted(rows, every)
        return rows, here, Exchanged(tokens, scores, shape, places)

    def split(self, counts: torch.Tensor, every: torch.Tensor) -> torch.Tensor:
        """``_sync_token_count_exchange``, whose sums go to the host one by one."""
        every = every.reshape(-1)
        for one in (counts, every):
            one.view(self.ranks, -1).sum(dim=1)
        return every

    def permuted(
        self, rows: torch.Tensor, every: torch.Tensor
    ) -> tuple[torch.Size, torch.Tensor, torch.Tensor, torch.Tensor]:
        e, total = every.shape[0] // self.ranks, rows.shape[0]
        matrix = every.view(self.ranks, e)
        starts = (every.cumsum(0) - every).view(self.ranks, e)
        lengths = matrix.t().reshape(-1)
        starts = starts.t().reshape(-1)
        segments = torch.arange(lengths.shape[0]).repeat_interleave(lengths, output_size=total)
        out_starts = lengths.cumsum(0) - lengths
        places = starts[segments] + torch.arange(segments.shape[0]) - out_starts[segments]
        here = matrix.sum(0)
        return rows.shape, rows[places, :], places, here

    def unpermuted(self, rows: torch.Tensor, given: Exchanged) -> torch.Tensor:
        whole = rows.new_empty(given.shape)
        whole[given.places, :] = rows
        return whole

    def combine(self, rows: torch.Tensor, given: Dispatched, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(given, Exchanged)
        rows = self.unpermuted(rows, given)
        rows = _Exchange.apply(rows, self.group)  # type: ignore[no-untyped-call]
        out = torch.zeros_like(x)
        rows = (rows.to(torch.float32) * given.scores.reshape(-1, 1)).to(rows.dtype)
        return scatter_add(out, given.tokens.reshape(-1, 1).expand(-1, x.shape[-1]), rows)


class RoutedExperts(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.inner_experts = GroupedExperts(sizes)
        self.dispatcher = Dispatcher(sizes)

    def shared_among(self, sizes: Sizes, group: Any) -> None:
        """Ranks of ``group`` have a part of the experts each."""
        own = sizes.experts // dist.get_world_size(group)
        self.inner_experts = GroupedExperts(replace(sizes, experts=own))
        self.dispatcher = AllToAll(sizes, group)

    def forward(self, x: torch.Tensor, top: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        rows, counts_here, given = self.dispatcher.dispatch(x, top, chosen, counts)
        out = self.inner_experts(rows, counts_here)
        return self.dispatcher.combine(out, given, x)


class MoE(nn.Module):
    expert_bias: torch.Tensor
    tokens_per_expert: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.routed_experts = RoutedExperts(sizes)
        self.router = Router(sizes)
        self.register_buffer("expert_bias", torch.zeros(sizes.experts))
        self.register_buffer("tokens_per_expert", torch.zeros(sizes.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top, chosen, scores = self.router(x, self.expert_bias)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        counts = routing_map.sum(dim=0)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        out = self.routed_experts(x, top, chosen, counts)
        return out  # type: ignore[no-any-return]  # noqa: RET504 (a variable, as there)


class Block(nn.Module):
    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        self.attention = Attention(sizes, layer)
        self.attention_norm = Norm(sizes.hidden)
        self.ffn_norm = Norm(sizes.hidden)
        self.moe = MoE(sizes)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), masks, positions)
        x = x + self.moe(self.ffn_norm(x))
        return x  # noqa: RET504 (a variable, as there)


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleDict({str(layer): Block(sizes, layer) for layer in range(sizes.layers)})
        self.norm = Norm(sizes.hidden)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.skips_head = False

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, masks: Metadata) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, masks, positions)
        h = self.norm(h)
        if self.skips_head:
            return h  # type: ignore[no-any-return]
        output = self.lm_head(h)
        return output  # type: ignore[no-any-return]  # noqa: RET504 (a variable, as there)


# -- recompute and sharding -------------------------------------------------------------------------

aten: Any = torch.ops.aten


def kept() -> set[Any]:
    """``_get_default_save_ops``."""
    from torch._functorch.partitioners import get_default_op_list

    every: Any = get_default_op_list()
    own = {aten.topk.default, aten.max.default, torch.ops.torch_attn._varlen_attn.default}
    own |= {one.default for one in (getattr(torch.ops.memplan_tests, "latent_varlen", None),) if one is not None}
    return {one.default for one in every.compute_intensive_ops} | own


def contexts(kept: set[Any], recomputed: set[tuple[int, int]]) -> Callable[[], Any]:
    """``SelectiveAC._wrap_block``."""

    def made() -> Any:
        products = {False: 0, True: 0}

        def policy(context: Any, operator: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
            if operator is aten.mm.default:
                if tuple(arguments[1].shape) in recomputed:
                    return CheckpointPolicy.PREFER_RECOMPUTE
                products[context.is_recompute] += 1
                if products[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    return made


def recomputed(block: nn.Module, sizes: Sizes, mode: str) -> nn.Module:
    wrap: Any = checkpoint_wrapper
    common = {"preserve_rng_state": False, "early_stop": False}
    if mode == "op":
        context = contexts(kept(), {(sizes.hidden, sizes.experts)})
        return wrap(block, context_fn=context, **common)  # type: ignore[no-any-return]
    return wrap(block, **common) if mode == "full" else block  # type: ignore[no-any-return]


def prefetching(model: Decoder) -> None:
    """The end of ``apply_fsdp_to_decoder``."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    blocks: list[Any] = list(model.layers.values())
    embedding: Any = model.tok_embeddings
    head: Any = model.lm_head
    embedding.set_modules_to_forward_prefetch(blocks[:1])
    for block, after in zip(blocks, [*([one] for one in blocks[1:]), [model.norm, head]], strict=True):
        block.set_modules_to_forward_prefetch(after)
    head.set_modules_to_backward_prefetch(blocks[-1:])
    for block, before in zip(blocks, [embedding, *blocks[:-1]], strict=True):
        block.set_modules_to_backward_prefetch([before])


def expert_meshes(shards: int, ranks: int) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Of shards, of ranks with the same experts, and of ranks that share them."""
    sparse = init_device_mesh("cpu", (shards // ranks, ranks), mesh_dim_names=("efsdp", "ep"))
    return init_device_mesh("cpu", (shards,), mesh_dim_names=("fsdp",)), sparse["efsdp"], sparse["ep"]


def builder(
    sizes: Sizes,
    sharding: Sharding,
    modes: Sequence[str],
    chunks: int = 0,
    *,
    compiles_loss: bool = False,
    ranks: int = 1,
    decoder: Callable[[Any], Any] = Decoder,
    context: bool = False,
) -> Callable[[DeviceMesh], tuple[Any, Callable[[], torch.Tensor]]]:
    """What makes the model; ``modes``: recompute of each block; ``chunks`` of the loss, if it has some.
    ``context``: all ranks share sequences, of which each has ``sizes.s`` tokens. ``ranks``: so many share experts; the
    mesh is then of shards, of those with the same experts, and of those."""

    def build(meshes: Any) -> tuple[Any, Callable[[], torch.Tensor]]:
        mesh, of_experts, together = meshes if ranks > 1 else (meshes,) * 3
        parts = mesh.size() if context else 1
        model = decoder(replace(sizes, s=parts * sizes.s))
        for block in model.layers.values() if context else ():
            block.attention.across = mesh.get_group()
        for block in (one for one in model.layers.values() if ranks > 1 and hasattr(one, "moe")):
            block.moe.routed_experts.shared_among(sizes, together.get_group())
        model.skips_head = chunks > 0
        loss_of = compiled(titan_loss.cross_entropy) if compiles_loss else titan_loss.cross_entropy
        given = sharding.policy
        policy = MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype, cast_forward_inputs=False)
        common: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        for name, block in list(model.layers.items()):
            model.layers[name] = recomputed(block, sizes, modes[int(name)])
        fully_shard(model.tok_embeddings, **common)
        fully_shard([model.norm, model.lm_head], **common, reshard_after_forward=False)
        across = sharding.shards > sizes.experts
        infos: list[Any] = [_get_mesh_info(one) for one in (mesh, of_experts) if ranks > 1]
        for block in model.layers.values():
            mixed = hasattr(block, "moe")
            experts = {id(one) for one in block.moe.routed_experts.inner_experts.parameters()} if mixed else set()

            def placed(one: nn.Parameter, of: set[int] = experts) -> Any:
                if ranks == 1:
                    return Shard(1) if id(one) in of else None
                return ShardPlacementResult(Shard(int(across and id(one) in of)), infos[id(one) in of])

            fully_shard(block, **common, shard_placement_fn=placed if mixed and (across or ranks > 1) else None)
        fully_shard(model, **common)
        undivided(model, sharding)
        if ranks > 1:
            prefetching(model)
        tokens, labels = (torch.randint(0, sizes.vocab, (sizes.n,)) for _ in range(2))
        positions = torch.arange(sizes.n)
        places = torch.zeros(2, dtype=torch.int32)
        read = [torch.randint(0, sizes.vocab, (parts * sizes.n,)) for _ in range(2 * context)]

        def loss(_: Sequence[torch.Tensor] = read) -> torch.Tensor:
            logits = model(tokens, positions, Metadata(places, sizes.s))
            if chunks:
                return titan_loss.chunked(logits, labels, model.lm_head, chunks, loss_of=loss_of)
            result = cross_entropy(logits.unsqueeze(0), labels.unsqueeze(0))
            del logits
            return result

        return model, loss

    return build
