"""Refuses what would drop the state of a job that has failed."""

from __future__ import annotations

from optstate import _native, errors
from optstate.session import Session, fetch_numbers

# Errors of the way to the daemon, which say nothing of the job.
_OF_THE_WAY = (errors.UnavailableError, errors.DeadlineExceededError, errors.CancelledError)


def refuse_failed(session: Session, job: str, parameter_count: int) -> None:
    """Raises the daemon's error when the job has failed: it forgets its state when a load begins,
    which `optctl recover` might bring back.

    parameter_count: of the job's layout. A fetch is what a failed job refuses.
    """
    if not parameter_count:
        return
    try:
        fetch_numbers(session, _native.STEP_COUNT, 1)
    except _OF_THE_WAY:
        raise
    except errors.OptstateError as failure:
        raise type(failure)(
            f"{failure}. Nothing is loaded into a job in this condition, because that would drop"
            f" the state that it has: bring it back (optctl recover job {job}), or delete it"
            f" (optctl delete job {job}) and begin it again from a checkpoint"
        ) from failure
