"""Memory of a device in which the daemon has parameters: copies from it need no host memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from optstate import errors
from optstate._torch.device.interface import Backend, ImportedMemory, NotImported
from optstate.device_parameters import NOWHERE, DeviceParameters, DeviceRange
from optstate.session import Session

# Why there is none, for a job of which records stay on a device.
_REFUSALS = (
    errors.FailedPreconditionError,
    errors.InternalError,
    errors.InvalidArgumentError,
    errors.ResourceExhaustedError,
    NotImported,
)
# How often a step asks until the daemon is asked again, where nothing stayed on a device.
LOOKS = 100
# The texts that were logged already.
_said: set[str] = set()


class DaemonMemory:
    """The daemon's memory on one device, of one connection to it; perhaps none.

    Threads: one at a time.
    """

    def __init__(
        self, session: Session, backend: Backend, device: torch.device, is_wanted: bool
    ) -> None:
        self._session = session
        self._backend = backend
        self._device = device
        self._parameters: DeviceParameters | None = None
        self._memory: ImportedMemory | None = None
        self._looks = 0
        self._may_come = False
        if is_wanted:
            self._open()

    def _open(self) -> None:
        name = self._backend.name_for_daemon(self._device)
        if name is None:
            return
        try:
            self._parameters = DeviceParameters(self._session, name)
            self._memory = self._backend.import_memory(
                self._device, self._parameters.memory_file, self._parameters.memory_size
            )
        except (
            errors.NotFoundError,
            errors.UnavailableError,
            errors.UnimplementedError,
        ) as error:
            # No record stays on a device now; or the daemon drains, which its next answer says to
            # whom that matters: the step is applied, and its parameters are in host memory; or it
            # is of an earlier build, or elsewhere.
            self._may_come = not isinstance(error, errors.UnimplementedError)
            if isinstance(error, errors.UnavailableError):
                logging.getLogger("optstate").debug("%s has no parameters: %s", self._device, error)
            else:
                _say(self._device, str(error))
        except _REFUSALS as error:
            self.close()
            _say(self._device, str(error))

    def is_over(self) -> bool:
        """Returns whether there may be another: the daemon has given this memory up, or there was
        none and it is time to look again, since an operator can change what stays on devices."""
        if self._parameters is not None:
            return self._parameters.is_over
        self._looks += 1
        return self._may_come and self._looks >= LOOKS

    @property
    def is_there(self) -> bool:
        """Returns whether there is any."""
        return self._memory is not None

    def whole(self, parameters: Sequence[int]) -> Sequence[int]:
        """Returns the offsets of whole parameters that the device has with the values of the
        session's memory; NOWHERE: of others."""
        if self._parameters is None:
            return [NOWHERE] * len(parameters)
        return self._parameters.whole(parameters)

    def ranges(self, parameter: int) -> list[DeviceRange]:
        """Returns the parts of a parameter, ascending, that the device has with the values of
        the session's memory."""
        if self._parameters is None:
            return []
        return self._parameters.ranges(parameter)

    def values(self, place: DeviceRange, dtype: torch.dtype) -> torch.Tensor:
        """Returns the elements of such a part."""
        assert self._memory is not None
        size = (place.end - place.begin) * dtype.itemsize
        return self._memory.values[place.offset : place.offset + size].view(dtype)

    def close(self) -> None:
        """Unmaps the memory; no copy may be under way. Idempotent."""
        memory, self._memory = self._memory, None
        parameters, self._parameters = self._parameters, None
        if memory is not None:
            memory.close()
        if parameters is not None:
            parameters.close()


def _say(device: torch.device, why: str) -> None:
    if why in _said:
        return
    _said.add(why)
    logging.getLogger("optstate").warning(
        "parameters of the daemon's records on a device come to %s through host memory: %s",
        device,
        why,
    )
