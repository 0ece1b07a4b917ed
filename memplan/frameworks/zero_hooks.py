"""Modules without parameters that hooks also run for: each lets ZeRO-3 prefetch, and counts as a step of its trace.

Read off ``modeling_llama.py``, ``modeling_gpt2.py`` and ``modeling_bert.py`` of transformers 5.x: containers
(the model, a layer, its attention and feed-forward), activations, dropouts and rotary embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Hooks:
    """How many such modules run, by the submodule with parameters that they run directly before or behind."""

    before: dict[str, int] = field(default_factory=dict)
    behind: dict[str, int] = field(default_factory=dict)
    backward_before: dict[str, int] = field(default_factory=dict)
    backward_behind: dict[str, int] = field(default_factory=dict)
    at: dict[str, int] = field(default_factory=dict)
    """How many run directly before a tensor of that name begins."""
    not_recomputed: str = ""
    """The submodule before which one fewer runs when the layer is recomputed: the layer itself."""

    def around(self, module: str, *, behind: bool, backward: bool, recomputing: bool) -> int:
        name = module.removesuffix(".weight")
        if backward:
            return (self.backward_behind if behind else self.backward_before).get(name, 0)
        count = (self.behind if behind else self.before).get(name, 0)
        return count - int(recomputing and not behind and name == self.not_recomputed)


NONE = Hooks()

LLAMA = {
    "embedding": Hooks(before={"word": 2}, at={"position_ids_fp32": 1}),
    "layer": Hooks(
        before={"attention_norm": 1, "query": 1, "gate": 1},
        behind={"gate": 1},
        backward_before={"down": 2, "attention_output": 1},
        backward_behind={"up": 1},
        not_recomputed="attention_norm",
    ),
    "final_norm": Hooks(backward_before={"final_norm": 1}),
    "head": Hooks(backward_before={"head": 1, "word": 1}),
}
GPT2 = {
    "embedding": Hooks(before={"word": 2}, behind={"position": 1}, backward_before={"position": 1}),
    "layer": Hooks(
        before={"attention_norm": 1, "qkv": 1, "up": 1},
        behind={"attention_output": 1, "up": 1, "down": 1},
        backward_before={"down": 3, "attention_output": 2},
        backward_behind={"down": 1},
        not_recomputed="attention_norm",
    ),
    "final_norm": Hooks(backward_before={"final_norm": 1}),
    "head": Hooks(backward_before={"head": 1, "word": 1}),
}
BERT = {
    "embedding": Hooks(before={"word": 3}, behind={"embedding_norm": 2}, backward_before={"embedding_norm": 1}),
    "layer": Hooks(
        before={"query": 3, "attention_output": 1, "up": 1, "down": 1},
        behind={"attention_output": 1, "up": 1, "down": 1},
        backward_before={
            "down_norm": 2,
            "down": 1,
            "up": 2,
            "attention_output_norm": 2,
            "attention_output": 1,
            "value": 1,
        },
        not_recomputed="query",
    ),
    "head": Hooks(
        before={"transform": 3},
        behind={"transform": 1},
        backward_before={"word": 3, "head": 3, "transform_norm": 1, "transform": 1},
        backward_behind={"transform": 2},
    ),
}

NORM = Hooks(backward_before={"final_norm": 1})
HEAD = Hooks(backward_before={"head": 1, "word": 1})
PHI3 = {
    **LLAMA,
    "layer": Hooks(
        before={"attention_norm": 1, "qkv": 1, "gate_up": 1},
        behind={"attention_output": 1, "gate_up": 1, "down": 1},
        backward_before={"down": 3, "attention_output": 2},
        backward_behind={"down": 1},
        not_recomputed="attention_norm",
    ),
}
GEMMA2 = {
    **LLAMA,
    "layer": Hooks(
        before={"attention_norm": 1, "query": 1, "gate": 1},
        behind={"gate": 1},
        backward_before={"mlp_output_norm": 1, "down": 1, "attention_output": 1},
        backward_behind={"up": 1},
        not_recomputed="attention_norm",
    ),
}
OPT = {
    "embedding": Hooks(before={"word": 3}),
    "layer": Hooks(
        before={"attention_norm": 1, "query": 1},
        behind={"up": 1},
        backward_before={"down": 1, "attention_output": 1},
        backward_behind={"down": 1},
        not_recomputed="attention_norm",
    ),
    "final_norm": Hooks(backward_before={"final_norm": 2}),
    "head": HEAD,
}
NEOX = {
    "embedding": Hooks(before={"word": 2}, at={"position_ids_fp32": 2}),
    "layer": Hooks(
        before={"attention_norm": 1, "qkv": 1, "mlp_norm": 1, "up": 1},
        behind={"up": 1},
        at={"blocks_sum": 1, "residual_mlp": 1},
        backward_before={"down": 3, "attention_output": 2},
        backward_behind={"down": 1},
        not_recomputed="attention_norm",
    ),
    "final_norm": NORM,
    "head": HEAD,
}
GPTJ = {
    "embedding": Hooks(before={"word": 2}, behind={"word": 1}),
    "layer": Hooks(
        before={"attention_norm": 1, "query": 1, "attention_output": 1, "up": 1},
        behind={"attention_output": 1, "up": 1, "down": 1},
        backward_before={"down": 3, "attention_output": 2},
        backward_behind={"down": 1, "attention_output": 1},
    ),
    "final_norm": NORM,
    "head": HEAD,
}
FALCON = {
    "embedding": Hooks(before={"word": 2}, at={"position_ids_fp32": 1}),
    "layer": Hooks(
        before={"attention_norm": 1, "qkv": 1, "up": 1},
        behind={"up": 1},
        backward_before={"down": 2, "attention_output": 1},
        backward_behind={"down": 1},
    ),
    "final_norm": NORM,
    "head": HEAD,
}

FAMILIES: dict[str, dict[str, Hooks]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen3": LLAMA,
    "qwen2": LLAMA,
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "opt": OPT,
    "gpt_neox": NEOX,
    "gptj": GPTJ,
    "falcon": FALCON,
    "gpt2": GPT2,
    "bert": BERT,
}
"""By family and module; ``gpt`` (2018) has no table yet."""
