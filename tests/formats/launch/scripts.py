"""Launch scripts in the style of Megatron-LM's and BigScience's own, in a minimal form."""

# ruff: noqa: E501 (tables of scripts, arguments and the lines that they get)

from __future__ import annotations

from pathlib import Path

_GOLDEN = Path(__file__).parents[2] / "golden" / "launch"

GPT, LLAMA, BERT, BIGSCIENCE = (
    (_GOLDEN / f"{name}.sh").read_text(encoding="utf-8") for name in ("gpt", "llama", "bert", "bigscience")
)
SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
"""The arguments that Megatron needs."""


def script(*lines: str, arguments: str = "") -> str:
    """A script of ``lines`` that trains a small model with ``arguments``."""
    return "\n".join(["#!/bin/bash", *lines, f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} {arguments}", ""])
