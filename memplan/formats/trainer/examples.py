"""transformers' example scripts by name (``examples/pytorch``): which head they train, and how long rows are where
nothing says it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...plan.errors import ABSENT, Node, PlanError
from ..launch import Asked
from .keys import OF_LOOPS_BY_HAND

_GLUE = {"mnli": 3, "stsb": 1}
"""Labels of GLUE's tasks; of the others 2 (``text-classification/run_glue.py``)."""
_CLASSIFIERS = ("run_glue", "run_classification", "run_xnli")
"""Of sequences, ``max_seq_length`` 128 by default (``text-classification/``)."""
_XNLI = 3
_OTHERS = {
    "run_ner": "a classifier of tokens", "run_swag": "a model of multiple choice", "run_qa": "a head of answers",
    "run_qa_beam_search": "a head of answers",
}  # fmt: skip
_OTHER_INPUTS = re.compile(
    r"run_(?:image|audio|speech|semantic|instance|object|clip|mae|mim|wav2vec|xtreme|vit|vision)\w*"
)
BY_HAND = "_no_trainer"
"""How example scripts end that train in a loop of their own with Accelerate."""
_LOOP_BY_HAND: Mapping[str, str | bool] = {"optim": "adamw_torch", "do_eval": True, "prediction_loss_only": True}
"""What that loop does: ``torch.optim.AdamW`` as PyTorch makes it (foreach), where the Trainer takes the fused kernel,
and an evaluation behind every epoch that keeps losses (``main`` of ``run_clm_no_trainer.py``)."""
_ROWS = {"run_clm": 1024, "run_fim": 1024, "run_summarization": 1024, "run_translation": 1024}
"""``block_size`` where a tokenizer takes more (``language-modeling/run_clm.py``), or ``max_source_length``."""
_TARGETS = {"run_summarization": 128, "run_translation": 128}
"""``max_target_length`` of encoder-decoders (``summarization/run_summarization.py``)."""


def said_by(called: str, written: Node, asked: Asked) -> Node:
    """The arguments ``written`` with what the example script ``called`` adds to them."""
    name = called.removesuffix(BY_HAND)
    head = _OTHERS.get(name) or ("a model of images or sound" if _OTHER_INPUTS.fullmatch(name) else None)
    if head is not None:
        problem = (
            f"starts {called}.py, which trains {head}: heads and losses of language models, and of classifiers of "
        )
        raise PlanError("", ABSENT, f"{problem}sequences, alone are modelled", origin=written.origin)
    added: dict[str, Node] = {}
    lengths = ("block_size", "max_seq_length", "max_length")
    if name in _TARGETS:
        added["max_target_length"] = written.mapping.get("max_target_length", Node(_TARGETS[name], written.origin))
        source = written.mapping.get("max_source_length", Node(_ROWS[name], written.origin))
        kept = {key: node for key, node in written.mapping.items() if key not in (*lengths, "max_source_length")}
        written = Node({**kept, "block_size": source}, written.origin)
    rows = 128 if name in _CLASSIFIERS else _ROWS.get(name)
    if rows is not None and not any(written.mapping.get(one) for one in lengths):
        added["block_size"] = Node(rows, written.origin)
    if name in _CLASSIFIERS and "labels" not in asked.names and "num_labels" not in written.mapping:
        added["num_labels"] = Node(_labels(name, written.mapping, written), written.origin)
    if name != called:
        by_hand = {key: Node(value, written.origin) for key, value in _LOOP_BY_HAND.items()}
        rest = {key: node for key, node in written.mapping.items() if key not in OF_LOOPS_BY_HAND}
        written = Node({**by_hand, **rest}, written.origin)
    return written.with_items(added)


def _labels(name: str, given: Mapping[str, Node], written: Node) -> int:
    task, regression = given.get("task_name"), given.get("do_regression")
    if name == "run_xnli":
        return _XNLI
    if regression is not None and regression.value is True:
        return 1
    if name == "run_glue" and task is not None and isinstance(task.value, str):
        return _GLUE.get(task.value, 2)
    raise PlanError(
        "num_labels", ABSENT, f"is needed: {name}.py counts them in its data; say --labels N", origin=written.origin
    )
