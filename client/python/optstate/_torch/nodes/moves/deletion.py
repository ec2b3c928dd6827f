"""Deletes jobs of which nobody needs the state any more."""

from __future__ import annotations

import time

from optstate import errors
from optstate._torch.nodes.copy_note import delete_job
from optstate.session_spec import SessionSpec

# The daemon may notice the end of ranks that were killed only some time later.
_ENDS_WITHIN_S = 10.0
_PAUSE_S = 0.05


def delete_left(spec: SessionSpec, job: str) -> None:
    """Deletes a job that its ranks have left, if it is there, and waits until it is gone.
    FailedPreconditionError: ranks stay attached."""
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while True:
        try:
            delete_job(spec, job)
            return
        except errors.FailedPreconditionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)
