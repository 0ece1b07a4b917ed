"""``device-map`` in the time of a step: devices run one after the other."""

from __future__ import annotations

from ...plan.resolved import ResolvedPlan
from ...search.time.framework import FrameworkTime
from ...search.time.shape import StageWork, Work, recomputed


class DeviceMapTime(FrameworkTime):
    pipelined = False

    def stages(self, plan: ResolvedPlan) -> Work:
        """The embedding, and a head that is tied to it, are on the first device, an untied head on the last."""
        assert plan.device_map is not None
        held = [len(plan.device_map[device]) for device in sorted(plan.device_map)]
        last, tied = len(held) - 1, plan.model.tied_embeddings
        return tuple(
            (StageWork(n, recomputed(plan, n), not at, at == last, at == (0 if tied else last)),)
            for at, n in enumerate(held)
        )
