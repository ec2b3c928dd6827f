"""The keyword of torch's ZeroRedundancyOptimizer for steps that are taken during backward().

That class takes a step in a communication hook of DistributedDataParallel, by collectives between
the ranks. Here the daemon has all of the state, and begins a step while backward() pushes gradients
to it: reduction="daemon", overlap=True and speculative=True together.
"""

from __future__ import annotations

import dataclasses

from optstate._torch.job.partition import NEED_WHOLE
from optstate._torch.settings import Settings
from optstate.errors import InvalidArgumentError, UnimplementedError

_INSTEAD = (
    ' Give reduction="daemon", overlap=True in its place: backward() pushes gradients, and step()'
    " has all parameters updated"
)
_PLACEMENT_NVME = 2
_DURABILITY_NONE = 1


def with_overlap(settings: Settings, wanted: bool) -> Settings:
    """Returns settings with what overlap_with_ddp=True stands for; with False, the same ones.

    TypeError: not a bool. InvalidArgumentError: another keyword contradicts it.
    UnimplementedError: steps cannot be begun during backward() with other keywords; it says what
    to give instead.
    """
    if not isinstance(wanted, bool):
        raise TypeError(f"overlap_with_ddp is {wanted!r}, not True or False")
    if not wanted:
        return settings
    _check(settings)
    return dataclasses.replace(
        settings, reduction="daemon", overlap=True, speculative=True, overlaps_with_ddp=True
    )


def veto(max_norm: float, loss_scale: float) -> str | None:
    """Returns what to say of a step that clipping or a loss scaler may change after it was begun
    during backward(); None: neither is asked for."""
    if not max_norm and not loss_scale:
        return None
    what = "max_norm" if max_norm else "loss_scaler"
    return (
        f"overlap_with_ddp=True with {what}: a step that it changes or skips is rolled back, and"
        " taken in step(); then none is begun during backward() in the next eight steps. The"
        " results are the same. `optctl describe job` counts such steps"
    )


def _check(settings: Settings) -> None:
    if settings.reduction == "collective":
        raise InvalidArgumentError(
            "overlap_with_ddp=True has the daemon average gradients during backward(), and"
            ' reduction="collective" has step() do so: leave one out'
        )
    if settings.partition is not None:
        raise InvalidArgumentError(
            f"partition={settings.partition!r} has no meaning with overlap_with_ddp=True, where"
            " each rank pushes its gradients of all parameters: leave it out"
        )
    if settings.across_nodes is not None:
        raise refusal_on_nodes(f"across_nodes={settings.across_nodes!r}")
    if settings.in_norm_group:
        raise refusal_on_nodes("norm_group")
    refused = None
    if settings.optimizer in NEED_WHOLE:
        refused = f"{settings.optimizer}, whose updates need whole parameters and cannot be undone"
    elif settings.storage.placement == _PLACEMENT_NVME:
        refused = 'placement="nvme", where a step that is undone would be written twice'
    elif settings.storage.durability > _DURABILITY_NONE:
        refused = "durability, by which a step that is undone would be written to the disk"
    elif settings.storage.device_budget_bytes:
        refused = "device_budget, where a device keeps nothing to undo a step with"
    elif settings.tunes_offload:
        refused = 'offload_fraction="auto", which compares the times of whole updates'
    if refused is not None:
        raise UnimplementedError(f"overlap_with_ddp=True cannot be had with {refused}.{_INSTEAD}")


def refusal_on_nodes(where: str) -> UnimplementedError:
    """Returns the error of a job whose step several daemons take together, or none of them."""
    return UnimplementedError(
        f"overlap_with_ddp=True cannot be had with {where}: all daemons prepare a step before any"
        " of them takes it, so none is begun during backward(). Leave it out:"
        " DistributedDataParallel averages gradients during backward(), and step() updates"
    )
