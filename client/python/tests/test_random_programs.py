"""Random training programs beside torch: 50 seeds of random_programs.py, which takes more.

$OPTSTATE_PROGRAMS: another number of seeds, of one rank.
"""

from __future__ import annotations

import os
from multiprocessing.connection import wait

import optstate
import pytest
from programs import two_ranks
from programs.drawing import draw
from programs.execution import Failure, run
from programs.program import Program, Weight, program_of
from random_programs import Daemons, report
from ranks import running

COUNT = int(os.environ.get("OPTSTATE_PROGRAMS", "50"))
BATCH = 25
PAIRS = 10  # programs of two ranks


@pytest.mark.parametrize("first", range(0, COUNT, BATCH))
def test_programs_follow_torchs(first):
    daemons = Daemons()
    failures = []
    try:
        for program in map(draw, range(first, min(first + BATCH, COUNT))):
            try:
                run(program, daemons.endpoints())
            except Failure as failure:
                failures.append(report(program, failure, daemons, shrinks=len(failures) < 2))
    finally:
        daemons.stop()
    assert not failures, "\n\n".join(failures)


def test_programs_of_two_ranks_follow_torchs():
    daemons = Daemons()
    try:
        with running(two_ranks.run_programs, 2, range(PAIRS), daemons.endpoints()) as ranks:
            # A rank that fails says so; the other may wait for it.
            left = list(ranks.connections)
            while left:
                for connection in wait(left):
                    assert ranks._receive(ranks.connections.index(connection), "result") == PAIRS
                    left.remove(connection)
    finally:
        daemons.stop()


def wrong_at(step: int):
    """An optimizer of which the step after this one is a thousandth too long."""

    class Wrong(optstate.SGD):
        def step(self, closure=None):
            factor = 1.001 if self.committed_step == step else 1
            self.param_groups[0]["lr"] *= factor
            super().step(closure)
            self.param_groups[0]["lr"] = 0.25

    return Wrong


def test_a_wrong_step_is_found_and_made_small(monkeypatch):
    """A wrong step is found, which shows that these tests can fail."""
    usual = {"without": [], "how": "plain", "clip": "no", "unscales": False}
    usual.update(poison=False, to_none=True)
    program = Program(
        optimizer="SGD",
        weights=(Weight((3, 5)), Weight((4,), uses=2)),
        options={"lr": 0.25},
        operations=(
            *(("train", {"batch": batch, **usual}) for batch in range(1, 4)),
            ("look", {}),
            ("edit", {"index": 0, "how": "fill", "seed": 1}),
        ),
    )
    assert program_of(program.text()) == program
    daemons = Daemons()
    try:
        run(program, daemons.endpoints())
        monkeypatch.setattr(optstate, "SGD", wrong_at(1), raising=False)
        with pytest.raises(Failure, match=r"operation 1: Mismatch: parameter") as raised:
            run(program, daemons.endpoints())
        said = report(program, raised.value, daemons, shrinks=True)
        small = program_of(said[said.index("Program(") :])
        assert [name for name, _ in small.operations] == ["train", "train"], said
    finally:
        daemons.stop()
