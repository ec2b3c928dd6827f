"""Where the state of a sharded job is, and what may be deleted: the rules, without a daemon."""

from __future__ import annotations

import pytest
from optstate._torch.nodes.moves.blocks import Block
from optstate._torch.nodes.moves.choosing import Refused, choose
from optstate._torch.nodes.moves.durability import WHILE_MOVING
from optstate._torch.nodes.moves.handing_over import wishes_of
from optstate._torch.nodes.moves.holdings import (
    HeldJob,
    Holding,
    Mark,
    last_step_of,
    mark_of,
    parcel_of,
)
from optstate._torch.nodes.moves.making_note import MakingNote, note_of
from optstate._torch.nodes.part_names import Part, part_of
from optstate._torch.nodes.resolution import Position, Step
from optstate.job_position import NodesNorm
from optstate.session_spec import LossScalerState, ParameterSpec, Shard


def _block(name, begin, end, whole=8):
    shard = Shard(0, (whole,), (begin,))
    return Block(name, 0, ParameterSpec(name, (end - begin,), end - begin, 1, 1, 0, shard=shard))


def _held(begin, end, *, run="a", number=1, count=2, step=3, mark=None, loads=1, **more):
    """A job that has these elements of the one parameter."""
    part = None if mark or not count else Part(run, number, count)
    norm = NodesNorm(more.pop("norm", 0.0), 1.0)
    last = Step(step, more.pop("digest", 7), more.pop("found_inf", False), norm=norm)
    durable = more.pop("durable", "")
    position = Position(last, loads_finished=loads, **more)
    blocks = (_block("w", begin, end),)
    return HeldJob("gpt", part, mark, position, run, 1, 4, "", durable, blocks)


def _parcel(begin, end, *, run="b", number=1, count=2, step=3, source="a", loads=2, **facts):
    mark = Mark(Part(run, number, count), step, source, None, **facts)
    return _held(begin, end, run=run, mark=mark, step=0, loads=loads)


FIRST, SECOND = _held(0, 4), _held(4, 8, number=2)
HALVES = _parcel(0, 4), _parcel(4, 8, number=2)
# Durable jobs that came back from their disks, and parcels that were made before.
BACK = [
    _held(begin, begin + 4, number=number, step=2, durable="every 2", durable_step=2)
    for begin, number in ((0, 1), (4, 2))
]
AHEAD = _parcel(0, 4, durable=(2,)), _parcel(4, 8, number=2, durable=(2,))
HALF_MADE = _parcel(4, 8, number=2, durable=(2,), loads=1)
# All of a job on one node, whose layout does not name its run.
WHOLE = (_parcel(0, 8, count=1),)
NOTE = MakingNote("b", "made")


def _alone(**facts):
    return _held(0, 8, count=0, **{"run": "made", "digest": 0, **facts})


