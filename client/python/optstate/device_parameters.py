"""Parameters that the daemon keeps in memory of a device, for a rank that has this device."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from optstate import _native
from optstate.held_session import HeldSession
from optstate.session import Session

NOWHERE = (1 << 64) - 1  # the offset of what is not there
# How many ranges of a parameter are asked for first; seldom are there more than one.
_RANGES = 16


class DeviceRange(NamedTuple):
    """Elements [begin, end) of a parameter, from a byte of the memory on."""

    begin: int
    end: int
    offset: int


class DeviceParameters:
    """The memory, as a file of the device's driver, and what is in it (client/c_api_devices.h).

    Threads: one at a time.
    """

    def __init__(self, session: Session, device: str) -> None:
        """Asks the daemon for the memory of the device of this name.

        NotFoundError: nothing of the job stays on a device; UnimplementedError: over this wire,
        or from this daemon, there is none; FailedPreconditionError, ResourceExhaustedError: why
        there is none. Parameters are in the session's memory, as always.
        """
        self._session = session
        self._library = _native.library()
        self._handle = ctypes.c_void_p()
        session._call(
            self._library.optstate_device_parameters_map,
            device.encode(),
            ctypes.byref(self._handle),
        )
        file, size = ctypes.c_int(), ctypes.c_uint64()
        _native.check(
            self._library.optstate_device_parameters_memory(
                self._handle, ctypes.byref(file), ctypes.byref(size)
            )
        )
        self.memory_file: int = file.value  # this object's
        self.memory_size: int = size.value
        self._ranges = _native.array_of(_native.DeviceRange, _RANGES)

    @property
    def is_over(self) -> bool:
        """Returns whether the daemon uses the memory no more: there may be another."""
        is_over = ctypes.c_int32()
        _native.check(
            self._library.optstate_device_parameters_is_over(self._handle, ctypes.byref(is_over))
        )
        return bool(is_over.value)

    def ranges(self, parameter: int) -> list[DeviceRange]:
        """Returns the parts of a parameter, ascending, that are there with the values of
        Session.parameter(), for as long as those stay."""
        count = self._find(parameter)
        if count > len(self._ranges):
            self._ranges = _native.array_of(_native.DeviceRange, count)
            # Nothing changes between two steps, but the answer counts.
            count = min(self._find(parameter), len(self._ranges))
        return [
            DeviceRange(each.begin, each.end, each.offset_bytes) for each in self._ranges[:count]
        ]

    def whole(self, parameters: Sequence[int]) -> array.array:
        """Returns, likewise, where whole parameters are, as offsets ("Q"); NOWHERE: one is not
        there, or in several parts. One call for all of them."""
        wanted = self._in_layout(parameters)
        offsets = array.array("Q", bytes(8 * len(wanted)))
        self._session._call(
            self._library.optstate_device_parameters_find_whole,
            self._handle,
            wanted.buffer_info()[0],
            len(wanted),
            offsets.buffer_info()[0],
        )
        return offsets

    def _in_layout(self, parameters: Sequence[int]) -> array.array:
        session = self._session
        if isinstance(session, HeldSession):
            return session._in_layout(parameters)
        return array.array("I", parameters)

    def _find(self, parameter: int) -> int:
        count = ctypes.c_size_t()
        self._session._call(
            self._library.optstate_device_parameters_find,
            self._handle,
            self._in_layout([parameter])[0],
            self._ranges,
            len(self._ranges),
            ctypes.byref(count),
        )
        return count.value

    def close(self) -> None:
        """Closes the file; memory that was mapped stays. Idempotent."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            self._library.optstate_device_parameters_free(handle)
