"""Parameters on their way from the daemon's memory to devices."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from optstate._torch.device import backends
from optstate._torch.device.daemon_memory import DaemonMemory
from optstate._torch.device.host_memory import HostMemory
from optstate._torch.device.interface import Backend, Event, Stream
from optstate._torch.device.staging import SLOT_BYTES, StagingRing
from optstate.device_parameters import NOWHERE, DeviceRange
from optstate.session import Session

# A parameter, its tensor, and its values in the session's memory.
_Wanted = tuple[int, torch.Tensor, torch.Tensor]


class _Lane:
    """The copies to one device, which are done in order."""

    def __init__(
        self,
        session: Session,
        backend: Backend,
        device: torch.device,
        memory: HostMemory,
        shares_device_memory: bool,
    ) -> None:
        self.stream: Stream = backend.stream(device, "to_device")
        self._make_there = lambda: DaemonMemory(session, backend, device, shares_device_memory)
        self.there = self._make_there()
        self._ring = None if memory.is_registered else StagingRing(backend)
        self._used: collections.deque[tuple[Event, torch.Tensor]] = collections.deque()
        # Parameters with other strides, and what becomes theirs.
        self._strided: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.last: Event | None = None  # after all copies that were started
        self.is_open = False  # copies were started since the last end()

    def refresh(self) -> None:
        """Asks the daemon for its memory on the device anew, when it has given the last up."""
        if self.there.is_over():
            self.settle()
            self.there.close()
            self.there = self._make_there()

    def start_all(self, wanted: Sequence[_Wanted]) -> None:
        """Starts the copies of whole parameters: on the device, as far as the daemon has them
        there, and from the session's memory."""
        if not self.there.is_there:
            for _, target, source in wanted:
                self.start(target, source)
            return
        offsets = self.there.whole([index for index, _, _ in wanted])
        whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (index, target, source), offset in zip(wanted, offsets):
            if not target.is_contiguous():
                self.start(target, source)
                continue
            target, source = target.view(-1), source.reshape(-1)
            if offset != NOWHERE:
                place = DeviceRange(0, target.numel(), offset)
                whole.append((target, self.there.values(place, source.dtype)))
            else:
                self._start_parts(index, target, source)
        if whole:
            self._open()
            self.stream.copy_all(*zip(*whole))

    def _start_parts(self, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        done = 0
        for place in self.there.ranges(index):
            if done < place.begin:
                self.start(target[done : place.begin], source[done : place.begin])
            self._start_there(target, source, place)
            done = place.end
        if done < target.numel():
            self.start(target[done:], source[done:])

    def _start_there(self, target: torch.Tensor, source: torch.Tensor, place: DeviceRange) -> None:
        self._open()
        values = self.there.values(place, source.dtype)
        self.stream.copy(target[place.begin : place.end], values)

    def _open(self) -> None:
        if not self.is_open:
            self.is_open = True
            self.stream.follow()  # what still reads the former values

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._open()
        if self._ring is None:
            self.stream.copy(target, source)
            return
        if not target.is_contiguous():
            whole = torch.empty_like(target, memory_format=torch.contiguous_format)
            self.stream.follow()  # the current stream may still use the memory of `whole`
            self._strided.append((target, whole))
            target = whole
        target, source = target.view(-1), source.reshape(-1)
        elements = SLOT_BYTES // source.element_size()
        for begin in range(0, source.numel(), elements):
            self._stage(target[begin : begin + elements], source[begin : begin + elements])

    def _stage(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._ring is not None
        slot = self._ring.take()
        if slot is None:
            event, slot = self._used.popleft()
            event.synchronize()
        place = slot[: source.numel() * source.element_size()].view(source.dtype)
        place.copy_(source)
        self.stream.copy(target, place)
        self._used.append((self.stream.record(), slot))

    def end(self) -> None:
        """Makes the current stream wait for the copies."""
        if self.is_open:
            self.last = self.stream.record()
            self.stream.lead(self.last)
            self.is_open = False
            strided, self._strided = self._strided, []
            for target, whole in strided:
                target.copy_(whole)

    def settle(self) -> None:
        if self.is_open:
            self.end()
        if self.last is not None:
            self.last.synchronize()
            self.last = None

    @property
    def is_settled(self) -> bool:
        if self.is_open:
            return False
        if self.last is not None and self.last.query():
            self.last = None
        return self.last is None


class Uploads:
    """Copies parameters from a session's memory to any number of devices.

    The daemon must not write that memory before settle(): this process gives it the means to, by a
    push, a commit or the end of a load. Threads: one at a time.
    """

    def __init__(
        self,
        session: Session,
        places: Callable[[], Iterable[tuple[int, int]]],
        shares_device_memory: bool,
    ) -> None:
        """places: (address, size) of all parameters. shares_device_memory: copies are from the
        daemon's memory on the device, where it has some."""
        self._session = session
        self._places = places
        self._shares_device_memory = shares_device_memory
        self._memory = HostMemory("parameters", read_only=True)
        self._lanes: dict[torch.device, _Lane] = {}
        self._connections = 0

    def refresh(self) -> bool:
        """Registers the memory anew when it may be another; returns whether it does."""
        if self._session.info().connections == self._connections:
            for lane in self._lanes.values():
                lane.refresh()
        return self._drop_former()

    def _drop_former(self) -> bool:
        """Drops what belongs to a former connection. A call to the daemon may have taken a new
        one, whose memory may be other pages at the same addresses: devices would go on to copy
        from the pages that are registered."""
        connections = self._session.info().connections
        if connections == self._connections:
            return False
        self._release()  # without lanes, too: one that failed to ask has left the memory held
        self._connections = connections
        return True

    def prepare(self, target: torch.Tensor) -> _Lane:
        """Makes start() of this parameter ask the session for nothing."""
        device = backends.device_of(target)
        lane = self._lanes.get(device)
        if lane is None:
            backend = backends.backend_of(target)
            assert backend is not None
            if not self._memory.is_held:
                self._memory.hold(backend, self._places())
            lane = self._lanes[device] = _Lane(
                self._session, backend, device, self._memory, self._shares_device_memory
            )
        return lane

    def _lanes_of(self, targets: Sequence[torch.Tensor]) -> list[_Lane]:
        """Returns the lane of each target, all of this connection. Asks the session."""
        while True:
            lanes = [self.prepare(target) for target in targets]
            if not self._drop_former():
                return lanes

    def on_device(self, targets: Mapping[int, torch.Tensor]) -> set[int]:
        """Returns those of these parameters that the daemon has whole on their tensors' devices,
        where a copy of the next values takes next to no time. Asks the session."""
        by_lane: dict[_Lane, list[int]] = {}
        for index, lane in zip(targets, self._lanes_of(list(targets.values()))):
            by_lane.setdefault(lane, []).append(index)
        found: set[int] = set()
        for lane, indices in by_lane.items():
            offsets = lane.there.whole(indices)
            found.update(i for i, offset in zip(indices, offsets) if offset != NOWHERE)
        return found

    def memory_on(self, device: torch.device) -> DaemonMemory | None:
        """Returns the daemon's memory on a device, from which parameters are copied; None: it has
        none, as far as is known."""
        lane = self._lanes.get(device)
        return lane.there if lane is not None and lane.there.is_there else None

    def start_all(self, wanted: Iterable[_Wanted]) -> None:
        """Starts the copies of whole parameters, from wherever the daemon has them. refresh() was
        called since the session was used last."""
        by_lane: dict[_Lane, list[_Wanted]] = {}
        present = [each for each in wanted if each[2].numel()]
        lanes = self._lanes_of([target for _, target, _ in present])
        for lane, (index, target, source) in zip(lanes, present):
            by_lane.setdefault(lane, []).append((index, target.detach(), source))
        for lane, entries in by_lane.items():
            lane.start_all(entries)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts the copy of a parameter, or of contiguous elements of one, from the session's
        memory. refresh() was called since the session was used last."""
        if source.numel():
            self.prepare(target).start(target.detach(), source)

    def end(self) -> None:
        """Makes what is computed from now on, in the current streams, wait for the copies."""
        for lane in self._lanes.values():
            lane.end()

    def settle(self) -> None:
        """Waits until the session's memory may be written again."""
        for lane in self._lanes.values():
            lane.settle()

    @property
    def is_settled(self) -> bool:
        """Returns whether settle() would not wait."""
        return all(lane.is_settled for lane in self._lanes.values())

    def close(self) -> None:
        """Ends before the session's memory is unmapped. Does nothing in a forked child."""
        if not self._session.is_forked:
            self._release()
        self._lanes = {}

    def _release(self) -> None:
        for lane in self._lanes.values():
            lane.settle()
            lane.stream.record().synchronize()
            lane.there.close()
        self._memory.release()
        self._lanes = {}
