"""Where the state of a sharded job is, and what may be deleted: the rules, without a daemon."""

from __future__ import annotations

import pytest
from optstate._torch.nodes.moves.blocks import Block
from optstate._torch.nodes.moves.choosing import Refused, choose
from optstate._torch.nodes.moves.handing_over import wishes_of
from optstate._torch.nodes.moves.holdings import HeldJob, Holding, Mark, mark_of, parcel_of
from optstate._torch.nodes.part_names import Part, part_of
from optstate._torch.nodes.resolution import Position, Step
from optstate.session_spec import LossScalerState, ParameterSpec, Shard


def _block(name, begin, end, whole=8):
    shard = Shard(0, (whole,), (begin,))
    return Block(name, 0, ParameterSpec(name, (end - begin,), end - begin, 1, 1, 0, shard=shard))


def _held(begin, end, *, run="a", number=1, count=2, step=3, mark=None, loads=1, **more):
    """A job that has these elements of the one parameter."""
    part = None if mark or not count else Part(run, number, count)
    position = Position(Step(step, more.pop("digest", 7)), loads_finished=loads, **more)
    blocks = (_block("w", begin, end),)
    return HeldJob("gpt", part, mark, position, run, 1, 4, "", "", blocks)


def _parcel(begin, end, *, run="b", number=1, count=2, step=3, source="a", loads=2):
    mark = Mark(Part(run, number, count), step, source, None)
    return _held(begin, end, run=run, mark=mark, step=0, loads=loads)


FIRST, SECOND = _held(0, 4), _held(4, 8, number=2)
HALVES = _parcel(0, 4), _parcel(4, 8, number=2)


@pytest.mark.parametrize(
    ("found", "run", "sources", "debris"),
    [
        ([Holding(FIRST), Holding(SECOND)], "a", 2, 0),
        ([Holding(SECOND), Holding(FIRST), Holding()], "a", 2, 0),
        # A part was handed over.
        ([Holding(FIRST, (_parcel(4, 8, run="a", number=2),))], "a", 2, 0),
        # ... and its node was killed before its own was deleted.
        ([Holding(FIRST, (_parcel(4, 8, run="a", number=2),)), Holding(SECOND)], "a", 2, 1),
        # Parcels were being made: one is not whole, or not there.
        ([Holding(FIRST, HALVES[:1]), Holding(SECOND)], "a", 2, 1),
        ([Holding(FIRST, HALVES[:1]), Holding(SECOND, (_parcel(4, 8, loads=1),))], "a", 2, 2),
        # They were given up, and the job has gone on.
        ([Holding(_held(0, 8, count=0, step=9), (_parcel(0, 4, step=3),))], "a", 1, 1),
        # They are whole, and the former jobs are partly deleted.
        ([Holding(FIRST, HALVES[:1]), Holding(SECOND, HALVES[1:])], "b", 2, 2),
        ([Holding(None, HALVES[:1]), Holding(SECOND, HALVES[1:])], "b", 2, 1),
        # The jobs are being made of them.
        ([Holding(_held(0, 4, run="b", step=1, digest=0), HALVES)], "b", 2, 1),
        # The jobs are whole, and parcels are partly deleted.
        ([Holding(_held(0, 8, run="b", count=1, digest=0), HALVES[:1])], "b", 1, 1),
    ],
)
def test_where_the_state_is(found, run, sources, debris):
    choice = choose("gpt", [f"node{i}" for i in range(len(found))], found, len(found))
    assert choice is not None and choice.run == run and choice.step == 3 or choice.step == 9
    assert (len(choice.sources), len(choice.debris)) == (sources, debris)
    assert not set(choice.sources) & set(choice.debris)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([Holding(FIRST)], "those of part 2 have no ranks here"),
        ([Holding(FIRST), Holding(_held(4, 8, run="c", number=2))], "do not belong together"),
        # Two runs that have everything.
        ([Holding(_held(0, 8, count=1)), Holding(_held(0, 8, run="c", count=1))], "do not belong"),
        ([Holding(None, HALVES[:1])], "half made"),
        # A job that has gone on beside parcels that have everything, or is of another run.
        ([Holding(_held(0, 8, count=1, step=5), HALVES)], "of which it was not made"),
        ([Holding(_held(0, 8, run="c", count=1), HALVES)], "of which it was not made"),
        ([Holding(_held(0, 4, run="b", step=2), HALVES)], "of which it was not made"),
        # A parcel of another run, or one that is ahead.
        ([Holding(FIRST, (_parcel(0, 4, source="c"),)), Holding(SECOND)], "does not belong"),
        ([Holding(FIRST, (_parcel(0, 4, step=4),)), Holding(SECOND)], "does not belong"),
        # The job went on without a part that was handed over.
        ([Holding(_held(0, 4, step=5), (_parcel(4, 8, run="a", number=2),))], "at one step"),
    ],
)
def test_what_is_not_touched(found, text):
    with pytest.raises(Refused, match=text):
        choose("gpt", [f"node{i}" for i in range(len(found))], found, len(found))


def test_nothing_is_there():
    assert choose("gpt", ["node0"], [Holding()], 1) is None
    new = _held(0, 4, step=0, loads=0)
    assert choose("gpt", ["node0", "node1"], [Holding(new), Holding()], 2) is None


def test_a_mark_says_what_a_parcel_is():
    for scaler in (None, LossScalerState(0.1, 3, 2)):
        mark = Mark(Part("0af3", 2, 3), 17, "b00c", scaler)
        assert mark_of([mark.name]) == mark == mark_of([f"{mark.name}@0"])
    assert mark_of(["0.weight"]) is None and part_of([mark.name]) is None


def test_names_of_parcels_fit():
    part = Part("0123456789abcdef", 100000, 100000)
    assert parcel_of("gpt", Part("", 1, 1)) == "gpt.optstate-parcel-1of1"
    longest = parcel_of("x" * 128, part)
    assert len(longest) <= 128 and longest != parcel_of("y" * 128, part)


def test_what_leaving_nodes_hand_over():
    jobs = [FIRST, SECOND, _held(0, 4), _held(4, 8, number=2)]
    sources, wishes = wishes_of(jobs, {1, 3})
    assert [each.node for each in sources] == [1]
    assert [(each.node, each.part.number) for each in wishes] == [(0, 2)]
    assert wishes_of(jobs, {0, 1}) == ([], [])