# A job of one node that was trained, and what identifies its last step.
TRAINED = _alone(run="a", digest=7, norm=2.0)
LAST_STEP = last_step_of(TRAINED.position)
RESTORED = TRAINED._replace(run="anew")


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
        # The jobs are being made of them, or have begun; earlier builds took steps up to there.
        ([Holding(_held(0, 4, run="b", step=0, digest=0), HALVES)], "b", 2, 1),
        ([Holding(_held(0, 4, run="b", digest=0), HALVES)], "b", 2, 1),
        ([Holding(_held(0, 4, run="b", step=1, digest=0, found_inf=True), HALVES)], "b", 2, 1),
        # So is one of one node, to which nothing was ever loaded,
        ([Holding(_alone(run="c", step=0, loads=0), WHOLE)], "b", 1, 1),
        # one that a note names,
        ([Holding(_alone(step=0), WHOLE, NOTE)], "b", 1, 1),
        ([Holding(_alone(step=3), WHOLE, NOTE)], "b", 1, 1),
        # or its durability; and that came from the disk since.
        ([Holding(_alone(run="c", step=0, durable=WHILE_MOVING), WHOLE)], "b", 1, 1),
        ([Holding(_alone(run="c", step=3, durable=WHILE_MOVING), WHOLE)], "b", 1, 1),
        ([Holding(_alone(run="c", step=3), WHOLE, NOTE)], "b", 1, 1),
        # The former job of one node came from the disk since.
        ([Holding(RESTORED, (_parcel(0, 8, count=1, last_step=LAST_STEP),))], "b", 1, 1),
        (
            [Holding(RESTORED, (_parcel(0, 4, last_step=LAST_STEP),)), Holding()],
            "anew",
            1,
            1,
        ),
        # Jobs of several nodes came from their disks at an earlier step, beside whole parcels,
        ([Holding(BACK[0], AHEAD[:1]), Holding(BACK[1], AHEAD[1:])], "b", 2, 2),
        ([Holding(BACK[1], AHEAD[:1]), Holding(None, AHEAD[1:])], "b", 2, 1),
        # or when one was not whole.
        ([Holding(BACK[0], AHEAD[:1]), Holding(BACK[1], (HALF_MADE,))], "a", 2, 2),
        # All parts were handed over, and one node's job was deleted.
        ([Holding(FIRST, (_parcel(0, 4, run="a"), _parcel(4, 8, run="a", number=2)))], "a", 2, 1),
        # Another run's parcel was given up half made.
        ([Holding(FIRST, (_parcel(0, 4, source="c", loads=1),)), Holding(SECOND)], "a", 2, 1),
        # The jobs are whole, and parcels are partly deleted.
        ([Holding(_held(0, 8, run="b", count=1, digest=0), HALVES[:1])], "b", 1, 1),
        # So is one of one node that was made of several; it has gone on, or came from the disk.
        ([Holding(_alone(), HALVES[1:], NOTE)], "made", 1, 1),
        ([Holding(_alone(step=0), (_parcel(4, 8, number=2, step=0),), NOTE)], "made", 1, 1),
        ([Holding(_alone(step=9, norm=2.0), HALVES[1:], NOTE)], "made", 1, 1),
        ([Holding(_alone(run="c"), HALVES[1:], NOTE)], "c", 1, 1),
        # Parcels of a job of one node that is known by nothing were never all whole.
        (
            [
                Holding(_alone(run="c"), HALVES[:1]),
                Holding(None, (_parcel(4, 8, number=2, loads=1),)),
            ],
            "c",
            1,
            2,
        ),
        # A parcel that was deleted at an earlier step is there again, beside a later one.
        (
            [
                Holding(
                    _held(0, 4, step=9),
                    (
                        _parcel(4, 8, run="a", number=2, step=9),
                        _parcel(0, 4, run="a", step=3, source="c"),
                    ),
                )
            ],
            "a",
            2,
            1,
        ),
    ],
)
def test_where_the_state_is(found, run, sources, debris):
    choice = choose("gpt", [f"node{i}" for i in range(len(found))], found, len(found))
    assert choice is not None and choice.run == run and choice.step in (0, 2, 3, 9)
    assert (len(choice.sources), len(choice.debris)) == (sources, debris)
    assert not set(choice.sources) & set(choice.debris)
    assert {each.held.step for each in choice.sources} == {choice.step}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([Holding(FIRST)], "those of part 2 have no ranks here"),
        ([Holding(FIRST), Holding(_held(4, 8, run="c", number=2))], "do not belong together"),
        # Two runs that have everything.
        ([Holding(_held(0, 8, count=1)), Holding(_held(0, 8, run="c", count=1))], "do not belong"),
        ([Holding(None, HALVES[:1])], "half made"),
        # A job that has gone on beside parcels that have everything, or is of another run.
        ([Holding(_held(0, 8, count=1, step=5), HALVES)], "nothing says"),
        ([Holding(_held(0, 8, run="c", count=1), HALVES)], "nothing says"),
        ([Holding(_held(0, 4, run="b", step=2), HALVES)], "nothing says"),
        # Jobs that came from their disks, and were trained from there; or with another history.
        ([Holding(BACK[0], (_parcel(0, 4, durable=(1,)),)), Holding(BACK[1], AHEAD[1:])], "says"),
        (
            [
                Holding(_held(0, 4, step=2, durable="step", durable_step=1), AHEAD[:1]),
                Holding(None, AHEAD[1:]),
            ],
            "nothing says",
        ),
        # Their parcels are not all here, and may be whole.
        ([Holding(BACK[0], AHEAD[:1]), Holding(BACK[1])], "does not belong"),
        (
            [Holding(FIRST._replace(run="a"), (_parcel(0, 4, step=4), HALF_MADE)), Holding(SECOND)],
            "not belong",
        ),
        # A job of one node that another client has made, beside a note about one that is gone.
        ([Holding(_alone(run="c", step=0), WHOLE)], "optctl delete job gpt, on node0 alone"),
        ([Holding(_alone(run="c", step=0), WHOLE, NOTE)], "nothing says"),
        ([Holding(_alone(run="c", step=2), WHOLE, NOTE)], "nothing says"),
        ([Holding(_alone(step=3), WHOLE, MakingNote("c", "made"))], "nothing says"),
        # One that was trained since, or by itself.
        ([Holding(_alone(step=3, digest=7), WHOLE, NOTE)], "nothing says"),
        ([Holding(_alone(step=3, norm=1.0), WHOLE, NOTE)], "nothing says"),
        ([Holding(_alone(step=3, found_inf=True), WHOLE, NOTE)], "nothing says"),
        ([Holding(_alone(step=2), WHOLE, NOTE)], "nothing says"),
        ([Holding(_alone(step=2, durable=WHILE_MOVING), WHOLE)], "nothing says"),
        ([Holding(_alone(step=4), WHOLE, NOTE)], "nothing says"),
        # One that took another last step than the job that the parcel was made of.
        (
            [
                Holding(
                    _alone(run="c", digest=7, norm=3.0),
                    (_parcel(0, 8, count=1, last_step=LAST_STEP),),
                )
            ],
            "nothing says",
        ),
        # One that nothing says to be made of the parcels that are left, or that is not whole.
        ([Holding(_alone(), HALVES[1:])], "does not belong"),
        ([Holding(_alone(run="c", norm=1.0), HALVES[1:], NOTE)], "does not belong"),
        ([Holding(_alone(run="c", step=9), HALVES[1:], NOTE)], "does not belong"),
        ([Holding(_alone(run="c", durable=WHILE_MOVING), HALVES[1:], NOTE)], "does not belong"),
        ([Holding(_alone(), HALVES[1:], MakingNote("c", "made"))], "does not belong"),
        ([Holding(_alone(step=0), HALVES[1:], NOTE)], "does not belong"),
        # The parcels are all whole and not all here.
        ([Holding(_alone(run="c"), HALVES[:1]), Holding()], "does not belong"),
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
        for last_step, durable in (("", ()), (LAST_STEP, ()), (LAST_STEP, (7,)), ("", (0, 15))):
            mark = Mark(Part("0af3", 2, 3), 17, "b00c", scaler, last_step, durable)
            assert mark_of([mark.name]) == mark == mark_of([f"{mark.name}@0"])
    assert mark_of(["0.weight"]) is None and part_of([mark.name]) is None


def test_a_note_says_what_a_job_is_made_of():
    note = MakingNote("0af3", "b00c")
    assert note_of(note.name) == note and note_of("0.weight") is None
    assert mark_of([note.name]) is None and part_of([note.name]) is None


def test_steps_that_update_nothing_identify_no_job():
    assert LAST_STEP and last_step_of(_alone(step=3, digest=7, norm=3.0).position) != LAST_STEP
    for facts in ({"step": 0}, {"step": 3}, {"step": 3, "digest": 7, "found_inf": True}):
        assert last_step_of(_alone(**facts).position) == ""


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
    # Nodes that stay give theirs to themselves, each part once.
    sources, wishes = wishes_of(jobs, {1, 3}, all_parts=True)
    assert [each.node for each in sources] == [0, 1]
    assert [(each.node, each.part.number) for each in wishes] == [(0, 1), (0, 2)]
