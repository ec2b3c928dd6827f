"""Gradients that the script changes, replaces and keeps between backward() and step()."""

from __future__ import annotations

import random
from typing import Any

import torch

from programs.model import random_values
from programs.operations.training import _after_step
from programs.registry import batch, index, of, operation

_EDITS = ("data", "numpy", "in place", "view", "replace", "swap data", "none", "zero", "share")
_EDITS += ("exchange", "transpose", "again")


def _edits(rng: random.Random) -> list[tuple[str, int, int]]:
    count = rng.choice((0, 1, 1, 2, 3, 5))
    return [(rng.choice(_EDITS), index(rng), batch(rng)) for _ in range(count)]


def _other(side: Any, parameter: torch.nn.Parameter, number: int) -> torch.nn.Parameter:
    """Some parameter with a gradient of the same shape and dtype; perhaps the same one."""
    alike = [
        each
        for each in side.model.distinct()
        if each.grad is not None and (each.shape, each.dtype) == (parameter.shape, parameter.dtype)
    ]
    return alike[number % len(alike)]


@torch.no_grad()
def _edit(side: Any, how: str, number: int, seed: int) -> None:
    if how == "again":
        with torch.enable_grad():
            side.backward(seed, without=[number])
        return
    parameter = side.parameter(number)
    gradient = parameter.grad
    if gradient is None:
        return
    if how == "data":
        gradient.data.mul_(0.5)
    elif how == "numpy" and gradient.dtype is torch.float32:
        array = gradient.numpy()
        array *= 0.25
    elif how == "in place":
        gradient.mul_(-1)
    elif how == "view" and gradient.is_contiguous():
        gradient.view(-1)[:2].detach().fill_(0.125)
    elif how == "replace":
        parameter.grad = random_values(gradient.shape, seed, gradient.dtype)
    elif how == "swap data":
        gradient.data = gradient.data * 2
    elif how == "none":
        parameter.grad = None
    elif how == "zero":
        gradient.zero_()
    elif how == "share":
        parameter.grad = _other(side, parameter, seed).grad
    elif how == "exchange":
        other = _other(side, parameter, seed)
        parameter.grad, other.grad = other.grad, parameter.grad
    elif how == "transpose" and gradient.dim() == 2 and gradient.shape[0] == gradient.shape[1]:
        parameter.grad = gradient.t()


def _keep(gradient: torch.Tensor, how: str) -> Any:
    if how == "detached":
        return gradient.detach()
    if how == "numpy" and gradient.dtype is torch.float32:
        return gradient.detach().numpy()
    return gradient


def _check(side: Any) -> None:
    """Raises when a gradient of an earlier step, which the script keeps, has changed."""
    for held, values in side.slots.pop("gradients", ()):
        found = torch.as_tensor(held)
        if not torch.equal(found, values):
            raise AssertionError(f"a kept gradient has changed from {values} to {found}")


# A change without a trace is lost where gradients are pushed early, as the README says.
@operation(
    6,
    lambda program: program.scaler is None and not program.served.get("overlap"),
    batch=batch,
    edits=_edits,
    keeps=of(None, None, "object", "detached", "numpy"),
    to_none=of(True, True, False),
    drops=of(True, False),
)
def train_by_hand(
    side: Any,
    batch: int,
    edits: list[tuple[str, int, int]],
    keeps: str | None,
    to_none: bool,
    drops: bool,
) -> None:
    """A step with gradients that were changed in many ways. keeps: what is kept of them until
    the next such step; drops: the gradients, after the step."""
    if to_none:  # else the next backward() adds to what is kept
        side.optimizer.zero_grad()
    else:
        side.slots.pop("gradients", None)
        side.optimizer.zero_grad(set_to_none=False)
    side.backward(batch)
    _check(side)
    for how, number, seed in edits:
        _edit(side, how, number, seed)
    side.reduce()
    if keeps is not None:
        side.slots["gradients"] = [
            (_keep(each.grad, keeps), each.grad.clone())
            for each in side.model.distinct()
            if each.grad is not None
        ]
    side.optimizer.step()
    if drops:
        side.optimizer.zero_grad()
    else:
        side.slots.pop("gradients", None)
    _after_step(side)
