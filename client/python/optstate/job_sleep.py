"""Puts a job to sleep and wakes it, without a rank of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from optstate import _native
from optstate._interrupt import Interrupt

# Called with the bytes that are copied, and with all; all is 0 while it is not known.
Progress = Callable[[int, int], object]


class SleepCall(NamedTuple):
    """A job, and how it is put to sleep or woken; see optstate_sleep_options."""

    job: str
    endpoint: str
    timeout_s: float = 0  # of each wait in which nothing goes on; 0: 30
    whole_timeout_s: float = 0  # 0: none
    progress: Progress | None = None


class JobSleep(NamedTuple):
    """A job that was put to sleep or woken; see optstate_sleep_result."""

    directory: str
    memory_bytes: int
    was_so: bool
    created_at_ns: int
    committed_step: int


def _run(function: str, call: SleepCall, **expected: int) -> JobSleep:
    library = _native.library()
    interrupt = Interrupt()
    address = _native.JobAddress(
        endpoint=call.endpoint.encode(),
        job=call.job.encode(),
        timeout_s=call.timeout_s,
        interrupted=interrupt.callback,
    )
    options = _native.SleepOptions(whole_timeout_s=call.whole_timeout_s, **expected)
    progress = call.progress
    if progress is not None:

        def tell(native: Any) -> None:
            progress(native.contents.bytes, native.contents.bytes_total)

        options.progress = _native.SLEEP_PROGRESS(interrupt.guard(tell))
    result = _native.SleepResult()
    status = getattr(library, function)(
        ctypes.byref(address), ctypes.byref(options), ctypes.byref(result)
    )
    interrupt.raise_pending()
    _native.check(status)
    return JobSleep(
        directory=(result.directory or b"").decode("utf-8", "replace"),
        memory_bytes=result.memory_bytes,
        was_so=bool(result.was_so),
        created_at_ns=result.created_at_ns,
        committed_step=result.committed_step,
    )


def put_to_sleep(call: SleepCall) -> JobSleep:
    """Puts a job to sleep, of which no rank is attached any more; see optstate_sleep_job."""
    return _run("optstate_sleep_job", call)


def wake(call: SleepCall, *, created_at_ns: int = 0, committed_step: int = 0) -> JobSleep:
    """Wakes a job; see optstate_wake_job. The job that is expected: 0: any."""
    return _run(
        "optstate_wake_job",
        call,
        expected_created_at_ns=created_at_ns,
        expected_step=committed_step,
    )
