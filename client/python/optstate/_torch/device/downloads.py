"""Gradients on their way from devices to the gradient area."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from optstate._torch.device import backends
from optstate._torch.device.daemon_memory import DaemonMemory
from optstate._torch.device.gradient_memory import GradientMemory, shared
from optstate._torch.device.host_memory import HostMemory
from optstate._torch.device.interface import Backend, Event, Stream
from optstate._torch.device.staging import SLOT_BYTES, StagingRing
from optstate._torch.tensors import memory_view
from optstate.session import Piece, Session

# Copies of this many bytes have one event, so that small gradients do not cost one each.
BATCH_BYTES = 4 << 20
# How often it is looked what of a daemon's memory on a device is a rank's: after the first steps.
_TRIES = 3


class KeptParameters(Protocol):
    """Parameters that the daemon has on devices; see IndirectCopies."""

    def memory_on(self, device: torch.device) -> DaemonMemory | None:
        """Returns the daemon's memory there, another one after each change; None: it has none."""

    def kept_on(self, device: torch.device) -> list[int]:
        """Returns the parameters, ascending, that it has there whole. Asks the session."""


class _Batch:
    """Copies with one event, and the gradients that are complete after them."""

    def __init__(self, slot: torch.Tensor | None = None) -> None:
        self.complete: list[int] = []
        self.sources: list[torch.Tensor] = []  # kept until they are copied
        self.size = 0
        self.event: Event | None = None
        self.slot = slot
        self.moves: list[tuple[torch.Tensor, torch.Tensor]] = []  # (to the area, from the slot)


