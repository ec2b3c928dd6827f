"""Learning rate schedulers."""

from __future__ import annotations

from typing import Any

import torch

from programs.registry import of, operation

lr_scheduler = torch.optim.lr_scheduler


class WarmUp:
    """A warm-up from 0, as in many scripts; a class, so that it can be pickled."""

    def __call__(self, epoch: int) -> float:
        return min(epoch / 4, 1.0)


def _made(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)
    if kind == "warm_up":
        return lr_scheduler.LambdaLR(optimizer, WarmUp())
    if kind == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    if kind == "one_cycle":
        group = optimizer.param_groups[0]
        cycles = any(key in group for key in ("betas", "momentum"))
        if "momentum" in group and "betas" not in group:
            cycles = all(each.get("momentum") for each in optimizer.param_groups)
        return lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.02, total_steps=40, cycle_momentum=cycles
        )
    if kind == "plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    if kind == "linear_to_0":
        return lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=7)
    if kind == "exponential":
        return lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    if kind == "cyclic":
        return lr_scheduler.CyclicLR(
            optimizer, base_lr=1e-4, max_lr=1e-2, step_size_up=2, cycle_momentum=False
        )
    return lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=3),
        ],
        milestones=[2],
    )


KINDS = (
    "warm_up",
    "cosine",
    "one_cycle",
    "plateau",
    "linear_to_0",
    "exponential",
    "cyclic",
    "sequential",
)


@operation(2, kind=of(*KINDS))
def schedule(side: Any, kind: str) -> None:
    """Makes a scheduler, which sets the rate from now on."""
    side.scheduler_kind = kind
    side.scheduler = _made(kind, side.optimizer)


@operation(1.5, times=of(1, 2, 5))
def tick(side: Any, times: int) -> list[float] | None:
    if side.scheduler is None:
        return None
    for _ in range(times):
        if side.scheduler_kind == "plateau":
            side.scheduler.step(1.0)
        elif side.scheduler.last_epoch < 39:
            side.scheduler.step()
    return side.scheduler.get_last_lr()


@operation(0.5)
def reload_scheduler(side: Any) -> None:
    """A new one with the former's state."""
    if side.scheduler is not None:
        saved = side.scheduler.state_dict()
        rates = [group["lr"] for group in side.optimizer.param_groups]
        side.scheduler = _made(side.scheduler_kind, side.optimizer)
        side.scheduler.load_state_dict(saved)
        for group, rate in zip(side.optimizer.param_groups, rates):
            group["lr"] = rate
