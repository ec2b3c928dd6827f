"""The keyword arguments of an optimizer that outlive a session."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from optstate import _native
from optstate._access import Access
from optstate._storage import Storage
from optstate._torch.collective.reducing import Reducing
from optstate.session_spec import LossScaler, LossScalerState

# Effects of loading a checkpoint's state into an existing job before the first step: the job
# is put back to the checkpoint, the state is left out, or the load is refused.
_RESUME_CHOICES = ("checkpoint", "job", "error")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The keyword arguments that outlive a session; see ServedOptimizer."""

    endpoint: str | None = None
    partition: str | None = None  # greedy
    accumulate: bool = False
    connect_timeout: float | None = None
    step_timeout: float | None = None
    optimizer: str = "adam"
    state_format: str = "float32"
    reduction: str = "trainer"
    loss_scaler: LossScaler | None = None
    overlap: bool = False
    master_format: str = "float32"
    accumulate_dtype: str | None = None  # float32
    resume: str = "checkpoint"
    views: bool = True
    detect_changes: str = "exact"
    storage: Storage = Storage()
    gradient_views: bool | None = None  # see makes_gradient_views()
    # Options of torch's class, which a group may lack.
    required: Collection[str] = ()
    # Constructor arguments that no group can change: Adagrad's initial sum.
    fixed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # The state with which loss_scaler begins in a new job.
    loss_scaler_state: LossScalerState | None = None
    speculative: bool = False
    across_nodes: str | None = None
    stale_nodes: str = "refuse"  # or "replace": nodes whose job lacks steps of the others
    # Whether it clips by the norm of a norm_group, which copies of an optimizer lack.
    in_norm_group: bool = False
    # Places, in the order of all parameters, of those that another job of norm_group counts.
    norm_duplicates: frozenset[int] = frozenset()
    access: Access | None = None
    tunes_offload: bool = False  # finds the fastest offload_fraction by measurement
    # Parameters and gradients pass between this process's devices and the daemon's on them.
    shares_device_memory: bool = False
    # overlap_with_ddp=True stands for the values of reduction, overlap and speculative.
    overlaps_with_ddp: bool = False
    reducing: Reducing = Reducing()

    def __post_init__(self) -> None:
        if self.across_nodes not in (None, "replicated", "sharded"):
            raise ValueError(
                f"Invalid across_nodes: {self.across_nodes!r} (None, replicated or sharded)"
            )
        if self.stale_nodes not in ("refuse", "replace"):
            raise ValueError(f"Invalid stale_nodes: {self.stale_nodes!r} (refuse or replace)")
        if self.stale_nodes == "replace" and self.across_nodes != "replicated":
            raise ValueError(
                'stale_nodes="replace" needs across_nodes="replicated", where each node has all of'
                " the state: leave it out"
            )
        if self.resume not in _RESUME_CHOICES:
            known = ", ".join(_RESUME_CHOICES)
            raise ValueError(f"Invalid resume: {self.resume!r} (one of {known})")
        if self.detect_changes not in _native.CHANGE_DETECTIONS:
            known = ", ".join(_native.CHANGE_DETECTIONS)
            raise ValueError(f"Invalid detect_changes: {self.detect_changes!r} (one of {known})")
        if self.gradient_views not in (None, True, False):
            raise ValueError(
                f"Invalid gradients_as_views: {self.gradient_views!r} (None, True or False)"
            )
        if self.partition is not None and self.partition not in _native.PARTITIONS:
            known = ", ".join(_native.PARTITIONS)
            raise ValueError(f"Invalid partition: {self.partition!r} (one of {known})")
        if self.reduction not in ("trainer", "daemon", "collective"):
            raise ValueError(
                f"Invalid reduction: {self.reduction!r} (trainer, daemon or collective)"
            )
        if self.partition is not None and self.reduction == "daemon":
            raise ValueError(
                f'partition={self.partition!r} has no meaning with reduction="daemon", where each'
                " rank pushes its gradients of all parameters: leave it out"
            )
        if (
            self.accumulate_dtype is not None
            and self.accumulate_dtype not in _native.ACCUMULATE_DTYPES
        ):
            known = ", ".join(_native.ACCUMULATE_DTYPES)
            raise ValueError(
                f"Invalid accumulate_dtype: {self.accumulate_dtype!r} (one of {known})"
            )
        if self.accumulate_dtype is not None and not self.accumulate:
            raise ValueError(
                f"accumulate_dtype={self.accumulate_dtype!r} needs accumulate=True: without it"
                " there is nothing that it would be of"
            )
        if self.tunes_offload and self.speculative:
            raise ValueError(
                'offload_fraction="auto" compares the times of whole updates, and with'
                " speculative=True parts of them are taken during backward(): give a number"
            )
        if self.loss_scaler is not None and not isinstance(self.loss_scaler, LossScaler):
            raise TypeError(f"loss_scaler is {self.loss_scaler!r}, not an optstate.LossScaler")
        for name in ("connect_timeout", "step_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"Invalid {name}: {value}")

    @property
    def reduction_as_given(self) -> tuple[str, str]:
        """The keyword and the value by which the script chose who reduces gradients."""
        if self.overlaps_with_ddp:
            return "overlap_with_ddp", "True"
        return "reduction", f'"{self.reduction}"'

    def makes_gradient_views(self, world_size: int) -> bool:
        """Returns whether gradients are to become views as soon as backward() has made them.

        Unless the user chooses: with several ranks, but not with one. A single rank was measured
        to lose time by views: the copy moves into backward(), when a large gradient has left the
        core's cache, and the daemon, which otherwise looks at gradients while step() copies the
        next ones, has nothing to do meanwhile.
        """
        if self.overlap:
            return False  # backward() pushes them itself
        return world_size > 1 if self.gradient_views is None else self.gradient_views
