#!/usr/bin/env python3
"""Writes resolution_cases.txt: what resolution.py answers, for the C++ client's form of its rules.

Run it in the repository's environment when the rules change:
    PYTHONPATH=client/python python3 tests/simulation/write_resolution_cases.py

A line is one case. `decide`: votes, then the verdict. `resolve`: positions, then the verdicts by
node ("0:1"), "-" where there are none, or "unresolvable". A vote is step/digest/found_inf, or "-".
A position is committed,prepared,loads of such steps, or "-".
"""

from __future__ import annotations

import pathlib
import random

from optstate._torch.nodes import resolution
from optstate._torch.nodes.resolution import Position, Step

CASES_FILE = pathlib.Path(__file__).with_name("resolution_cases.txt")
_SEED = 20
_DECIDED = 120
_RESOLVED = 600


def _step(draw: random.Random, number: int) -> Step:
    # Two digests, one of them seldom: most nodes agree.
    return Step(number, draw.choice((5, 5, 5, 6)), draw.random() < 0.2)


def _text(step: Step | None) -> str:
    return "-" if step is None else f"{step.step}/{step.digest}/{int(step.found_inf)}"


def _vote(draw: random.Random) -> Step | None:
    return None if draw.random() < 0.1 else _step(draw, draw.choice((3, 3, 3, 4)))


def _position(draw: random.Random) -> Position | None:
    if draw.random() < 0.08:
        return None
    number = draw.choice((0, 2, 2, 3, 3, 3))
    committed = Step(0, 0) if number == 0 else _step(draw, number)
    prepared = _step(draw, number + 1) if draw.random() < 0.5 else None
    return Position(committed, prepared, loads_finished=draw.choice((0, 1, 1, 1, 1)))


def _position_text(position: Position | None) -> str:
    if position is None:
        return "-"
    return f"{_text(position.committed)},{_text(position.prepared)},{position.loads_finished}"


def _answer(positions: list[Position | None]) -> str:
    names = [str(index) for index in range(len(positions))]
    try:
        verdicts = resolution.resolve(positions, names)
    except resolution.Unresolvable:
        return "unresolvable"
    return " ".join(f"{node}:{int(verdicts[node])}" for node in sorted(verdicts)) or "-"


def cases() -> str:
    """Returns the content of the file."""
    draw = random.Random(_SEED)
    lines = []
    for _ in range(_DECIDED):
        votes = [_vote(draw) for _ in range(draw.randint(1, 4))]
        verdict = int(resolution.decide(votes))
        lines.append(f"decide {' '.join(map(_text, votes))} = {verdict}")
    for _ in range(_RESOLVED):
        positions = [_position(draw) for _ in range(draw.randint(1, 4))]
        # In half of them all nodes start from one position, as they mostly do.
        if draw.random() < 0.5 and positions[0] is not None:
            positions = [positions[0] if draw.random() < 0.7 else each for each in positions]
        answer = _answer(positions)
        lines.append(f"resolve {' '.join(map(_position_text, positions))} = {answer}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    CASES_FILE.write_text(cases())
