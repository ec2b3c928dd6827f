"""Keeps what quantised gradients have left out, which the next ones are sent with."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary


class _Loss(NamedTuple):
    values: torch.Tensor  # float32, flat
    loss_scale: float  # of the gradients that lost them


class ErrorFeedback:
    """By parameter, what this rank's gradients lost when they were quantised, in units of what is
    sent (g / predivide).

    It belongs to a step that is taken. A step that is skipped, or given up, leaves that of the step
    before. It lives in this process: a rank that starts again begins without.

    Threads: one at a time, like the optimizer.
    """

    def __init__(self) -> None:
        self._taken: MutableMapping = WeakIdKeyDictionary()  # losses of the steps that were taken
        self._next: MutableMapping = WeakIdKeyDictionary()  # of the step under way
        self._begun: MutableMapping = WeakIdKeyDictionary()  # of the reduction under way
        # The scale of the losses that gradients are of now.
        self.loss_scale = 1.0

    def begin_reduction(self) -> None:
        """Says that gradients are about to be sent."""
        self._begun.clear()

    def begin(self, parameter: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Returns the feedback that a gradient of the parameter is sent with (None: there is none),
        of the micro-step before or else of the step before; and where the next one goes."""
        gradient = parameter.grad
        assert gradient is not None
        found: _Loss | None = self._next.get(parameter) or self._taken.get(parameter)
        before = None
        if found is not None and found.values.numel() == gradient.numel():
            before = found.values.to(gradient.device)
            if found.loss_scale != self.loss_scale:
                before = before * (self.loss_scale / found.loss_scale)
        after = torch.empty(gradient.numel(), dtype=torch.float32, device=gradient.device)
        self._begun[parameter] = _Loss(after, self.loss_scale)
        return before, after

    def end_reduction(self) -> None:
        """Says that what was begun was sent, as a part of the step under way."""
        self._next.update(self._begun)
        self._begun.clear()

    def give_up(self, parameter: torch.Tensor) -> None:
        """Says that what was sent of the parameter in the step under way is of no step."""
        self._next.pop(parameter, None)

    def end_step(self, *, applied: bool) -> None:
        """Says that the step under way is over. Idempotent."""
        if applied:
            self._taken.update(self._next)
        self._next.clear()

    def forget(self) -> None:
        """Says that the state was replaced, as by a checkpoint's."""
        for each in (self._taken, self._next, self._begun):
            each.clear()
