"""Tracks what a script writes while it is unknown whether a step of its optimizer is over."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optstate._torch.parameters.digests import ContentDigest


class WrittenSince:
    """Keeps what a script has written into parameters from being overwritten by a step that
    was interrupted, or that failed here and was committed all the same.

    Threads: one at a time, like the optimizer.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._versions: list[int] | None = None
        self._digests: list[torch.Tensor] = []

    def note(self) -> None:
        """Starts tracking, before the script continues: what it writes from now on is kept."""
        digest = ContentDigest()
        self._digests = [digest(parameter) for parameter in self._parameters]
        self._versions = [parameter._version for parameter in self._parameters]

    def forget(self) -> None:
        self._versions, self._digests = None, []

    def take(self) -> dict[int, torch.Tensor]:
        """Returns copies of what was written, by index, for put_back() after the step's values
        are read; ends tracking."""
        if self._versions is None:
            return {}
        digest = ContentDigest()
        written = {
            index: parameter.detach().clone()
            for index, parameter in enumerate(self._parameters)
            if parameter._version != self._versions[index]
            or parameter.device != self._digests[index].device
            or not torch.equal(digest(parameter), self._digests[index])
        }
        self.forget()
        return written

    @torch.no_grad()
    def put_back(self, written: dict[int, torch.Tensor]) -> None:
        """Writes the values as in-place changes, which autograd notices."""
        for index, values in written.items():
            self._parameters[index].copy_(values)
