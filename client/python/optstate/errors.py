"""Exceptions that carry the daemon's own text.

Every failure of the client library or the daemon is a subclass of
:class:`OptstateError`; the status code determines which. Each is also the
built-in exception that Python code would expect, so that ``except ValueError``
catches a bad hyperparameter whether the client or the daemon found it.
"""

from __future__ import annotations

from typing import ClassVar


class OptstateError(Exception):
    """Base class of all errors of optstate; ``code`` is the absl::StatusCode."""

    code: ClassVar[int] = 2


class CancelledError(OptstateError, RuntimeError):
    """The operation was cancelled."""

    code = 1


class UnknownError(OptstateError, RuntimeError):
    """The error has no more specific class."""

    code = 2


class InvalidArgumentError(OptstateError, ValueError):
    """A value is wrong whatever the state: hyperparameter, dtype, name."""

    code = 3


class DeadlineExceededError(OptstateError, TimeoutError):
    """The daemon, its engine or another rank did not answer in time."""

    code = 4


class NotFoundError(OptstateError, LookupError):
    """There is no such job or parameter."""

    code = 5


class AlreadyExistsError(OptstateError, RuntimeError):
    """Another live session holds this rank of the job."""

    code = 6


class PermissionDeniedError(OptstateError, PermissionError):
    """The job belongs to another user."""

    code = 7


class ResourceExhaustedError(OptstateError, RuntimeError):
    """The job's state does not fit the memory or the limits of the daemon."""

    code = 8


class FailedPreconditionError(OptstateError, RuntimeError):
    """The layout differs, a step is out of order, or the ranks do not agree."""

    code = 9


class AbortedError(OptstateError, RuntimeError):
    """The step was aborted, by this rank or by another."""

    code = 10


class OutOfRangeError(OptstateError, ValueError):
    """An index or offset is beyond the end."""

    code = 11


class UnimplementedError(OptstateError, NotImplementedError):
    """The daemon cannot do this (yet), e.g. ranks on several machines."""

    code = 12


class InternalError(OptstateError, RuntimeError):
    """An invariant is broken: this is a bug in optstate."""

    code = 13


class UnavailableError(OptstateError, ConnectionError):
    """The daemon cannot be reached, is draining, or lost the session."""

    code = 14


class DataLossError(OptstateError, RuntimeError):
    """State of the job is lost or cannot be trusted; the text says since when."""

    code = 15


class UnauthenticatedError(OptstateError, PermissionError):
    """The daemon does not know which user is asking."""

    code = 16


_BY_CODE: dict[int, type[OptstateError]] = {
    cls.code: cls
    for cls in (
        CancelledError,
        UnknownError,
        InvalidArgumentError,
        DeadlineExceededError,
        NotFoundError,
        AlreadyExistsError,
        PermissionDeniedError,
        ResourceExhaustedError,
        FailedPreconditionError,
        AbortedError,
        OutOfRangeError,
        UnimplementedError,
        InternalError,
        UnavailableError,
        DataLossError,
        UnauthenticatedError,
    )
}


def from_status(code: int, message: str) -> OptstateError:
    """Returns the exception of a status code; an unknown code is UnknownError."""
    return _BY_CODE.get(code, UnknownError)(message)
