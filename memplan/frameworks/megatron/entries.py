"""What each virtual stage holds, as names of modules (``plan.megatron_layout``)."""

from __future__ import annotations

from functools import lru_cache

from ...plan import megatron_layout
from ...plan.plan import Pipeline, ResolvedPlan
from .modules import DECODER, DECODER_EMBEDDING


def stage_entries(plan: ResolvedPlan) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Names of the entries of every chunk of every stage."""
    layers = plan.model.layers
    if plan.batch.decoder_seq is not None:
        encoder = ("embedding", *(f"layer.{at}" for at in range(layers)), "encoder_norm")
        decoder = (DECODER_EMBEDDING, *(f"{DECODER}{at}" for at in range(layers)), "final_norm", "head")
        return (((*encoder, *decoder),),)
    has_mtp = plan.model.mtp_layers > 0
    return _named_entries(plan.model.layers, plan.layout.pp, plan.layout.vpp, plan.pipeline, has_mtp)


@lru_cache(maxsize=1024)
def _named_entries(
    layers: int, stages: int, chunks: int, pipeline: Pipeline, has_mtp: bool
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    found = megatron_layout.stages(
        layers,
        stages,
        chunks,
        first_layers=pipeline.first_layers,
        last_layers=pipeline.last_layers,
        count_embedding=pipeline.count_embedding,
        count_loss=pipeline.count_loss,
        layout=pipeline.layout,
    )
    apart = any(chunk.further for stage in found for chunk in stage)
    return tuple(tuple(_entries(chunk, layers, has_mtp, apart) for chunk in stage) for stage in found)


def _entries(chunk: megatron_layout.Chunk, layers: int, has_mtp: bool, apart: bool) -> tuple[str, ...]:
    """The final norm is where the head is; before multi-token prediction, where the last layer is
    (``has_final_layernorm_in_this_stage``). That is where the head is, or ``apart``, where a layout string says."""
    normed = layers - 1 in chunk.layers if has_mtp else chunk.head
    return (
        *(("embedding",) if chunk.embedding else ()),
        *(f"layer.{i}" for i in chunk.layers),
        *(("final_norm",) if normed else ()),
        *(("mtp",) if has_mtp and (chunk.further if apart else chunk.head) else ()),
        *(("head",) if chunk.head else ()),
    )
