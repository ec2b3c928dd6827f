"""Helpers of tests of gradients that are views: loops, and where gradients are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optstate
import torch
from training import bits, largest_difference, loss_of, small_model

STEPS = 6
# SGD does not forgive gradients that are too large, or that come twice.
OPTIONS = {"lr": 0.05, "momentum": 0.9}


class SGD(optstate.SGD):
    """optstate's, which makes views of gradients for one rank too."""

    def __init__(self, *args: Any, gradients_as_views: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, gradients_as_views=gradients_as_views, **kwargs)


Between = Callable[[torch.nn.Module, torch.optim.Optimizer, int], Any]


def in_place(optimizer: optstate.Optimizer) -> set[int]:
    """The parameters whose gradients are in the gradient area now."""
    views = optimizer._served.attachment.gradients.views
    if views is None or views._mapping is None:
        return set()
    return {index for index in views._memory if views._is_gradient(index)}


def viewable(optimizer: optstate.Optimizer) -> set[int]:
    """The parameters whose gradients may become views."""
    return set(optimizer._served.attachment.gradients.views.indices)


def backward(model: torch.nn.Module, _: Any, step: int) -> None:
    loss_of(model, step).backward()


def run(
    optimizer_class: type, between: Between, *, model: Any = small_model, **options: Any
) -> tuple[torch.nn.Module, list]:
    """A training loop with `between` in place of backward(); the model, and what that returned."""
    made = model()
    optimizer = optimizer_class(made.parameters(), **OPTIONS, **options)
    returned = []
    for step in range(STEPS):
        optimizer.zero_grad()
        returned.append(between(made, optimizer, step))
        optimizer.step()
    if isinstance(optimizer, SGD):
        optimizer.close()
    return made, returned


def assert_as_torchs(between: Between, **how: Any) -> None:
    """Asserts that training is the same bits with and without views, torch's but for rounding,
    and that `between` returns the same with all three."""
    ours, returned = run(SGD, between, **how)
    copied, copied_returned = run(SGD, between, gradients_as_views=False, **how)
    theirs, torchs_returned = run(torch.optim.SGD, between, **how)
    assert bits(ours.parameters()) == bits(copied.parameters())
    assert largest_difference(ours, theirs) < 1e-6
    assert returned == copied_returned
    for one, other in zip(returned, torchs_returned):
        assert (one is None) == (other is None)
