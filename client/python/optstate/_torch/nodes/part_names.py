"""The name of a node's part in a run of several nodes, as layouts have it; see parts.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# A number has 64 bits. Any client can name a parameter, and int() refuses some thousand digits.
_NAME = re.compile(r"optstate\.nodes/([0-9a-f]+)/(\d{1,20})of(\d{1,20})(@0)?")


class Part(NamedTuple):
    """A node's part in a run of several nodes: the first node, from 1 on, that holds the same."""

    run: str
    number: int
    count: int

    @property
    def name(self) -> str:
        return f"optstate.nodes/{self.run}/{self.number}of{self.count}"

    def __str__(self) -> str:
        return f"part {self.number} of {self.count} of run {self.run}"


def part_of(names: Sequence[str]) -> Part | None:
    """Returns what the names of a job's parameters say; None: a job of one node, or replicas."""
    found = _NAME.fullmatch(names[0]) if names else None
    return None if found is None else Part(found[1], int(found[2]), int(found[3]))
