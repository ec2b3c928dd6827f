"""Memory of a device in which gradients are for the daemon, besides the gradient area: its records
on that device are updated with them there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence

import torch

from optstate import errors
from optstate._torch.device.interface import Backend, NotImported
from optstate.device_gradients import SharedGradients
from optstate.session import Piece, Session

# Gradients begin at multiples of this, as kernels load vectors.
_ALIGN = 256
# Why the daemon takes none from there, for a job of which records stay on a device.
_REFUSALS = (
    errors.FailedPreconditionError,
    errors.InternalError,
    errors.InvalidArgumentError,
    errors.ResourceExhaustedError,
    errors.UnavailableError,
    NotImported,
)
# The texts that were logged already.
_said: set[str] = set()


class GradientMemory:
    """This rank's gradients of some parameters on one device, for one connection to the daemon.

    Threads: one at a time.
    """

    def __init__(
        self,
        session: Session,
        backend: Backend,
        device: torch.device,
        pieces: Sequence[Piece],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """Raises what the driver or the daemon says against it; see shared()."""
        name = backend.name_for_daemon(device)
        if name is None:
            raise NotImported("the device has no name that the daemon knows")
        self._places: dict[int, tuple[int, int, torch.dtype]] = {}  # offset, size, dtype
        end = 0
        for piece in pieces:
            dtype = dtypes[piece.parameter]
            size = piece.numel * dtype.itemsize
            self._places[piece.parameter] = (end, size, dtype)
            end += -(-size // _ALIGN) * _ALIGN
        self._taken: set[int] = set()  # whose gradients of the open step are there, or on their way
        self._memory = backend.export_memory(device, end)
        try:
            self._shared = SharedGradients(session, name, self._memory.file, self._memory.size)
        except BaseException:
            self._memory.close()
            raise

    def take(self, index: int) -> torch.Tensor | None:
        """Returns where the gradient of the open step is to be copied, in the stream in which it is
        copied to the gradient area later; None: nowhere."""
        place = self._places.get(index)
        if place is None:
            return None
        self._shared.clear([index])
        self._taken.add(index)
        offset, size, dtype = place
        return self._memory.values[offset : offset + size].view(dtype)

    def mark(self, step: int, indices: Iterable[int]) -> None:
        """Tells the daemon that these have arrived, in the gradient area too, of those that were
        taken: before they are pushed."""
        arrived = [index for index in indices if index in self._taken]
        if arrived:
            self._shared.mark(step, arrived, [self._places[index][0] for index in arrived])

    def forget(self) -> None:
        """Tells the daemon that nothing is there: the step is over, or is dropped, and the next one
        may have the same number, and its gradients from elsewhere."""
        if self._taken:
            self._shared.clear(sorted(self._taken))
            self._taken.clear()

    def end(self) -> None:
        """Makes the daemon read nothing here any more, and closes."""
        # Where the daemon is away it has nothing of this any more.
        with contextlib.suppress(errors.OptstateError):
            self._shared.give_up()
        self.close()

    def close(self) -> None:
        """Frees the memory; no copy of this process may be under way. What the daemon has mapped is
        there until its session ends. Idempotent."""
        self._shared.close()
        self._memory.close()


def shared(
    session: Session,
    backend: Backend,
    device: torch.device,
    pieces: Sequence[Piece],
    dtypes: Sequence[torch.dtype],
) -> GradientMemory | None:
    """Returns memory for these pieces' gradients; None, where there is none, and says why, once."""
    try:
        return GradientMemory(session, backend, device, pieces, dtypes)
    except (errors.NotFoundError, errors.UnimplementedError) as error:
        # No record stays on a device now, or sums are read; or the daemon is of an earlier build.
        logging.getLogger("optstate").debug("%s has no gradients: %s", device, error)
    except _REFUSALS as error:
        if str(error) not in _said:
            _said.add(str(error))
            logging.getLogger("optstate").warning(
                "gradients go from %s to the daemon's records there through host memory: %s",
                device,
                error,
            )
    return None
