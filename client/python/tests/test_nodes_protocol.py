"""Nodes agree about each step whoever dies when: all interleavings, and the rules one by one."""

from __future__ import annotations

import dataclasses
import itertools

import nodes_model
import pytest
from nodes_model import Scenario
from optstate._torch.nodes import resolution
from optstate._torch.nodes.resolution import Position, Step, Unresolvable, Verdict
from optstate._torch.nodes.without_others import settled_without_others
from optstate.job_position import NodesNorm, noted_digest

NONE = Step(0, 0)


def _at(step, digest=5, found_inf=False, prepared=None, **facts):
    return Position(Step(step, digest, found_inf), prepared, **facts)


@pytest.mark.parametrize("found_inf", [(False, False), (True, False)])
@pytest.mark.parametrize("loses", [False, True])
def test_all_interleavings_of_two_nodes(found_inf, loses):
    scenario = Scenario((5, 5), found_inf, (False, False), faults=3, loses=loses)
    worlds = nodes_model.explore(scenario)
    ends = [w for w in worlds if all(n.committed.step == nodes_model.STEP for n in w.nodes)]
    assert ends
    assert all(n.committed.found_inf == any(found_inf) for w in ends for n in w.nodes)
    assert any(w.error for w in worlds) == loses


@pytest.mark.parametrize(("digests", "fails"), [((5, 6), (False, False)), ((5, 5), (True, False))])
def test_a_step_that_nodes_prepare_differently_is_taken_on_none(digests, fails):
    scenario = Scenario(digests, (False, False), fails, faults=2, loses=False)
    worlds = nodes_model.explore(scenario)
    assert not any(n.committed.step for w in worlds for n in w.nodes)
    assert any(w.generation == 1 and w.seen is None for w in worlds)


def test_all_interleavings_of_three_nodes():
    scenario = Scenario((5, 5, 5), (False, True, False), (False,) * 3, faults=1, loses=True)
    worlds = nodes_model.explore(scenario)
    assert any(all(n.committed.step == nodes_model.STEP for n in w.nodes) for w in worlds)


@pytest.mark.parametrize(
    ("kinds", "digests", "fails"),
    [
        ((0, 1), (5, 6), (False, False)),
        ((0, 1), (5, 6), (True, False)),
        ((0, 0), (5, 5), (True, False)),
    ],
)
@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("found_inf", [(False, False), (False, True)])
def test_nodes_with_other_shards_take_the_same_attempt(kinds, digests, fails, loses, found_inf):
    """Digests do not say that two nodes' steps belong together; the order of what ranks do does."""
    scenario = Scenario(
        digests,
        found_inf,
        fails,
        faults=2,
        loses=loses,
        kinds=kinds,
        varies=True,
        retries=1,
    )
    worlds = nodes_model.explore(scenario)
    ends = [w for w in worlds if all(n.committed.step == nodes_model.STEP for n in w.nodes)]
    assert {w.generation for w in ends} == {0, 1, 2}
    assert any(w.error for w in worlds) == loses


@pytest.mark.parametrize(("careless", "faults"), [("bring", 0), ("all", 2)])
def test_an_abort_is_brought_before_the_step_is_prepared_again(careless, faults):
    """The model notices what NodeAgreement.take prevents: an engine would answer with the step of
    the first attempt, or one would be left on a node whose ranks die, and nodes that hold other
    shards could not tell."""
    scenario = Scenario(
        (5, 6),
        (True, False),
        (False, True),
        faults=faults,
        loses=False,
        kinds=(0, 1),
        varies=True,
        retries=1,
        careless=careless,
    )
    with pytest.raises(AssertionError, match="of two attempts|nothing was lost"):
        nodes_model.explore(scenario)


def test_a_step_is_committed_when_all_nodes_have_noted_its_norm():
    """The model notices what NodeAgreement.take awaits. Else ranks that come too early find a step
    that no node has noted, drop it on one node, and a rank that still lives commits it on its."""
    scenario = Scenario(
        (5, 6), (False,) * 2, (False,) * 2, faults=1, loses=False, kinds=(0, 1), overlaps=True
    )
    worlds = nodes_model.explore(scenario)
    assert any(all(n.committed.step == nodes_model.STEP for n in w.nodes) for w in worlds)
    with pytest.raises(AssertionError, match="nothing was lost"):
        nodes_model.explore(dataclasses.replace(scenario, careless="noted"))


