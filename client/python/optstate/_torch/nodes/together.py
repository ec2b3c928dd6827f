"""Context managers for what all ranks do together."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Protocol


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
