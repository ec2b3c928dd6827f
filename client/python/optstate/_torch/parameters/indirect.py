"""Copies of parameters that the client library cannot write itself: on devices, or with strides."""

from __future__ import annotations

import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from optstate._torch.device import backends
from optstate._torch.device.backends import backend_of
from optstate._torch.device.daemon_memory import DaemonMemory
from optstate._torch.device.uploads import Uploads
from optstate._torch.shards import local_of
from optstate._torch.warn import warn
from optstate.device_parameters import NOWHERE
from optstate.session import Session

# A smaller parameter comes with all others when the step is over.
EARLY_ELEMENTS_MIN = 1 << 16
# Elements that are copied at a time while the step is being applied.
_COPY_ELEMENTS = 4 << 20


class EarlyReads(NamedTuple):
    """The reads of a commit: parameters ("I") with their addresses ("Q", 0: none), and what is
    called with each part of those without an address."""

    parameters: array.array
    destinations: array.array
    ready: Callable[[Any], Any] | None


class _Parts:
    """Receives parameters in parts. Parts that follow each other are copied as one.

    Threads: one at a time.
    """

    def __init__(
        self,
        uploads: Uploads,
        targets: dict[int, torch.Tensor],
        sources: dict[int, torch.Tensor],
    ) -> None:
        self._uploads = uploads
        self._targets = targets
        self._sources = sources
        self._left = {index: target.numel() for index, target in targets.items()}
        self._next = (-1, 0, 0)  # a parameter, and the elements of it that are not copied yet

    def take(self, pointer: Any) -> None:
        """Takes a part; the pointer is the client library's."""
        part = pointer.contents
        index, begin, end = self._next
        if (part.parameter, part.begin) != (index, end):
            self._start()
            index, begin = part.parameter, part.begin
        self._next = (index, begin, part.end)
        if part.end - begin >= _COPY_ELEMENTS:
            self._start()

    def _start(self) -> None:
        index, begin, end = self._next
        self._next = (-1, 0, 0)
        if begin == end:
            return
        self._uploads.start(self._targets[index][begin:end], self._sources[index][begin:end])
        self._uploads.end()  # here, because an exception may end the step before its end
        self._left[index] -= end - begin

    def finish(self) -> set[int]:
        """Copies what is left, and returns the parameters that have come whole."""
        self._start()
        return {index for index, left in self._left.items() if not left}