_TWO = Scenario((5, 5), (False,) * 2, (False,) * 2, faults=2, loses=False)
# Where each way of breaking the protocol shows. `broken` and what check() says.
_MUTATIONS = [
    ("alone", dataclasses.replace(_TWO, found_inf=(True, False), faults=0), "in two ways"),
    ("alone", dataclasses.replace(_TWO, digests=(5, 6), faults=0), "took other steps"),
    ("forgets", _TWO, "nothing was lost"),
    ("unwritten", _TWO, "nothing was lost"),
    # A late verdict to drop the step, from before its norm was noted.
    (
        "any step",
        dataclasses.replace(_TWO, digests=(5, 6), faults=1, kinds=(0, 1), overlaps=True),
        "nothing was lost",
    ),
]


@pytest.mark.parametrize(("broken", "scenario", "finding"), _MUTATIONS)
def test_the_model_notices_a_broken_protocol(broken, scenario, finding):
    assert nodes_model.explore(scenario)
    with pytest.raises(AssertionError, match=finding):
        nodes_model.explore(dataclasses.replace(scenario, broken=broken))


def test_three_nodes_of_which_two_hold_the_same():
    scenario = Scenario(
        (5, 6, 5), (False,) * 3, (False,) * 3, faults=1, loses=True, kinds=(0, 1, 0), varies=True
    )
    worlds = nodes_model.explore(scenario)
    assert any(all(n.committed.step == nodes_model.STEP for n in w.nodes) for w in worlds)


def test_the_rules_of_nodes_with_other_shards():
    names, kinds = ["a", "b"], [0, 1]

    def resolve(*positions):
        return resolution.resolve(positions, names, kinds)

    mine, other = Step(8, 9), Step(8, 10)
    norm = NodesNorm(3.0, 0.5)
    noted, other_noted = (dataclasses.replace(each, norm=norm) for each in (mine, other))
    # Without a norm no node can have committed it; with one, some may have.
    drops = {0: Verdict.ABORT, 1: Verdict.ABORT}
    assert resolve(_at(7, 1, prepared=mine), _at(7, 2, prepared=other)) == drops
    half = [_at(7, 1, prepared=mine), _at(7, 2, prepared=other_noted)]
    assert resolve(*half) == {0: Verdict.CLIP}
    assert resolution.noted_norm(half) == norm
    commits = {0: Verdict.COMMIT, 1: Verdict.COMMIT}
    assert resolve(_at(7, 1, prepared=noted), _at(7, 2, prepared=other_noted)) == commits
    assert resolve(_at(8, 9), _at(7, 2, prepared=other_noted)) == {1: Verdict.COMMIT}
    assert resolve(_at(8, 9), _at(7, 2, prepared=other)) == {1: Verdict.CLIP}
    ahead = Position(noted)
    assert resolution.noted_norm([ahead, _at(7, 2, prepared=other)]) == norm
    assert resolve(_at(8, 9, True), _at(7, 2, prepared=other)) == {1: Verdict.SKIP}
    assert resolve(_at(7, 1, prepared=mine), _at(7, 2)) == {0: Verdict.ABORT}
    assert resolve(_at(8, 9), _at(8, 10)) == {}
    for positions in (
        (_at(8, 9), _at(7, 2)),
        (_at(8, 9), _at(7, 2, prepared=Step(7, 3))),
        (_at(8, 9), _at(8, 0)),  # one of them alone, in one phase
        (_at(8, 9, True), _at(8, 10)),
        (_at(8, 9), None),
        (_at(8, 9, loads_finished=2), _at(8, 10, loads_finished=1)),
    ):
        with pytest.raises(Unresolvable):
            resolve(*positions)
    # Steps of nodes that hold the same are compared.
    with pytest.raises(Unresolvable):
        resolution.resolve([_at(8, 9), _at(8, 10), _at(8, 9, True)], ["a", "b", "c"], [0, 1, 0])
    three = [_at(8, 9), _at(7, 2, prepared=other), _at(7, 1, prepared=Step(8, 11))]
    with pytest.raises(Unresolvable):
        resolution.resolve(three, ["a", "b", "c"], [0, 1, 0])
    three = [_at(8, 9), _at(7, 2, prepared=other_noted), _at(7, 1, prepared=noted)]
    found = resolution.resolve(three, ["a", "b", "c"], [0, 1, 0])
    assert found == {1: Verdict.COMMIT, 2: Verdict.COMMIT}


