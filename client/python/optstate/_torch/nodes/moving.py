"""The interface by which the state of a job gets to the nodes and ranks that go on with it."""

from __future__ import annotations

from typing import Protocol

from optstate._torch.nodes.resolution import Position
from optstate.session_spec import SessionSpec


class Moving(Protocol):
    """The state of a job that moves."""

    def move(self, spec: SessionSpec) -> None:
        """Brings it to these nodes and ranks. Collective."""

    def position_before(self, spec: SessionSpec) -> tuple[Position | None, int]:
        """Returns how far what this node has of it is, and which part that is; None: nothing."""
