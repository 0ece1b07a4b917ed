"""Training loops of transformers, trl and LLaMA-Factory, an object each: what a sample is, what the loss is of, when a
reference runs, and which fields of a plan belong to it alone.

trl 1.15 and 1.16: ``trainer/sft_trainer.py``, ``trainer/dpo_trainer.py``, ``trainer/kto_trainer.py``,
``trainer/grpo_trainer.py``, ``trainer/rloo_trainer.py``, ``trainer/reward_trainer.py``,
``experimental/cpo/cpo_trainer.py``, ``experimental/orpo/orpo_trainer.py``. ``formats/trainer/trl.py`` reads their
arguments. LLaMA-Factory of August 2026: ``train/dpo/trainer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Literal

from ..values import dataclass, replace
from .releases import TRL_NEWEST, TRL_SCORES_IN_STEP, TRL_TILES, Version

Releases = tuple[Version, Version]
"""Two releases, and all between them."""


LossOf = Literal["model", "log-probabilities", "whole-logits", "all-logits", "scores", "labels"]

Reduced = Literal["rows", "rows-of-copy", "rows-and-likelihood", "rows-alone", "tokens", "clipped", "clipped-rows"]
"""What becomes of labels' log-probabilities: sums of rows beside a reference's, the same by Axolotl's kernel, sums of
rows alone with a cross entropy of the chosen sequences or without, the mean of tokens, clipped ratios of tokens (GRPO),
or of rows (RLOO)."""


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """A loop that runs the model."""

    name: str
    """``trainer.loop`` of a plan."""
    loss_of: LossOf = "model"
    """The model's own loss of logits, of tokens or of sequences (labels), or one that the loop takes of labels'
    log-probabilities, made by tiles or of all logits (trl's before 1.15, or LLaMA-Factory's), or of scores."""
    follows: tuple[Releases, ...] = ((TRL_TILES, TRL_NEWEST),)
    """Releases of trl that are followed, of a loop that trl runs."""
    of_trl: bool = True
    """A loss of its own is computed by trl, which makes adapters and checkpoints its way."""
    beside: tuple[str, ...] = ()
    """What trl's head computes beside these, of ``layers.log_probabilities.OUTPUTS``."""
    reduced: Reduced = "rows"
    sequences: int = 1
    """Of a sample: both of a pair run in one batch."""
    drops_out: bool = True
    """Dropout is on, as in the model's configuration."""
    inputs: tuple[str, ...] = ("input_ids", "labels")
    """Tensors (b, s) int64 of each micro-batch on the device,"""
    masks: tuple[str, ...] = ()
    """and further ones of the collator's."""
    reference: Literal["never", "in-step", "between-steps"] = "never"
    """When a reference scores the batch: behind the policy's forward pass, or before its step."""
    mismatched: bool = False
    """As many sequences again, prompts with others' completions, are scored without a graph by the policy, before its
    own pass, and by the reference."""
    prepares: bool = False
    """Quantised models are prepared, as all of trl's trainers did before 0.26 (``releases.prepares``)."""
    fields: tuple[str, ...] = ()
    """Of ``trainer``, which no other loop has."""
    needed: Mapping[str, str] = field(default_factory=dict)
    """Those that have to be said, and what they are."""
    lost: Mapping[str, Version] = field(default_factory=dict)
    """Arguments of its configuration that trl has no more, and since when."""
    evaluates: bool = False
    """Evaluation of a batch size of its own is modelled."""
    untimed: str = ""
    """What it runs that no step's time counts."""
    titled: str | None = None
    """What reports call it, where that is not trl and its name."""
    trainer: str = ""
    """The class that runs it, where several loops share what is assumed of them."""

    @property
    def title(self) -> str:
        """What reports call it; empty of a loop of the plan's own."""
        return f"trl {self.name}" if self.titled is None else self.titled

    @property
    def own_loss(self) -> bool:
        """The loss is not that of a language model's logits: one of trl's trainers runs it, or a classifier has it."""
        return self.loss_of != "model"

    @property
    def run_by_trl(self) -> bool:
        """One of trl's trainers runs it."""
        return self.own_loss and self.of_trl

    def released(self, trl: Version | None) -> TrainingLoop:
        """This loop in a release of trl: before 1.15 log-probabilities are made of all logits, but that SFTTrainer has
        the model's own loss."""
        if trl is None or trl >= TRL_TILES or self.loss_of != "log-probabilities":
            return self
        first, until = TRL_SCORES_IN_STEP
        within = self.reduced == "clipped" and first <= trl < until
        loss_of: LossOf = "model" if self.reduced == "tokens" else "whole-logits"
        return replace(self, loss_of=loss_of, reference="in-step" if within else self.reference)

    def of_labels(self) -> TrainingLoop:
        """This loop around a model for sequence classification, whose collator makes one label of a sequence."""
        return replace(self, loss_of="labels", inputs=("input_ids",), masks=("attention_mask",))


