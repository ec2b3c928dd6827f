"""Context managers for what all ranks do together."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Protocol

from optstate import errors
from optstate._torch.nodes.places import Places
from optstate.session import StepOutcome


class Agreeing(Protocol):
    """Ranks that find out whether one of them has failed."""

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank when some rank has an error. Collective."""


@contextlib.contextmanager
def interrupts_afterwards() -> Iterator[None]:
    """Has Ctrl-C wait: a rank that has voted must bring the decision to its daemon."""
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or former is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if came:
            signal.raise_signal(signal.SIGINT)


def undecided(outcome: StepOutcome | None, failure: Exception | str) -> Exception:
    """Returns the error of a rank that does not learn what was decided about a step: the failure
    itself where no step is prepared."""
    if isinstance(failure, Exception) and (outcome is None or not outcome.prepared):
        return failure
    assert outcome is not None
    return errors.UnavailableError(
        f"step {outcome.step} is prepared on this node, and this rank does not know what all have"
        f" decided: {failure}, with this step or without it on all nodes alike"
    )


def not_brought(step: int, node: str, *, spreads: bool) -> errors.FailedPreconditionError:
    """Returns the error of a rank that is to take another step. spreads: ranks that have the
    decision may be waiting for the parameters of this one."""
    what_to_do = "construct the optimizer anew on all ranks of all nodes, which brings the decision"
    if spreads:
        what_to_do = (
            "end this rank, for whose parameters others may be waiting, which then end too, and"
            " start all ranks of all nodes again, which bring the decision and go on"
        )
    return errors.FailedPreconditionError(
        f"what all nodes decided about step {step} is not known on {node}, or has not reached its"
        f" daemon: {what_to_do}"
    )


@contextlib.contextmanager
def raised_on_all(ranks: Agreeing | None) -> Iterator[None]:
    """Raises on all ranks what is raised on one of them. Collective; nothing without ranks."""
    if ranks is None:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        error = failure
    ranks.agree(error)


def of_node(error: Exception, places: Places) -> Exception:
    """Returns the error of this rank's daemon for all ranks; one that it does not answer names its
    node."""
    if not places.several or not isinstance(error, errors.UnavailableError):
        return error
    return errors.UnavailableError(f"the daemon of {places.node}: {error}")
