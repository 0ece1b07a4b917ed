"""The time of a training step, from published figures of the hardware and the shapes of the work.

``step_time`` is the whole; a search takes it apart: ``entry_times`` (shared by all plans with equal layers),
``step_seconds`` or ``assemble``, and ``updates``. All times in seconds.
"""

from .efficiency import Efficiency, Fraction
from .layer import EntryTimes, LayerTimes, entry_times, times_of
from .rates import Rates, best_published, error_between_layouts, published_error, rates_of
from .shape import Shape, StageWork, shape_of, work_of
from .stand_in import check_timed, is_timed, lacks_network, on_timed_gpu, ranking_seconds, ranking_time
from .step import StepTime, assemble, cost_of_step, cost_of_tokens, step_seconds, step_time
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
    "best_published",
    "check_timed",
    "cost_of_step",
    "cost_of_tokens",
    "entry_times",
    "error_between_layouts",
    "is_timed",
    "lacks_network",
    "on_timed_gpu",
    "published_error",
    "ranking_seconds",
    "ranking_time",
    "rates_of",
    "shape_of",
    "step_seconds",
    "step_time",
    "times_of",
    "updates",
    "work_of",
]