def test_a_job_that_has_moved_is_not_compared_with_other_jobs():
    """It has begun at its step, of which it has no digest, and the norm 0."""
    names, kinds = ["a", "b", "c"], [0, 1, 2]
    jobs = [0, 1, 1]

    def resolve(*positions):
        return resolution.resolve(positions, names, kinds, jobs)

    def alone(step, norm):
        return Position(Step(step, 0, norm=NodesNorm(norm, 1.0)))

    moved = alone(8, 0.0)
    assert resolve(_at(8, 9), moved, moved) == {}
    assert resolve(moved, _at(8, 9), _at(8, 10)) == {}
    # The others may have skipped the step; and the state of one is in parcels.
    assert resolve(moved, _at(8, 9, True), _at(8, 10, True)) == {}
    assert resolve(_at(8, 9), _at(8, 0), _at(8, 0)) == {}
    for positions in (
        (_at(8, 9), moved, _at(8, 10)),  # one node of it alone
        (_at(8, 9), _at(7, 0), _at(7, 0)),
        (_at(8, 9), alone(8, 2.0), alone(8, 2.0)),  # it has trained without the other one
        (_at(8, 9), _at(8, 0, True), _at(8, 0, True)),
        (_at(8, 9, True), _at(8, 10), _at(8, 11)),
    ):
        with pytest.raises(Unresolvable):
            resolve(*positions)


def test_a_job_that_is_alone_takes_no_step_that_it_was_to_clip_with_others():
    def verdicts(*prepared):
        positions = [Position(Step(7, 9), each) for each in prepared]
        found = resolution.resolve(positions, ["a", "b"][: len(prepared)])
        return settled_without_others("job", found, positions)

    awaiting = Step(8, 11, awaits_norm=True)
    assert verdicts(None) == {}
    assert verdicts(awaiting) == {0: Verdict.ABORT}
    assert verdicts(awaiting, awaiting) == dict.fromkeys((0, 1), Verdict.ABORT)
    assert verdicts(dataclasses.replace(awaiting, found_inf=True)) == {0: Verdict.SKIP}
    # Steps of a job by itself are taken, by however many nodes.
    assert verdicts(Step(8, 11)) == {0: Verdict.COMMIT}
    assert verdicts(Step(8, 11), Step(8, 11)) == dict.fromkeys((0, 1), Verdict.COMMIT)
    # Others may have taken it.
    noted = dataclasses.replace(awaiting, norm=NodesNorm(2.0, 0.5))
    assert verdicts(noted) == {0: Verdict.COMMIT}
    # A node that gets the job from the other one does not know either.
    positions = [_at(7, prepared=awaiting), None]
    committed = {0: Verdict.COMMIT}
    assert settled_without_others("job", committed, positions) == {0: Verdict.ABORT}


def test_a_norm_that_one_node_of_a_job_has_noted_clips_it_on_all():
    """The job clips with others (norm_group), which its nodes, that hold the same, do not say."""
    step, norm = Step(8, 9, awaits_norm=True), NodesNorm(2.0, 0.5)
    noted = dataclasses.replace(step, norm=norm)

    def settled(*positions):
        found = resolution.resolve(positions, ["a", "b"])
        return settled_without_others("job", found, positions)

    positions = [_at(7, prepared=noted), _at(7, prepared=step)]
    assert settled(*positions) == {1: Verdict.CLIP}
    assert resolution.noted_norm(positions) == norm
    assert settled(positions[0], positions[0]) == dict.fromkeys((0, 1), Verdict.COMMIT)
    taken = Position(Step(8, noted_digest(9, norm), norm=norm))
    assert settled(taken, positions[0]) == {1: Verdict.COMMIT}
    # No node can have committed a step that awaits a norm which none has noted.
    assert settled(positions[1], positions[1]) == dict.fromkeys((0, 1), Verdict.ABORT)
    assert settled(positions[1], _at(7)) == {0: Verdict.ABORT}