class IndirectCopies:
    """Copies the daemon's values to parameters in memory that is the script's.

    Copies to a device are started, not awaited: what the device computes next waits for them.
    Threads: one at a time, like the optimizer.
    """

    def __init__(
        self,
        session: Session,
        parameters: Sequence[torch.Tensor],
        daemon_values: Callable[[int], torch.Tensor],
        is_alone: bool,
    ) -> None:
        """daemon_values: returns a parameter as the job has it, in the session's memory.
        is_alone: no other rank has gradients of these parameters."""
        self._session = session
        self._parameters = parameters
        self._daemon_values = daemon_values
        self._is_alone = is_alone
        self._shares_device_memory = False
        # Parameters on devices that have had the daemon's values.
        self._had: set[int] = set()
        self._uploads: Uploads | None = None
        # By parameter, the daemon's values; to ask a session for them anew, within a step that the
        # daemon has begun early, would have the daemon roll it back.
        self._sources: dict[int, torch.Tensor] = {}
        self._parts: _Parts | None = None  # of the step that is being applied

    def share_device_memory(self, is_wanted: bool) -> None:
        """Says whether values are to come from the daemon's memory on devices, and gradients to be
        there for it, where it has some; before the first copy. By default not."""
        self._shares_device_memory = is_wanted
        if is_wanted and all(backend_of(local_of(each)) is None for each in self._parameters):
            warn("share_device_memory=True has no meaning: no parameter is on a device")

    def _places(self) -> list[tuple[int, int]]:
        everything = map(self._source, range(len(self._parameters)))
        return [(each.data_ptr(), each.numel() * each.element_size()) for each in everything]

    def _source(self, index: int) -> torch.Tensor:
        source = self._sources.get(index)
        if source is None:
            source = self._sources[index] = self._daemon_values(index)
        return source

    def read(self, indices: Iterable[int]) -> None:
        """Overwrites these parameters with the daemon's values."""
        parts, self._parts = self._parts, None
        came = set() if parts is None else parts.finish()
        on_device: list[tuple[int, torch.Tensor]] = []
        for index in indices:
            target = local_of(self._parameters[index])
            if backend_of(target) is None:
                target.copy_(self._daemon_values(index))
            else:
                on_device.append((index, target))
        if not on_device:
            return
        uploads = self._made_uploads()
        if uploads.refresh():
            came = set()  # from memory that may not be the job's any more
        uploads.start_all(
            (index, target, self._source(index)) for index, target in on_device if index not in came
        )
        self._had.update(index for index, _ in on_device)
        uploads.end()

    def equal(self, indices: Iterable[int], compare: Callable[[int], bool]) -> set[int]:
        """Returns those of these parameters, without a gradient here, that the daemon's values
        would not change. To compare one on a device is to wait for it, which is not done where
        nobody else can have changed the daemon's value."""
        found = set()
        for index in indices:
            is_known = self._is_alone and index in self._had
            if is_known or compare(index):
                found.add(index)
                if backend_of(local_of(self._parameters[index])) is not None:
                    self._had.add(index)
        return found

    def early(
        self,
        direct: tuple[array.array, array.array],
        indices: Iterable[int],
        but: Collection[int],
    ) -> EarlyReads:
        """Adds to what the client library writes itself those of the other parameters that can
        come in parts while the step is being applied; read() is called after it."""
        wanted = {}
        for index in indices:
            target = local_of(self._parameters[index]).detach()
            is_large = target.numel() >= EARLY_ELEMENTS_MIN and target.is_contiguous()
            if is_large and index not in but and backend_of(target) is not None:
                wanted[index] = target.view(-1)
        self._parts = None
        if not wanted:
            return EarlyReads(*direct, None)
        uploads = self._made_uploads()
        uploads.refresh()
        # While the session may be asked. What the daemon has on the device comes from there when
        # the step is over.
        for index in uploads.on_device(wanted):
            del wanted[index]
        if not wanted:
            return EarlyReads(*direct, None)
        sources = {index: self._source(index).reshape(-1) for index in wanted}
        self._parts = _Parts(uploads, wanted, sources)
        return EarlyReads(
            direct[0] + array.array("I", wanted),
            direct[1] + array.array("Q", [0]) * len(wanted),
            self._parts.take,
        )

    def memory_on(self, device: torch.device) -> DaemonMemory | None:
        """Returns the daemon's memory on a device, another one after each change; None: it has
        none, as far as is known."""
        return None if self._uploads is None else self._uploads.memory_on(device)

    def kept_on(self, device: torch.device) -> list[int]:
        """Returns the parameters, ascending, that the daemon has whole there, of those that are on
        the device themselves. Asks the session."""
        memory = self.memory_on(device)
        if memory is None:
            return []
        indices = [
            index
            for index in sorted(self._had)
            if backends.device_of(local_of(self._parameters[index])) == device
        ]
        return [i for i, at in zip(indices, memory.whole(indices)) if at != NOWHERE]

    def _made_uploads(self) -> Uploads:
        if self._uploads is None:
            self._uploads = Uploads(self._session, self._places, self._shares_device_memory)
        return self._uploads

    def settle(self) -> None:
        """Waits until the session's memory may be written again; see Uploads."""
        if self._uploads is not None:
            self._uploads.settle()

    @property
    def is_settled(self) -> bool:
        """Returns whether settle() would not wait."""
        return self._uploads is None or self._uploads.is_settled

    def close(self) -> None:
        """Ends before the session's memory is unmapped. Idempotent."""
        self._sources, self._parts = {}, None
        if self._uploads is not None:
            self._uploads.close()
