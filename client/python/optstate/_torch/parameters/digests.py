"""Digests of what copied parameters held, which find changes that torch does not record."""

from __future__ import annotations

import array
from collections.abc import Iterable, Mapping, Sequence

import torch

from optstate._torch.device.backends import to_list
from optstate._torch.parameters.digest_graphs import DigestGraphs
from optstate._torch.tensors import integer_bits
from optstate.session import Session

# Number of elements that are mixed at a time.
_CHUNK = 1 << 20
# A sample reads one element of this many.
_SAMPLE = 64
_SEED = 0x6F707473
# Odd 64-bit multipliers (SplitMix64), as signed integers.
_MIX_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_SECOND = 0x94D049BB133111EB - (1 << 64)


class ContentDigest:
    """Reduces a tensor's content to one int64 on its device. Different content, or the same
    in another order, gives the same digest with a probability of about 2^-64."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, tensor: torch.Tensor, first: int = 0, every: int = 1) -> torch.Tensor:
        """Returns the digest of elements first, first + every, ..."""
        flat = integer_bits(tensor).reshape(-1)
        if every > 1:
            flat = flat[first::every] if flat.numel() > every else flat
        elif _is_words(flat):
            flat = flat.view(torch.int64)  # several elements at a time
        weights = self._weights_of(flat.device)
        digest = torch.zeros((), dtype=torch.int64, device=flat.device)
        for begin in range(0, flat.numel(), _CHUNK):
            # Each element is mixed with its position before it is added.
            chunk = flat[begin : begin + _CHUNK]
            mixed = chunk + weights[: chunk.numel()]
            mixed ^= mixed >> 30
            mixed *= _MIX_FIRST
            mixed ^= mixed >> 27
            mixed *= _MIX_SECOND
            mixed ^= mixed >> 31
            digest = digest * _MIX_FIRST + mixed.sum()
        return digest

    def _weights_of(self, device: torch.device) -> torch.Tensor:
        weights = self._weights.get(device)
        if weights is None:
            generator = torch.Generator().manual_seed(_SEED)
            weights = torch.empty(_CHUNK, dtype=torch.int64).random_(generator=generator)
            weights = self._weights[device] = weights.to(device)
        return weights


class CopyDigests:
    """Knows what a session's parameters held when they were copied to the trainer's tensors.

    The client library tracks the parameters that it copies itself; parameters that torch copies
    (CUDA, other strides) are known by digests that are computed on their devices.

    Threads: one at a time.
    """

    def __init__(self, session: Session, detect_changes: str) -> None:
        self._session = session
        self._is_on = detect_changes != "off"
        self._digest = ContentDigest()
        self._graphs = DigestGraphs(self._digest)
        self._every = _SAMPLE if detect_changes == "sample" else 1
        self._digests: dict[int, tuple[int, torch.Tensor]] = {}

    def note_read(self, indices: Iterable[int], tensors: Sequence[torch.Tensor]) -> None:
        """Takes digests after torch has copied these parameters."""
        if not self._is_on:
            return
        # All ranks sample the same elements.
        first = self._session.committed_step % self._every
        firsts = {index: first for index in indices}
        for index, digest in self._of(firsts, tensors).items():
            self._digests[index] = first, digest

    def note_equal(
        self, direct: array.array, indirect: Iterable[int], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Records that tensors hold what the daemon has, without having been read."""
        if self._is_on and direct:
            self._session.note_copies(direct)
        self.note_read(indirect, tensors)

    def changed(
        self,
        direct: tuple[array.array, array.array],
        indirect: Iterable[int],
        tensors: Sequence[torch.Tensor],
    ) -> set[int]:
        """Returns the copied parameters whose tensors now hold something else.

        direct: indices and addresses.
        """
        if not self._is_on:
            return set()
        found = set(self._session.find_changed(*direct)) if direct[0] else set()
        firsts = {index: self._digests[index][0] for index in indirect if index in self._digests}
        now = self._of(firsts, tensors)
        return found.union(_unequal(now, {i: self._digests[i][1] for i in now}))

    def _of(
        self, firsts: Mapping[int, int], tensors: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Returns the digests of these tensors, by index, each from its first element on."""
        if self._every > 1:
            return {i: self._digest(tensors[i], first, self._every) for i, first in firsts.items()}
        by_device: dict[torch.device, list[int]] = {}
        for index in firsts:
            by_device.setdefault(tensors[index].device, []).append(index)
        found: dict[int, torch.Tensor] = {}
        for indices in by_device.values():
            found.update(zip(indices, self._graphs([tensors[i].detach() for i in indices])))
        return found


def _is_words(flat: torch.Tensor) -> bool:
    """Returns whether integers of 8 bytes have the same memory."""
    size = flat.numel() * flat.element_size()
    return flat.is_contiguous() and size % 8 == 0 and flat.data_ptr() % 8 == 0


def _unequal(now: Mapping[int, torch.Tensor], before: Mapping[int, torch.Tensor]) -> list[int]:
    """Returns the indices whose digests differ, with one transfer for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, digest in now.items():
        by_device.setdefault(digest.device, []).append(index)
    found = []
    for indices in by_device.values():
        differs = torch.stack([now[i] for i in indices]) != torch.stack(
            [before[i] for i in indices]
        )
        found += [index for index, is_other in zip(indices, to_list(differs)) if is_other]
    return found
