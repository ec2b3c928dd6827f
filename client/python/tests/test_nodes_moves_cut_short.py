"""Ranks of sharded jobs that are killed while the state moves to other nodes, or within a step
before."""

from __future__ import annotations

import dataclasses

import nodes as on_nodes
import nodes_moves as moves
import optstate
import pytest
import ranks
from optstate._torch.nodes.moves import holdings, mover, parcelling
from training import small_model

nodes = on_nodes.nodes


@pytest.mark.parametrize("stop", moves.STOPS, ids=lambda stop: "-".join(map(str, stop)))
def test_ranks_that_are_killed_while_state_moves(stop, nodes, daemon, job):
    """The next ranks go on, whether they are on the nodes that it moved to or on those it was on,
    and in whichever number."""
    expected = moves.unmoved(daemon, job)
    there, back = moves.endpoints(nodes), moves.endpoints(nodes)[::-1]
    moves.run(there, 1, job, until=3)
    moves.kill_while_moving(back, 1, job, moves.Stop(*stop))
    begun, *_ = moves.run(there, 1, job, until=4)
    assert begun == 3
    moves.kill_while_moving(back, 1, job, moves.Stop(*stop))
    begun, *found = moves.run(back, 1, job)
    assert begun == 4 and tuple(found) == expected
    assert moves.jobs(nodes) == [[job], [job]]


@dataclasses.dataclass(frozen=True)
class _Fails:
    """Rank 1 fails when all have agreed that what they made is whole, and rank 0 goes on."""

    owner: type
    name: str
    count: int  # of deletions on rank 0

    def __call__(self, connection, rank):
        if rank == 0:
            self._say_deletions(connection)
            return
        original = getattr(self.owner, self.name)

        def failing(*args, **kwargs):
            original(*args, **kwargs)
            raise RuntimeError("made up")

        setattr(self.owner, self.name, failing)

    def _say_deletions(self, connection):
        original, calls = mover.delete_left, []

        def saying(spec, job):
            original(spec, job)
            calls.append(job)
            if len(calls) == self.count:
                ranks.say(connection, "deleted")

        mover.delete_left = saying


@pytest.mark.parametrize(
    "fails",
    [_Fails(parcelling._Carrier, "carry", 1), _Fails(mover.Mover, "_begin_at", 2)],
    ids=["parcels", "jobs"],
)
def test_a_rank_that_fails_when_others_go_on(fails, nodes, daemon, job):
    expected = moves.unmoved(daemon, job)
    back = moves.endpoints(nodes)[::-1]
    moves.run(moves.endpoints(nodes), 1, job, until=3)
    arguments = (back, 1, job, "fsdp", "AdamW", moves.UNTIL, None, fails)
    with ranks.running(moves.train, 2, *arguments) as running:
        with pytest.raises(ranks.RankFailed, match="made up"):
            running.hear(1)
        assert running.hear(0) == "deleted"
        running.kill(0, 1)
    begun, *found = moves.run(back, 1, job)
    assert begun == 3 and tuple(found) == expected
    assert moves.jobs(nodes) == [[job], [job]]


def _without_nodes(connection, rank, endpoint, job):
    try:
        optstate.AdamW(small_model().named_parameters(), job=job, endpoint=endpoint)
    except optstate.OptstateError as error:
        return type(error).__name__, str(error)
    return None


def _leave(connection, rank, endpoints, job):
    """The second node leaves at step 3, and hands its part over."""
    model, optimizer = moves.make(rank, endpoints, 1, job, "zero", "AdamW", {})
    for step in range(3):
        moves.take_step(model, optimizer, "zero", "AdamW", step)
    assert optimizer.hand_over(leaves=rank == 1)


@pytest.mark.parametrize("stop", [("delete_left", 1), ("begin", 2), ("begin_at", 1)])
def test_another_script_between_two_tries(stop, nodes, daemon, job):
    """It gets no half made job, and makes no new one while the state is in a parcel."""
    expected = moves.unmoved(daemon, job, "zero")
    ranks.run(_leave, 2, moves.endpoints(nodes), job)
    endpoint = nodes[0].shm
    moves.kill_while_moving([endpoint], 2, job, moves.Stop(*stop, rank=0), "zero")
    if stop[0] == "delete_left":
        nodes[0].run_optctl("delete", "job", job)  # as the rank was going to
    [(kind, text)] = ranks.run(_without_nodes, 1, endpoint, job)
    assert kind == "FailedPreconditionError" and "was moving to this node" in text
    begun, *found = moves.run([endpoint], 2, job, "zero")
    assert begun == 3 and tuple(found) == expected
    assert moves.jobs(nodes) == [[job], []]


def test_another_script_while_all_of_a_job_is_in_parcels(nodes, daemon, job):
    """On its way to several nodes. No new job is made in its place."""
    expected = moves.unmoved(daemon, job)
    back = moves.endpoints(nodes)[::-1]
    moves.run(moves.endpoints(nodes), 1, job, until=3)
    moves.kill_while_moving(back, 1, job, moves.Stop("delete_left", 1))
    for node in nodes:  # as the ranks were going to
        if job in node.jobs():
            node.run_optctl("delete", "job", job)
    for node in nodes:
        [(kind, text)] = ranks.run(_without_nodes, 1, node.shm, job)
        assert kind == "FailedPreconditionError" and "was moving to this node" in text
    begun, *found = moves.run(back, 1, job)
    assert begun == 3 and tuple(found) == expected
    assert moves.jobs(nodes) == [[job], [job]]


# Jobs at other steps than each other.


def _stops_within_a_step(connection, rank, endpoints, job, where):
    model, optimizer = moves.make(rank, endpoints, 1, job, "fsdp", "AdamW", {})
    where(connection, rank, optimizer)
    for step in range(moves.UNTIL):
        moves.take_step(model, optimizer, "fsdp", "AdamW", step)


@pytest.mark.parametrize(
    ("where", "resumed_at"),
    [
        (on_nodes.stops_when_prepared, 2),
        (on_nodes.stops_when_noted, 3),
        (on_nodes.stops_before_committing, 3),  # by one node
    ],
)
def test_a_step_that_was_under_way_is_settled_before(where, resumed_at, nodes, daemon, job):
    expected = moves.unmoved(daemon, job)
    endpoints = moves.endpoints(nodes)
    with ranks.running(_stops_within_a_step, 2, endpoints, job, where) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        running.kill(0, 1)
    begun, *found = moves.run(endpoints[::-1], 2, job)
    assert begun == resumed_at and tuple(found) == expected


def _behind(connection, rank, endpoints, job):
    """This rank's node says that it is one step behind, and knows nothing of the next."""
    position_of = holdings.position_of

    def behind(spec):
        found = position_of(spec)
        if found is None or rank != 1:
            return found
        step = dataclasses.replace(found.committed, step=found.committed.step - 1)
        return dataclasses.replace(found, committed=step)

    holdings.position_of = behind
    return moves.said(connection, rank, endpoints, 1, job, {})


def test_jobs_that_do_not_get_to_one_step(nodes, job):
    moves.run(moves.endpoints(nodes), 1, job, until=3)
    for kind, text in ranks.run(_behind, 2, moves.endpoints(nodes)[::-1], job):
        assert kind == "FailedPreconditionError" and "not at one step" in text
        assert "node0: step 3" in text and "node1: step 2" in text
    assert moves.run(moves.endpoints(nodes), 1, job, until=4)[0] == 3