OF_TILES: Releases = (TRL_TILES, TRL_NEWEST)
OF_WHOLE_LOGITS: Releases = ((0, 10), (1, 13))
"""Releases whose DPOTrainer holds all logits, and GRPOTrainer from 0.15 on; 1.14 has Triton kernels of its own for
their loss."""

ALONE: Releases = ((1, 0), TRL_NEWEST)
"""Releases whose CPOTrainer and ORPOTrainer are followed."""

NONE = TrainingLoop("none", titled="")
TRANSFORMERS = TrainingLoop("transformers", evaluates=True, titled="Trainer")
SFT = TrainingLoop(
    "sft",
    loss_of="log-probabilities",
    beside=("entropy", "is_top1"),
    reduced="tokens",
    masks=("attention_mask",),
    follows=((OF_WHOLE_LOGITS[0], TRL_NEWEST),),
    lost={"max_seq_length": (0, 20)},  # ``trainer/sft_config.py``
    evaluates=True,
)
DPO = TrainingLoop(
    "dpo",
    loss_of="log-probabilities",
    beside=("entropy", "mean_logits", "is_top1"),
    sequences=2,
    drops_out=False,
    masks=("attention_mask", "completion_mask"),
    reference="in-step",
    follows=(OF_WHOLE_LOGITS, OF_TILES),
    fields=("precompute_ref_log_probs",),
    evaluates=True,
    untimed="the reference's forward pass",
)
OF_LLAMA_FACTORY = TrainingLoop(
    "llama-factory-dpo",
    loss_of="all-logits",
    of_trl=False,
    sequences=2,
    drops_out=False,
    masks=("attention_mask", "input_ids_cloned", "attention_mask_cloned", "labels_cloned"),
    reference="in-step",
    untimed=DPO.untimed,
    titled="LLaMA-Factory DPO",
)
"""``concatenated_forward`` clones the batch (``nested_detach``)."""
KTO = replace(
    DPO,
    name="kto",
    beside=("entropy", "mean_logits"),
    sequences=1,
    mismatched=True,
    masks=(
        *("attention_mask", "completion_mask"),
        *("mismatched_input_ids", "mismatched_attention_mask", "mismatched_completion_mask"),
    ),
    follows=(OF_TILES,),
    untimed="forward passes of the reference and of mismatched completions",
)
ORPO = TrainingLoop(
    "orpo",
    loss_of="whole-logits",
    reduced="rows-and-likelihood",
    sequences=2,
    drops_out=False,
    prepares=True,
    inputs=("input_ids",),
    masks=("attention_mask", "labels"),
    follows=(ALONE,),
    evaluates=True,
    trainer="ORPOTrainer",
)
CPO = replace(ORPO, name="cpo", trainer="CPOTrainer")
SIMPO = replace(CPO, name="simpo", reduced="rows-alone")
"""``CPOTrainer`` with ``cpo_alpha`` 0, which SimPO's loss is used with."""
OF_AXOLOTL = replace(
    DPO,
    name="axolotl-dpo",
    loss_of="whole-logits",
    reduced="rows-of-copy",
    follows=(((1, 8), (1, 9)),),
    titled="Axolotl DPO",
)
"""``AxolotlDPOTrainer`` (``core/trainers/dpo/trainer.py``): trl's of all logits with kernels in two of its functions
(``loaders/patch_manager.py``, ``_apply_trl_trainer_utils_patches``)."""
GRPO = TrainingLoop(
    "grpo",
    loss_of="log-probabilities",
    beside=("entropy",),
    reduced="clipped",
    reference="between-steps",
    follows=(((0, 15), OF_WHOLE_LOGITS[1]), OF_TILES),
    fields=("completion_length", "generation_memory", "keeps_reference"),
    needed={"completion_length": "tokens of the longest completion", "generation_memory": "vLLM's share; 0 elsewhere"},
    evaluates=True,
    untimed="generation and any forward pass of a reference",
)
RLOO = replace(GRPO, name="rloo", reduced="clipped-rows", follows=(OF_TILES,))
REWARD = TrainingLoop(
    "reward",
    loss_of="scores",
    sequences=2,
    drops_out=False,
    inputs=("input_ids",),
    masks=("attention_mask",),
    follows=(((0, 24), TRL_NEWEST),),
    evaluates=True,
)

TRAINING_LOOPS: Mapping[str, TrainingLoop] = MappingProxyType(
    {
        one.name: one
        for one in (
            NONE,
            TRANSFORMERS,
            SFT,
            DPO,
            KTO,
            ORPO,
            CPO,
            SIMPO,
            OF_LLAMA_FACTORY,
            OF_AXOLOTL,
            GRPO,
            RLOO,
            REWARD,
        )
    }
)
"""By ``trainer.loop``."""
