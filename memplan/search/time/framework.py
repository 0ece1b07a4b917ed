"""What the time of a step asks of a framework: how its code runs layers, and what replicas and the optimizer cost."""

from __future__ import annotations

from ...plan.plan import ResolvedPlan
from .host import Host
from .shape import ITEMSIZE, Entries, StageWork, Work, recomputed
from .updates import Exchange, Replicas


class FrameworkTime:
    """One framework, as the time of a step sees it. What stands here holds for plain PyTorch on one GPU."""

    fused_attention = False
    """Transformer Engine chooses attention's kernels."""
    pipelined = True
    """Stages run beside one another, on different micro-batches."""
    compared = ""
    """Which steps of its code were compared with measured ones (``rates.PUBLISHED_ERRORS``); empty: none."""

    # -- layers and stages ---------------------------------------------------------------------------------

    def entries(self, plan: ResolvedPlan) -> Entries:
        """What the kernels of layers and ends do for one micro-batch. ``PlanError`` where no recipe covers them."""
        raise NotImplementedError

    def host(self, plan: ResolvedPlan) -> Host:
        """What its code takes of the host."""
        return Host()

    def rounding(self, plan: ResolvedPlan) -> float:
        """The part by which whole numbers make a kernel's work for one sequence less than a share of that for many: 0
        where every kernel's work grows in step with an even number of sequences, 1 where nothing is known."""
        return 0.0

    def scattered_sends(self, plan: ResolvedPlan) -> bool:
        """Whether between stages every tensor-parallel rank sends its part of a hidden state."""
        return plan.layout.sequence_parallel

    def overlapped_sends(self, plan: ResolvedPlan, vpp: int) -> bool:
        """Whether, with so many chunks a stage, sends run beside passes."""
        return vpp > 1 and plan.pipeline.overlap_p2p

    def stages(self, plan: ResolvedPlan) -> Work:
        """The stages of a resolved plan. ``PlanError`` where they cannot be cut."""
        layers = plan.model.layers
        return ((StageWork(layers, recomputed(plan.recompute, layers), True, plan.model.final_norm, True),),)

    # -- replicas ------------------------------------------------------------------------------------------

    def gradient_dtype(self, plan: ResolvedPlan) -> str:
        """Of gradients between replicas."""
        return plan.precision.stored

    def owners(self, replicas: Replicas) -> int:
        """Ranks that share the states of a parameter."""
        layout = replicas.plan.layout
        return (layout.dp or 1) if layout.zero else 1

    def expert_owners(self, replicas: Replicas) -> int:
        """Ranks that share the states of an expert's parameter."""
        return self.owners(replicas)

    def exposed(self, replicas: Replicas, rank: Exchange) -> float:
        """Seconds of communication between replicas that passes do not hide."""
        return 0.0

    # -- the optimizer -------------------------------------------------------------------------------------

    def mixed(self, plan: ResolvedPlan) -> bool:
        """Whether main parameters in fp32 are kept beside those that passes use."""
        return False

    def main_bytes(self, plan: ResolvedPlan) -> int:
        """Of an element of the parameters that the optimizer updates."""
        return 4 if self.mixed(plan) else ITEMSIZE[plan.precision.stored]

    def buffer_bytes(self, plan: ResolvedPlan, ranks: int) -> float:
        """That passes over a whole gradient buffer move for each parameter, once a step, of so many replicas."""
        return 0.0

    def stepped(self, plan: ResolvedPlan) -> float:
        """The part of the parameters that are updated on the GPU."""
        return 1.0

    def offload(self, replicas: Replicas, owned: float, shard: float, microbatches: int) -> float:
        """Seconds of copies between device and host, and of updates there, of so many parameters that a rank updates
        and holds."""
        return 0.0