class _Lane:
    """The copies of one device, which are done in order."""

    def __init__(self, backend: Backend, device: torch.device, memory: HostMemory) -> None:
        self.backend = backend
        self.stream: Stream = backend.stream(device, "to_host")
        self._memory = memory
        self._ring = None if memory.is_registered else StagingRing(backend)
        self._open: _Batch | None = None
        self._batches: collections.deque[_Batch] = collections.deque()
        self._arrived: list[int] = []
        # Where gradients are for the daemon's records on the device, if they are.
        self.there: GradientMemory | None = None
        self.seen: DaemonMemory | None = None  # for which that was made, or tried
        self.tries = 0  # that are left

    def start(self, index: int, target: torch.Tensor, source: torch.Tensor, may_wait: bool) -> bool:
        """Starts a gradient's copy; False, and nothing is started, when it would have to wait."""
        if self._ring is None:
            batch = self._open = self._open or _Batch()
            batch.sources.append(source)
            self.stream.copy(target, self._copied_there(index, source))
            batch.complete.append(index)
            self._count(batch, source)
            return True
        if not may_wait and not self._has_room(source):
            return False
        source = self._copied_there(index, source)
        elements = SLOT_BYTES // source.element_size()
        for begin in range(0, source.numel(), elements):
            self._stage(target[begin : begin + elements], source[begin : begin + elements])
        assert self._open is not None or self._batches
        (self._open or self._batches[-1]).complete.append(index)
        return True

    def _copied_there(self, index: int, source: torch.Tensor) -> torch.Tensor:
        """Starts a gradient's copy for the daemon's records on the device, if it has a place there.
        Returns what is to be copied to the host: then the daemon has the same bytes twice."""
        place = None if self.there is None else self.there.take(index)
        if place is None:
            return source
        self.stream.copy_to_exported(place, source)
        return place

    def _has_room(self, source: torch.Tensor) -> bool:
        """Returns whether the gradient fits into what is left of an open buffer, or a free one."""
        assert self._ring is not None
        size = source.numel() * source.element_size()
        if self._open is not None and self._open.size + size <= SLOT_BYTES:
            return True
        if size > SLOT_BYTES:
            return False
        slot = self._ring.take()
        if slot is None:
            return False
        self._ring.give_back(slot)
        return True

    def _stage(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._ring is not None
        size = source.numel() * source.element_size()
        if self._open is not None and self._open.size + size > SLOT_BYTES:
            self.close_batch()
        if self._open is None:
            slot = self._ring.take()
            while slot is None:
                self._finish_oldest()
                slot = self._ring.take()
            self._open = _Batch(slot)
        batch = self._open
        assert batch.slot is not None
        place = batch.slot[batch.size : batch.size + size].view(source.dtype)
        self.stream.copy(place, source)
        batch.sources.append(source)
        batch.moves.append((target, place))
        self._count(batch, source)

    def _count(self, batch: _Batch, source: torch.Tensor) -> None:
        # Multiples of 8 keep the parts of a slot aligned.
        batch.size += -(-source.numel() * source.element_size() // 8) * 8
        if batch.size >= (BATCH_BYTES if batch.slot is None else SLOT_BYTES):
            self.close_batch()

    def close_batch(self) -> None:
        """Gives the copies that were started an event of their own."""
        if self._open is None:
            return
        batch, self._open = self._open, None
        batch.event = self.stream.record()
        self._batches.append(batch)

    def arrived(self) -> list[int]:
        """Returns the gradients that have arrived since the last call; does not wait."""
        while self._batches and self._oldest_event().query():
            self._finish_oldest()
        arrived, self._arrived = self._arrived, []
        return arrived

    def wait_for_oldest(self) -> bool:
        """Waits until some more have arrived; False: nothing is under way."""
        self.close_batch()
        if not self._batches:
            return False
        self._finish_oldest()
        return True

    def _oldest_event(self) -> Event:
        event = self._batches[0].event
        assert event is not None
        return event

    def _finish_oldest(self) -> None:
        self._oldest_event().synchronize()
        batch = self._batches.popleft()
        for target, place in batch.moves:
            target.copy_(place)
        if batch.slot is not None:
            assert self._ring is not None
            self._ring.give_back(batch.slot)
        self._arrived += batch.complete

    def drop(self) -> None:
        """Waits for the copies under way, and forgets them."""
        self.close_batch()
        # A copy that an interrupt kept from being noted is waited for too.
        self.stream.record().synchronize()
        while self._batches:
            batch = self._batches.popleft()
            if batch.slot is not None and self._ring is not None:
                self._ring.give_back(batch.slot)
        self._arrived = []


class Downloads:
    """Copies gradients from any number of devices to a session's gradient area.

    Threads: safe, because autograd calls hooks in a thread for each device.
    """

    def __init__(
        self, session: Session, owned: Mapping[int, Piece], dtypes: Sequence[torch.dtype]
    ) -> None:
        self._session = session
        self._owned = owned
        self._dtypes = dtypes
        self._memory = HostMemory("gradients", read_only=False)
        self._lanes: dict[torch.device, _Lane] = {}
        self._targets: dict[int, torch.Tensor] = {}
        self._empty: list[int] = []
        self._lock = threading.RLock()

    def start(self, gradients: Mapping[int, torch.Tensor], *, may_wait: bool) -> set[int]:
        """Starts copies of the owned pieces of gradients that are on devices. Returns those that
        were started, or have nothing to copy: all of them with `may_wait`."""
        with self._lock:
            started: set[int] = set()
            sources: dict[_Lane, list[tuple[int, torch.Tensor]]] = {}
            for index, gradient in gradients.items():
                piece = self._owned.get(index)
                if piece is None:
                    started.add(index)
                    continue
                if piece.numel == 0:  # the gradient is there, and has nothing to copy
                    started.add(index)
                    self._empty.append(index)
                    continue
                # The flat gradient is computed in the current stream, which the copies then follow.
                flat = gradient.detach().resolve_neg().reshape(-1)
                part = flat[piece.begin : piece.begin + piece.numel]
                sources.setdefault(self._lane(gradient), []).append((index, part))
            for lane, parts in sources.items():
                lane.stream.follow()
                for index, part in parts:
                    if lane.start(index, self._target(index), part, may_wait):
                        started.add(index)
            return started

    def refresh(self, kept: KeptParameters) -> None:
        """Has gradients of parameters that the daemon keeps on a device be there for it, from the
        next copy on. No copy is under way. Asks the session."""
        with self._lock:
            for device, lane in self._lanes.items():
                memory = kept.memory_on(device)
                if memory is not lane.seen:
                    lane.seen, lane.tries = memory, _TRIES
                    if lane.there is not None:
                        lane.there.end()
                        lane.there = None
                if memory is not None and lane.tries:
                    lane.tries -= 1
                    self._share(device, lane, kept.kept_on(device))

    def _share(self, device: torch.device, lane: _Lane, indices: Iterable[int]) -> None:
        pieces = [self._owned[index] for index in indices if index in self._owned]
        pieces = [piece for piece in pieces if piece.numel]
        if pieces:
            lane.tries = 0
            lane.there = shared(self._session, lane.backend, device, pieces, self._dtypes)

    def mark(self, step: int, indices: Sequence[int]) -> None:
        """Tells the daemon that these have arrived, before they are pushed."""
        with self._lock:
            for lane in self._lanes.values():
                if lane.there is not None:
                    lane.there.mark(step, indices)

    def forget(self) -> None:
        """Tells the daemon that no device has a gradient for it: the step is over, or dropped."""
        with self._lock:
            for lane in self._lanes.values():
                if lane.there is not None:
                    lane.there.forget()

    def _lane(self, gradient: torch.Tensor) -> _Lane:
        device = backends.device_of(gradient)
        lane = self._lanes.get(device)
        if lane is None:
            backend = backends.backend_of(gradient)
            assert backend is not None
            if not self._memory.is_held:
                addresses = self._session.gradient_addresses()
                self._memory.hold(
                    backend,
                    [
                        (addresses[index], piece.numel * self._dtypes[index].itemsize)
                        for index, piece in self._owned.items()
                    ],
                )
            lane = self._lanes[device] = _Lane(backend, device, self._memory)
        return lane

    def _target(self, index: int) -> torch.Tensor:
        target = self._targets.get(index)
        if target is None:
            address = self._session.gradient_addresses()[index]
            target = memory_view(address, self._owned[index].numel, self._dtypes[index])
            self._targets[index] = target
        return target

    def arrived(self) -> list[int]:
        """Returns the gradients, ascending, that have arrived since the last call, without
        waiting for others."""
        with self._lock:
            found, self._empty = self._empty, []
            for lane in self._lanes.values():
                found += lane.arrived()
            return sorted(found)

    def all_arrived(self) -> Iterator[list[int]]:
        """Waits for all that was started, and yields what has arrived in the meantime."""
        while True:
            found = self.arrived()
            if found:
                yield found
            with self._lock:
                if not any(lane.wait_for_oldest() for lane in self._lanes.values()):
                    break
        found = self.arrived()
        if found:
            yield found

    def drop(self) -> None:
        """Waits for copies under way, of which nothing is wanted any more."""
        with self._lock:
            self._empty = []
            for lane in self._lanes.values():
                lane.drop()

    def close(self) -> None:
        """Ends before the gradient area is unmapped. Does nothing in a forked child."""
        if not self._session.is_forked:
            self.drop()
            for lane in self._lanes.values():
                if lane.there is not None:
                    lane.there.close()
            self._memory.release()
        self._lanes, self._targets = {}, {}
