#!/usr/bin/env python3
"""Writes resolution_cases.txt: what resolution.py answers, for the C++ client's form of its rules.

Run it in the repository's environment when the rules change:
    PYTHONPATH=client/python python3 tests/simulation/write_resolution_cases.py

A line is one case. `decide`: votes, then the verdict. `resolve`: positions, then the verdicts by
node ("0:1"), "-" where there are none, or "unresolvable". A vote is step/digest/found_inf, or "-".
A position is committed,prepared,loads of such steps, or "-".

`decide_kinds` and `resolve_kinds` are of nodes that may hold different parameters: each vote or
position has the number of its kind before it ("1:3/5/0"), and a step a fourth part, the norm that
is noted for it, a whole number or "-". The clip coefficient is always 0.5. After the verdicts of
`resolve_kinds` comes "norm" with the norm that they take, or "-".
"""

from __future__ import annotations

import dataclasses
import pathlib
import random

from optstate._torch.nodes import resolution
from optstate._torch.nodes.resolution import Position, Step
from optstate.job_position import NodesNorm, noted_digest

CASES_FILE = pathlib.Path(__file__).with_name("resolution_cases.txt")
_SEED = 20
_DECIDED = 120
_RESOLVED = 600
_DECIDED_KINDS = 60
_RESOLVED_KINDS = 500


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


def _answer(positions: list[Position | None], kinds: list[int] | None = None) -> str:
    names = [str(index) for index in range(len(positions))]
    try:
        verdicts = resolution.resolve(positions, names, kinds)
    except resolution.Unresolvable:
        return "unresolvable"
    return " ".join(f"{node}:{int(verdicts[node])}" for node in sorted(verdicts)) or "-"


def _noted(draw: random.Random, step: Step) -> Step:
    """Returns a prepared step for which a norm may be noted."""
    return dataclasses.replace(step, norm=draw.choice((None, NodesNorm(3.0, 0.5))))


def _committed(step: Step) -> Step:
    """Returns a step as a node has it that took it as it was prepared and noted."""
    if step.norm is None or step.found_inf:
        return step
    return dataclasses.replace(step, digest=noted_digest(step.digest, step.norm))


def _kinds(draw: random.Random, count: int) -> list[int]:
    # Mostly each node holds parameters of its own.
    own = draw.random() < 0.6
    return [each if own else draw.choice((0, 1)) for each in range(count)]


def _position_of_kind(draw: random.Random, kind: int, latest: int) -> Position | None:
    """Returns a position of a run in which steps have digests of their own by kind."""
    if draw.random() < 0.05:
        return None
    digest = 5 + kind if draw.random() < 0.95 else 4

    def step(number: int) -> Step:
        return _noted(draw, Step(number, digest + 10 * number, draw.random() < 0.1))

    number = latest if draw.random() < 0.6 else latest - 1
    committed = Step(0, 0) if number == 0 else _committed(step(number))
    prepared = step(number + 1) if draw.random() < 0.7 else None
    return Position(committed, prepared, loads_finished=draw.choice((1, 1, 1, 1, 1, 1, 0)))


def _noted_text(step: Step | None) -> str:
    if step is None:
        return "-"
    norm = "-" if step.norm is None else str(int(step.norm.gradient_norm))
    return f"{_text(step)}/{norm}"


def _noted_position_text(position: Position | None) -> str:
    if position is None:
        return "-"
    steps = f"{_noted_text(position.committed)},{_noted_text(position.prepared)}"
    return f"{steps},{position.loads_finished}"


def _with_kinds(texts: list[str], kinds: list[int]) -> str:
    return " ".join(f"{kind}:{text}" for kind, text in zip(kinds, texts))


def _cases_of_kinds(draw: random.Random) -> list[str]:
    lines = []
    for _ in range(_DECIDED_KINDS):
        count = draw.randint(1, 4)
        kinds = _kinds(draw, count)
        votes = []
        for kind in kinds:
            vote = _vote(draw)
            votes.append(vote and dataclasses.replace(vote, digest=vote.digest + 2 * kind))
        verdict = int(resolution.decide(votes, kinds))
        texts = list(map(_noted_text, votes))
        lines.append(f"decide_kinds {_with_kinds(texts, kinds)} = {verdict}")
    for _ in range(_RESOLVED_KINDS):
        kinds = _kinds(draw, draw.randint(1, 4))
        latest = draw.choice((1, 3))
        positions = [_position_of_kind(draw, kind, latest) for kind in kinds]
        texts = list(map(_noted_position_text, positions))
        norm = resolution.noted_norm(positions)
        noted = "-" if norm is None else int(norm.gradient_norm)
        answer = f"{_answer(positions, kinds)} norm {noted}"
        lines.append(f"resolve_kinds {_with_kinds(texts, kinds)} = {answer}")
    return lines


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
    lines += _cases_of_kinds(draw)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    CASES_FILE.write_text(cases())