def test_the_rules():
    names = ["a", "b"]
    mine, other = Step(8, 9), Step(8, 10)
    resolve = resolution.resolve
    assert resolve([None, None], names) == {}
    assert resolve([_at(7), _at(7)], names) == {}
    assert resolve([_at(0, 0, loads_finished=1), None], names) == {}
    assert resolve([_at(7, prepared=mine), _at(7, prepared=mine)], names) == {
        0: Verdict.COMMIT,
        1: Verdict.COMMIT,
    }
    inf = Step(8, 9, True)
    assert set(resolve([_at(7, prepared=mine), _at(7, prepared=inf)], names).values()) == {
        Verdict.SKIP
    }
    assert resolve([_at(7, prepared=mine), _at(7)], names) == {0: Verdict.ABORT}
    assert set(resolve([_at(7, prepared=mine), _at(7, prepared=other)], names).values()) == {
        Verdict.ABORT
    }
    assert resolve([_at(8, 9), _at(7, prepared=mine)], names) == {1: Verdict.COMMIT}
    assert resolve([_at(8, 9, True), _at(7, prepared=mine)], names) == {1: Verdict.SKIP}
    # The other one is first brought to the step, and then asked again.
    ahead = _at(8, 9, prepared=Step(9, 3))
    assert resolve([ahead, _at(7, prepared=mine)], names) == {1: Verdict.COMMIT}


@pytest.mark.parametrize(
    "positions",
    [
        [_at(8, 9), _at(7)],
        [_at(8, 9), _at(7, prepared=Step(8, 10))],
        [_at(9, 9), _at(7, prepared=Step(8, 9))],
        [_at(8, 9), None],
        [_at(8, 9), _at(8, 10)],
        [_at(8, 9), _at(8, 9, True)],  # one has skipped it
        [_at(8, 0), _at(8, 0, True)],  # each was alone
        [_at(8, 9, loads_finished=1), _at(8, 9, loads_finished=2)],
        [_at(0, 0, loads_finished=1), _at(0, 0, loads_finished=2)],
    ],
)
def test_nodes_that_cannot_go_on_are_named(positions):
    for order in itertools.permutations(range(2)):
        with pytest.raises(Unresolvable) as error:
            resolution.resolve([positions[i] for i in order], [f"node{i}" for i in order])
        assert "node0: step" in str(error.value) and "optctl delete job" in str(error.value)


def test_votes():
    step = Step(3, 4)
    assert resolution.decide([step, step]) is Verdict.COMMIT
    assert resolution.decide([step, Step(3, 4, True)]) is Verdict.SKIP
    assert resolution.decide([step, None]) is Verdict.ABORT
    assert resolution.decide([None, step]) is Verdict.ABORT
    assert resolution.decide([step, Step(4, 4)]) is Verdict.ABORT
    assert resolution.decide([step, Step(3, 5)], [0, 1]) is Verdict.COMMIT
    assert resolution.decide([step, Step(3, 5, True)], [0, 1]) is Verdict.SKIP
    assert resolution.decide([step, Step(3, 5), Step(3, 6)], [0, 1, 1]) is Verdict.ABORT
    assert resolution.decide([step, Step(3, 5, alike=1)], [0, 1]) is Verdict.ABORT
    assert resolution.decide([step, Step(4, 5)], [0, 1]) is Verdict.ABORT


def test_jobs_that_take_their_steps_together_have_options_and_loads_of_their_own():
    step, other = Step(3, 4, alike=1), Step(3, 5, alike=2)
    assert resolution.decide([step, other], [0, 1]) is Verdict.ABORT
    assert resolution.decide([step, other], [0, 1], ["a", "b"]) is Verdict.COMMIT
    assert resolution.decide([step, other, other], [0, 1, 1], ["a", "b", "a"]) is Verdict.ABORT
    clipped = dataclasses.replace(other, clip=(7,))
    assert resolution.decide([step, clipped], [0, 1], ["a", "b"]) is Verdict.ABORT
    positions = [_at(8, 9, loads_finished=1), _at(8, 10, loads_finished=2)]
    with pytest.raises(Unresolvable):
        resolution.resolve(positions, ["a", "b"], [0, 1])
    assert resolution.resolve(positions, ["a", "b"], [0, 1], ["a", "b"]) == {}
    with pytest.raises(Unresolvable):
        resolution.resolve([*positions, positions[0]], ["a", "b", "c"], [0, 1, 1], "abb")
