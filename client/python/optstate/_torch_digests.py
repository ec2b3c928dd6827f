"""What copied parameters held: changes are found of which torch has no trace."""

from __future__ import annotations

import array
from collections.abc import Iterable, Mapping, Sequence

import torch

from optstate._torch_tensors import integer_bits
from optstate.session import Session

# Columns of the table whose rows and columns are summed.
_COLUMNS = 1024
# One element of so many is looked at in a sample: one of each 64 bytes or so.
_SAMPLE = 64
_SEED = 0x6F707473


class CopyDigests:
    """Knows what a session's parameters held when they were copied to the trainer's tensors.

    Those that the client library copies itself it knows itself; those that torch copies
    (CUDA, other strides) are known by sums that are taken where they are.

    Threads: as the session, one at a time.
    """

    def __init__(self, session: Session, detect_changes: str) -> None:
        self._session = session
        self._is_on = detect_changes != "off"
        self._sampled = detect_changes == "sample"
        self._digests: dict[int, tuple[int, torch.Tensor]] = {}
        self._weights: dict[torch.device, torch.Tensor] = {}
        self._copies = 0

    def note_read(self, indices: Iterable[int], tensors: Sequence[torch.Tensor]) -> None:
        """After torch has copied these."""
        if not self._is_on:
            return
        self._copies += 1
        for index in indices:
            first = self._copies % _SAMPLE
            self._digests[index] = first, self._digest(tensors[index], first)

    def note_loaded(
        self, direct: array.array, indirect: Iterable[int], tensors: Sequence[torch.Tensor]
    ) -> None:
        """After a load: the daemon has what the tensors hold."""
        if self._is_on and direct:
            self._session.note_copies(direct)
        self.note_read(indirect, tensors)

    def changed(
        self,
        direct: tuple[array.array, array.array],
        indirect: Iterable[int],
        tensors: Sequence[torch.Tensor],
    ) -> set[int]:
        """Of what was copied, that which now holds something else.

        direct: indices and addresses.
        """
        if not self._is_on:
            return set()
        found = set(self._session.find_changed(*direct)) if direct[0] else set()
        now = {
            index: self._digest(tensors[index], self._digests[index][0])
            for index in indirect
            if index in self._digests
        }
        return found.union(_unequal(now, {i: self._digests[i][1] for i in now}))

    def _digest(self, tensor: torch.Tensor, first: int) -> torch.Tensor:
        """One int64 on the tensor's device. Two sums of a table of its bits, by rows and by
        columns, with weights: nearly everything but equal content gives another value."""
        flat = integer_bits(tensor).reshape(-1)
        if self._sampled and flat.numel() > _SAMPLE:
            flat = flat[first::_SAMPLE]
        rows = flat.numel() // _COLUMNS
        table = flat[: rows * _COLUMNS].view(rows, _COLUMNS)
        rest = flat[rows * _COLUMNS :].to(torch.int64)
        weights = self._weights_of(flat.device, max(rows, _COLUMNS) + _COLUMNS)
        by_rows = (table.sum(1, dtype=torch.int64) * weights[_COLUMNS : _COLUMNS + rows]).sum()
        by_columns = (table.sum(0, dtype=torch.int64) * weights[:_COLUMNS]).sum()
        return by_rows + 3 * by_columns + 5 * (rest * weights[: rest.numel()]).sum()

    def _weights_of(self, device: torch.device, count: int) -> torch.Tensor:
        weights = self._weights.get(device)
        if weights is None or weights.numel() < count:
            generator = torch.Generator().manual_seed(_SEED)
            weights = torch.empty(2 * count, dtype=torch.int64).random_(generator=generator) | 1
            # A longer table begins as the former one, else digests of before would be others.
            former = self._weights.get(device)
            if former is not None:
                weights[: former.numel()] = former.cpu()
            weights = self._weights[device] = weights.to(device)
        return weights


def _unequal(now: Mapping[int, torch.Tensor], before: Mapping[int, torch.Tensor]) -> list[int]:
    """One transfer for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, digest in now.items():
        by_device.setdefault(digest.device, []).append(index)
    found = []
    for indices in by_device.values():
        differs = torch.stack([now[i] for i in indices]) != torch.stack(
            [before[i] for i in indices]
        )
        found += [index for index, is_other in zip(indices, differs.tolist()) if is_other]
    return found
