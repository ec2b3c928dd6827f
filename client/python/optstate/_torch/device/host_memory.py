"""A session's memory, registered with an accelerator while copies use it."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable

from optstate._torch.device.interface import Backend, NotRegistered

# The messages that were logged already: (what, why).
_said: set[tuple[str, str]] = set()


def page_ranges(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns (address, size) of the whole pages that hold these (address, size), ascending and
    apart from each other: pages that touch are one range."""
    page = mmap.PAGESIZE
    ranges: list[list[int]] = []
    for address, size in sorted(places):
        if size == 0:
            continue
        begin, end = address // page * page, -(-(address + size) // page) * page
        if ranges and begin <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], end)
        else:
            ranges.append([begin, end])
    return [(begin, end - begin) for begin, end in ranges]


class HostMemory:
    """Memory that devices copy to or from: registered, or reached through staging buffers.

    Threads: one at a time. A forked child never unregisters.
    """

    def __init__(self, what: str, *, read_only: bool) -> None:
        """what: for the message about memory that cannot be registered."""
        self._what = what
        self._read_only = read_only
        self._backend: Backend | None = None
        self._registered: list[int] = []
        self._pid = os.getpid()

    @property
    def is_held(self) -> bool:
        """Returns whether hold() was called since the last release()."""
        return self._backend is not None

    @property
    def is_registered(self) -> bool:
        """Returns whether copies need no staging buffer."""
        return bool(self._registered)

    def hold(self, backend: Backend, places: Iterable[tuple[int, int]]) -> None:
        """Registers the memory of these (address, size), all of it or nothing. What cannot be
        registered is said once."""
        self._backend = backend
        try:
            for address, size in page_ranges(places):
                backend.register(address, size, read_only=self._read_only)
                self._registered.append(address)
        except NotRegistered as error:
            self._unregister()
            self._say(str(error))

    def release(self) -> None:
        """Unregisters the memory, before it is unmapped; no copy may be under way. Idempotent."""
        if os.getpid() == self._pid:
            self._unregister()
        self._backend = None

    def _unregister(self) -> None:
        assert self._backend is not None or not self._registered
        while self._registered:
            try:
                self._backend.unregister(self._registered.pop())  # type: ignore[union-attr]
            except NotRegistered as error:
                logging.getLogger("optstate").warning("%s: %s", self._what, error)

    def _say(self, why: str) -> None:
        if (self._what, why) in _said:
            return
        _said.add((self._what, why))
        logging.getLogger("optstate").warning(
            "%s go through a staging buffer, which costs a copy by the CPU, because the memory that"
            " is shared with the daemon cannot be registered: %s",
            self._what,
            why,
        )
