"""Which parameters an optimizer treats apart from the others."""

from __future__ import annotations

from ..layers.module import Parameter

EMBEDDINGS = ("word.weight", "position.weight", "token_type.weight")
"""Parameters of embedding modules, as the recipes name them."""

HEAD = "head.weight"


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Whether Muon takes it: matrices, but for embeddings and the head (``torch/optim/_muon.py``, ``Muon``: "an
    optimizer for 2D parameters of neural network hidden layers")."""
    return len(parameter.shape) == 2 and parameter.name not in (*EMBEDDINGS, HEAD)
