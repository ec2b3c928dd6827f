"""The CPU's share of a job's updates: set between two steps, and found by measurement."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from optstate import _optctl, errors
from optstate._storage import storage
from optstate._torch.fraction_search import FractionSearch
from optstate.session import StepOutcome

if TYPE_CHECKING:
    from optstate._torch.job.attachment import Attachment

logger = logging.getLogger("optstate")


def set_fraction(attachment: Attachment, fraction: float) -> None:
    """Sets the job's offload_fraction, from the next step on, as optctl does.

    Raises what ServedOptimizer.set_offload_fraction() says.
    """
    storage(None, None, None, None, fraction)  # raises ValueError
    attachment.session.refuse_fork()
    value = f"offload_fraction={float(fraction)!r}"
    _optctl.change(attachment.session.endpoint, "set", "job", attachment.job, value)


def update_seconds(outcome: StepOutcome) -> float:
    """Returns how long the daemon took to update all elements. Tests replace this."""
    return outcome.update_ns / 1e9


class OffloadTuner:
    """Finds the fastest offload_fraction while a job trains, then leaves it alone.

    It changes the fraction after a step that this rank has taken; bits do not depend on it. One
    rank of a job has one. Threads: as the optimizer.
    """

    def __init__(self) -> None:
        self._search: FractionSearch | None = FractionSearch()
        self._in_force: float | None = None  # as far as this has set it

    @property
    def is_over(self) -> bool:
        return self._search is None

    def note(self, attachment: Attachment, outcome: StepOutcome) -> None:
        """Takes the outcome of a step. What the daemon refuses is logged and not raised, and the
        job goes on as it is."""
        search = self._search
        if search is None or not outcome.applied or outcome.update_ns == 0:
            return
        if self._in_force is not None:
            search.note(update_seconds(outcome))
        if search.fraction != self._in_force and not self._set(attachment, search.fraction):
            return
        if search.is_over:
            self._search = None
            logger.info("%s", _found(attachment.job, search))

    def _set(self, attachment: Attachment, fraction: float) -> bool:
        try:
            set_fraction(attachment, fraction)
        except errors.OptstateError as error:
            self._search = None
            stays = "as it was" if self._in_force is None else f"{self._in_force:g}"
            logger.warning(
                'offload_fraction="auto" of job "%s" is given up, and the fraction stays %s: %s',
                attachment.job,
                stays,
                error,
            )
            return False
        self._in_force = fraction
        return True


def _found(job: str, search: FractionSearch) -> str:
    times = search.times
    return (
        f'offload_fraction="auto" of job "{job}": {search.best:g} is the fastest of {len(times)}'
        f" that were tried, with {1e3 * times[search.best]:.4g} ms an update; the CPU alone takes"
        f" {1e3 * times[1.0]:.4g} ms, devices alone {1e3 * times[0.0]:.4g} ms"
    )
