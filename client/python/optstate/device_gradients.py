"""Gradients that a rank has in memory of its device, for the daemon's records on that device."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Sequence

from optstate import _native
from optstate.held_session import HeldSession
from optstate.session import Session


class SharedGradients:
    """The memory, as the daemon has it, and what the rank says is there (client/c_api_devices.h).

    The gradient area has all gradients as well, with the same bytes.

    Threads: safe for different parameters.
    """

    def __init__(self, session: Session, device: str, file: int, size: int) -> None:
        """Offers memory of the device of this name: a file of its driver, and its bytes. Both stay
        the caller's, who frees the memory behind give_up() or the end of the session.

        NotFoundError: nothing of the job stays on a device, or its updates read sums of gradients;
        UnimplementedError: over this wire, or by this daemon, none are taken from there;
        FailedPreconditionError and others: why they are not.
        """
        self._session = session
        self._library = _native.library()
        self._handle = ctypes.c_void_p()
        session._call(
            self._library.optstate_device_gradients_share,
            device.encode(),
            file,
            size,
            ctypes.byref(self._handle),
        )

    def clear(self, parameters: Sequence[int]) -> None:
        """Says that the memory has none of these gradients: before their bytes change."""
        wanted = self._in_layout(parameters)
        _native.check(
            self._library.optstate_device_gradients_clear(
                self._handle, wanted.buffer_info()[0], len(wanted)
            )
        )

    def mark(self, step: int, parameters: Sequence[int], offsets: Sequence[int]) -> None:
        """Says that these gradients of a step are in the memory, at these offsets: before they are
        pushed. They stay there until the step's outcome."""
        wanted, places = self._in_layout(parameters), array.array("Q", offsets)
        _native.check(
            self._library.optstate_device_gradients_mark(
                self._handle,
                step,
                wanted.buffer_info()[0],
                places.buffer_info()[0],
                len(wanted),
            )
        )

    @property
    def is_shared(self) -> bool:
        """Returns whether the daemon has the memory: not once the session connects anew."""
        is_shared = ctypes.c_int32()
        self._session._call(
            self._library.optstate_device_gradients_is_shared,
            self._handle,
            ctypes.byref(is_shared),
        )
        return bool(is_shared.value)

    def give_up(self) -> None:
        """Makes the daemon read the memory no more, where it does."""
        if self.is_shared:
            self._session._call(self._library.optstate_device_gradients_give_up)

    def _in_layout(self, parameters: Sequence[int]) -> array.array:
        session = self._session
        if isinstance(session, HeldSession):
            return session._in_layout(parameters)
        return array.array("I", parameters)

    def close(self) -> None:
        """Frees the table; what the daemon has stays until give_up(), or the end of the session.
        Idempotent."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            self._library.optstate_device_gradients_free(handle)
