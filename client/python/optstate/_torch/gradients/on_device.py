"""Pushes the gradients that devices have, each as soon as its copy has arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from optstate._torch.device.downloads import Downloads
from optstate._torch.parameters.indirect import IndirectCopies
from optstate.session import Piece, Session


class DeviceGradients:
    """Copies gradients of devices to the gradient area while the device computes others.

    A hook starts the copy of a gradient and pushes those that have arrived in the meantime;
    step() pushes the others as they arrive. Nothing is pushed while parameters of the last step
    are still being copied to a device, because a daemon that speculates may write them.

    Threads: hooks of several devices may run at a time; everything else, one at a time.
    """

    def __init__(
        self,
        session: Session,
        owned: Mapping[int, Piece],
        dtypes: Sequence[torch.dtype],
        copies: IndirectCopies,
    ) -> None:
        self._session = session
        self._copies = copies
        self._downloads = Downloads(session, owned, dtypes)
        # Whether copies may be under way, or be there without having been pushed.
        self._is_busy = False

    def start_early(
        self, step: int, micro_step: int, gradients: Mapping[int, torch.Tensor]
    ) -> bool:
        """Starts copies and pushes what has arrived, without waiting for either. False: there is
        no room for a copy now, and step() is to push the gradients."""
        self._is_busy = True
        is_started = len(self._downloads.start(gradients, may_wait=False)) == len(gradients)
        if self._copies.is_settled:
            self._push(step, micro_step, self._downloads.arrived())
        return is_started

    def push(self, step: int, micro_step: int, gradients: Mapping[int, torch.Tensor]) -> None:
        """Copies these gradients and pushes them, and all that start_early() has started."""
        if gradients:
            self._is_busy = True
            self._downloads.start(gradients, may_wait=True)
        if not self._is_busy:
            return
        self._copies.settle()
        for indices in self._downloads.all_arrived():
            self._push(step, micro_step, indices)
        self._is_busy = False
        self._downloads.refresh(self._copies)

    def _push(self, step: int, micro_step: int, indices: Sequence[int]) -> None:
        self._downloads.mark(step, indices)
        for first, count in runs_of(indices):
            self._session.push(step, micro_step, first, count)

    def drop(self) -> None:
        """Forgets what was started and not pushed; waits until nothing writes to the area."""
        if self._is_busy:
            self._downloads.drop()
            self._is_busy = False
        self._downloads.forget()

    def close(self) -> None:
        """Ends before the session closes. Idempotent."""
        self._downloads.close()


def runs_of(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (first, count) of consecutive indices: [3, 4, 5, 9] -> [(3, 3), (9, 1)]."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
