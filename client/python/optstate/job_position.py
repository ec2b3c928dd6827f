"""How far a job is, and what becomes of a step that it has prepared, without a rank of it."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

from optstate import _native, errors
from optstate._interrupt import Interrupt
from optstate.session_spec import SessionSpec


def _ask(spec: SessionSpec, function: str, *arguments: Any) -> None:
    library = _native.library()
    interrupt = Interrupt()
    address = _native.JobAddress(
        endpoint=spec.endpoint.encode() if spec.endpoint else None,
        job=spec.job.encode(),
        timeout_s=spec.connect_timeout_s,
        interrupted=interrupt.callback,
    )
    status = getattr(library, function)(ctypes.byref(address), *arguments)
    interrupt.raise_pending()
    _native.check(status)


def find_position(spec: SessionSpec) -> _native.JobPosition | None:
    """Returns how far the job of `spec` is, without a rank of it; None: there is none.

    UnimplementedError: the daemon does not know steps of two phases.
    """
    position = _native.JobPosition()
    try:
        _ask(spec, "optstate_find_position", ctypes.byref(position))
    except errors.NotFoundError:
        return None
    return position


class NodesNorm(NamedTuple):
    """The norm and clipping of all nodes' gradients, where nodes have different parameters.

    The fields are as in StepOutcome.
    """

    gradient_norm: float
    clip_coefficient: float


def noted_digest(digest: int, norm: NodesNorm) -> int:
    """Returns the digest of a prepared step once all nodes' norm is noted for it, as the daemon
    does (ClippedDigest)."""
    of_norm, of_coefficient = struct.unpack("=QQ", struct.pack("=dd", *norm))
    return digest ^ of_norm ^ of_coefficient ^ (1 << 64) - 1


def native_verdict(step: int, digest: int, verdict: int, norm: NodesNorm | None) -> _native.Verdict:
    """Returns what all nodes decided as the C API takes it."""
    native = _native.Verdict(step=step, digest=digest, verdict=verdict)
    if norm is not None:
        native.gradient_norm, native.clip_coefficient = norm
    return native


def bring_verdict(
    spec: SessionSpec, step: int, digest: int, verdict: int, norm: NodesNorm | None = None
) -> None:
    """Does Session.decide() without a session."""
    native = native_verdict(step, digest, verdict, norm)
    _ask(spec, "optstate_bring_verdict", ctypes.byref(native), ctypes.byref(_native.Outcome()))
