"""The Trainer's arguments by name, and rows of them that several of its loops read: evaluation."""

from __future__ import annotations

from ...plan.errors import Node
from ...plan.text import parse_yaml
from ..settings import Keys, Reader, Row

_MAPPINGS = (
    *("accelerator_config", "fsdp_config", "deepspeed", "liger_kernel_config", "model_init_kwargs"),
    *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
)


def with_mappings(written: Node) -> Node:
    """``written`` with a mapping in the place of text that is one in JSON, as a command line has it
    (``TrainingArguments._VALID_DICT_FIELDS``)."""
    texts = {key: node for key in _MAPPINGS if (node := written.mapping.get(key)) is not None}
    return written.with_items(
        {
            key: Node.of(parse_yaml(node.value, f"{node.origin}: {key}", line=False).plain(), node.origin)
            for key, node in texts.items()
            if isinstance(node.value, str) and node.value.startswith("{")
        }
    )


class Arguments(Keys):
    """The Trainer's arguments; ``null`` counts as left out."""

    def node(self, name: str) -> Node | None:
        node = self.given.get(name)
        return node if node is not None and node.value is not None else None

    def asked(self, name: str) -> Node | None:
        """The value of ``name`` if it turns something on: it is given, and no empty text, list or false."""
        node = self.node(name)
        return node if node is not None and node.value not in (False, "", []) and node.value != {} else None

    def asks(self, name: str) -> bool:
        """Whether ``name`` turns something on."""
        return self.asked(name) is not None

    def on(self, *names: str) -> Node | None:
        """The first of ``names`` that is true."""
        switches = (self.value(Row(name, "", kind="switch")) for name in names)
        return next((node for node in switches if node is not None and node.value is True), None)


def _evaluates(arguments: Arguments) -> bool:
    """Whether the file asks for an evaluation; by default the Trainer makes none."""
    strategy = arguments.first("eval_strategy", "evaluation_strategy")
    while_training = strategy is not None and strategy[1].value not in ("no", False)
    return while_training or arguments.on("do_eval") is not None


def _evaluation_batch(reader: Reader) -> None:
    """Counts only where there is an evaluation."""
    name = "per_device_eval_batch_size"
    node = reader.settings.node(name)
    if _evaluates(reader.settings):
        reader.building.put("trainer.evaluation_mbs", 8 if node is None else node, name)
    elif node is not None and node.value != 8:
        reader.building.note(
            "evaluation-off",
            f"{name} is given, but neither eval_strategy nor do_eval: no evaluation is part of the estimate",
        )


def _evaluation(reader: Reader) -> None:
    """Logits are kept for ``compute_metrics`` alone, which no file shows."""
    arguments: Arguments = reader.settings
    if not _evaluates(arguments):
        return
    loss_only, steps = arguments.on("prediction_loss_only"), arguments.node("eval_accumulation_steps")
    if loss_only is not None or "eval-batches" in reader.context:
        return
    if steps is not None:
        reader.building.put("trainer.evaluation_batches", steps, "eval_accumulation_steps")
        return
    reader.building.note(
        "evaluation-logits",
        "evaluation is assumed to compute no metrics; with compute_metrics the logits of every batch stay on the "
        "device until its end: give their number as --eval-batches, or eval_accumulation_steps",
    )


def _loss_alone(reader: Reader) -> None:
    """Without ``compute_metrics``, which no file shows, the Trainer keeps the loss (``prediction_loss_only``)."""
    arguments: Arguments = reader.settings
    if _evaluates(arguments) and arguments.on("prediction_loss_only") is None:
        reader.building.note(
            "evaluation-logits",
            "evaluation is assumed to compute no metrics; with compute_metrics the logits of every batch stay on the "
            "device until its end, which is not modelled here",
        )


def no_evaluation(reader: Reader) -> None:
    """Evaluation of these trainers is not modelled: one of no more sequences than training has takes less, and others
    are refused, where no flag names another size."""
    arguments: Arguments = reader.settings
    if not _evaluates(arguments) or "eval-mbs" in reader.context:
        return
    size = arguments.node("per_device_eval_batch_size") or Node(8, arguments.where("eval_strategy"))
    trained = reader.building.items["batch.mbs"].value
    if isinstance(size.value, int) and isinstance(trained, int) and size.value > trained:
        raise size.wrong(
            "per_device_eval_batch_size",
            f"must be at most per_device_train_batch_size, {trained}, in this trainer, whose larger evaluations are "
            f"not modelled: --eval-mbs {trained} leaves this one out, and the estimate is of training",
        )


EVALUATION = (
    Row("per_device_eval_batch_size", "trainer.evaluation_mbs", read=_evaluation_batch),
    Row("eval_strategy", "trainer.evaluation_batches", read=_evaluation),
)
"""Of the Trainer's own loop."""
EVALUATION_OF_LOSS = (
    Row("per_device_eval_batch_size", "trainer.evaluation_mbs", read=_evaluation_batch),
    Row("eval_strategy", "trainer.evaluation_mbs", read=_loss_alone),
)
"""Under FSDP and DeepSpeed, where logits that evaluation keeps are not modelled."""
