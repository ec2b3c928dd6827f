"""Tracks what a script writes while it is unknown whether a step of its optimizer is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from optstate._torch.parameters.digests import ContentDigest
from optstate._torch.shards import is_dtensor
from optstate._torch.tensors import increment_versions


class HasValues(Protocol):
    """The parameters that a script writes; see Parameters."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...

    @property
    def values(self) -> Sequence[torch.Tensor]: ...

    def versions(self) -> list[int]: ...


class WrittenSince:
    """Keeps what a script has written into parameters from being overwritten by a step that
    was interrupted, or that failed here and was committed all the same.

    Threads: one at a time, like the optimizer.
    """

    def __init__(self, parameters: HasValues) -> None:
        self._parameters = parameters
        self._versions: list[int] | None = None
        self._digests: list[torch.Tensor] = []

    def note(self) -> None:
        """Starts tracking, before the script continues: what it writes from now on is kept."""
        digest = ContentDigest()
        self._digests = [digest(values) for values in self._parameters.values]
        self._versions = self._parameters.versions()

    def forget(self) -> None:
        self._versions, self._digests = None, []

    def take(self) -> dict[int, torch.Tensor]:
        """Returns copies of what was written, by index, for put_back() after the step's values
        are read; ends tracking."""
        if self._versions is None:
            return {}
        digest = ContentDigest()
        versions = self._parameters.versions()
        written = {
            index: values.detach().clone()
            for index, values in enumerate(self._parameters.values)
            if versions[index] != self._versions[index]
            or values.device != self._digests[index].device
            or not torch.equal(digest(values), self._digests[index])
        }
        self.forget()
        return written

    @torch.no_grad()
    def put_back(self, written: dict[int, torch.Tensor]) -> None:
        """Writes the values as in-place changes, which autograd notices."""
        present = self._parameters.values
        for index, values in written.items():
            present[index].copy_(values)
        dtensors = map(self._parameters.tensors.__getitem__, written)
        increment_versions([each for each in dtensors if is_dtensor(each)])
