"""Steps, and what surrounds them."""

from __future__ import annotations

from typing import Any

import torch

from programs.model import random_values
from programs.registry import batch, index, of, often, operation, some


def _after_step(side: Any) -> None:
    if side.scheduler is None:
        return
    if side.scheduler_kind == "plateau":
        side.scheduler.step(1.0)
    elif side.scheduler.last_epoch < 39:  # OneCycleLR ends there
        side.scheduler.step()


def _clip_by_hand(side: Any, clip: str) -> None:
    parameters = side.model.distinct()
    if clip == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    elif clip == "value":
        torch.nn.utils.clip_grad_value_(parameters, 0.25)


@operation(
    20,
    batch=batch,
    without=some,
    how=often("plain", 0.2, "closure"),
    clip=often("no", 0.3, "norm", "value"),
    unscales=of(False, True),
    poison=often(False, 0.15, True),
    to_none=often(True, 0.2, False),
)
def train(
    side: Any,
    batch: int,
    without: list[int],
    how: str,
    clip: str,
    unscales: bool,
    poison: bool,
    to_none: bool,
) -> None:
    """One step of a usual loop."""
    has_scaler = side.program.scaler is not None
    # Clipping by hand is right after unscale_ alone, and on gradients that all ranks have.
    if side.program.scaler == "daemon" or side.reduction == "daemon":
        clip = "no"
    if has_scaler:
        how = "plain"
        unscales = unscales or clip != "no"
    if side.program.scaler == "daemon":
        unscales = False
    if side.reduction == "daemon" and how == "closure":
        how = "plain"
    side.optimizer.zero_grad(set_to_none=to_none)

    def closure() -> torch.Tensor:
        loss = side.backward(batch, without=without, poison=poison and has_scaler)
        side.reduce()
        return loss

    if how == "closure":
        side.optimizer_step(closure)
    else:
        closure()
        # Torch's scaler wants a gradient.
        if has_scaler and all(each.grad is None for each in side.model.distinct()):
            return
        if unscales and side.scaler is not None:
            side.scaler.unscale_(side.optimizer)
        _clip_by_hand(side, clip)
        side.optimizer_step()
    _after_step(side)


@operation(3, lambda program: program.scaler is None, batch=batch, without=some)
def backward(side: Any, batch: int, without: list[int]) -> None:
    """Adds to what gradients there are."""
    side.backward(batch, without=without)


@operation(2, lambda program: program.scaler is None)
def step(side: Any) -> None:
    """Takes a step with the present gradients."""
    side.reduce()
    side.optimizer.step()


@operation(1, set_to_none=of(True, False))
def zero_grad(side: Any, set_to_none: bool) -> None:
    side.optimizer.zero_grad(set_to_none=set_to_none)


@operation(
    5,
    lambda program: program.served.get("accumulate") and program.scaler != "trainer",
    batches=lambda rng: [batch(rng) for _ in range(rng.choice([1, 2, 3]))],
    last=often(True, 0.3, False),
    without=some,
)
def accumulate(side: Any, batches: list[int], last: bool, without: list[int]) -> None:
    """Micro-steps; the last one's gradients may be left to step()."""
    side.optimizer.zero_grad()
    pushed: list[torch.nn.Parameter] = []
    for number, each in enumerate(batches):
        side.backward(each, without=without if number else [])
        pushed += [each for each in side.model.distinct() if each.grad is not None]
        if not (last and number == len(batches) - 1):
            side.micro_step()
    if side.program.scaler == "daemon":
        if not pushed:
            return
        # The reference's scaler looks at .grad alone: leave it something to look at.
        for parameter in pushed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    side.reduce()
    if side.program.scaler == "daemon":
        side.optimizer_step()
    else:
        side.optimizer.step()
    _after_step(side)


@operation(1, index=index)
def drop_gradient(side: Any, index: int) -> None:
    side.parameter(index).grad = None


@operation(1, lambda program: program.scaler is None, index=index, seed=batch)
def set_gradient(side: Any, index: int, seed: int) -> None:
    parameter = side.parameter(index)
    parameter.grad = random_values(parameter.shape, seed, parameter.dtype)


@operation(1, factor=of(0.5, 2.0, -1.0))
def scale_gradients(side: Any, factor: float) -> None:
    for parameter in side.model.distinct():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


@operation(1, lambda program: program.scaler is None, max_norm=of(None, 0, 0.5, 2.0))
def set_max_norm(side: Any, max_norm: float | None) -> None:
    """An attribute of ours."""
    side.clipping["max_norm"] = max_norm
    if side.is_ours:
        side.optimizer.max_norm = max_norm


@operation(0.5)
def hook_steps(side: Any) -> None:
    """Counts steps before and after; `count_hooks` says how many."""
    counted = side.counted

    def before(*_: Any) -> None:
        counted["before"] += 1

    def after(*_: Any) -> None:
        counted["after"] += 1

    side.optimizer.register_step_pre_hook(before)
    side.optimizer.register_step_post_hook(after)
