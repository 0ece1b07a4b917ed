"""The time of a training step, from published figures of the hardware and the shapes of the work.

``step_time`` is the whole; a search takes it apart: ``entry_times`` (shared by all plans with equal layers),
``step_seconds`` or ``assemble``, and ``updates``. All times in seconds.
"""

from .candidate import step_seconds
from .cost import cost_of_step, cost_of_tokens
from .efficiency import Efficiency, Fraction
from .ends import EntryTimes, entry_times, times_of
from .layer import LayerTimes
from .rates import Rates, rates_of
from .shape import Shape, shape_of
from .stages import StageWork, work_of
from .step import StepTime, assemble, step_time
from .updates import Replicas, Updates, updates

__all__ = [
    "Efficiency",
    "EntryTimes",
    "Fraction",
    "LayerTimes",
    "Rates",
    "Replicas",
    "Shape",
    "StageWork",
    "StepTime",
    "Updates",
    "assemble",
    "cost_of_step",
    "cost_of_tokens",
    "entry_times",
    "rates_of",
    "shape_of",
    "step_seconds",
    "step_time",
    "times_of",
    "updates",
    "work_of",
]
