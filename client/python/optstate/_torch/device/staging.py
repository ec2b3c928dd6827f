"""Page-locked buffers for copies where the driver does not register a session's memory."""

from __future__ import annotations

import torch

from optstate._torch.device.interface import Backend

SLOT_BYTES = 8 << 20
_SLOTS = 4


class StagingRing:
    """A bounded number of buffers, which are taken and given back in any order."""

    def __init__(self, backend: Backend) -> None:
        memory = backend.pinned(_SLOTS * SLOT_BYTES)
        self._free = list(memory.split(SLOT_BYTES))

    def take(self) -> torch.Tensor | None:
        """Returns a buffer of SLOT_BYTES; None when all are in use."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: torch.Tensor) -> None:
        self._free.append(slot)
