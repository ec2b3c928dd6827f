"""Jobs that clip by one norm (norm_group=) go on with other nodes or ranks, together."""

from __future__ import annotations

import os

import nodes as on_nodes
import nodes_moves as moves
import optstate
import pytest
import ranks
import torch.distributed as dist
from daemon import start_daemon_with_disks
from training import bits, loss_of, small_model

nodes = on_nodes.nodes

# The layers of small_model() that each job trains.
STAGES = ((0,), (2, 3))
MAX_NORM = 0.05
# The job and the node of each rank.
HOME = ((0, 0), (1, 0))
APART = ((0, 0), (1, 0), (0, 1), (1, 1))
EXCHANGED = ((0, 1), (1, 1), (0, 0), (1, 0))
ONE_MOVES = ((0, 0), (1, 0), (0, 1))
DURABLE = {"durability": "every 1000"}


def _of_stage(model, stage):
    return [
        (name, each)
        for name, each in model.named_parameters()
        if int(name.split(".")[0]) in STAGES[stage]
    ]


def _ranks_of(places):
    return [[rank for rank, (stage, _) in enumerate(places) if stage == each] for each in (0, 1)]


def _open(rank, endpoints, places, job, kwargs):
    stage, node = places[rank]
    os.environ["OPTSTATE_NODE"] = f"node{node}"
    groups = [dist.new_group(of_job) for of_job in _ranks_of(places)]
    model = small_model()
    optimizer = optstate.AdamW(
        _of_stage(model, stage),
        lr=0.01,
        job=f"{job}-{stage}",
        endpoint=endpoints[node],
        process_group=groups[stage],
        norm_group=dist.group.WORLD,
        across_nodes="sharded",
        max_norm=MAX_NORM,
        **kwargs,
    )
    _exchange(model, rank, places)
    return model, optimizer


def _exchange(model, rank, places):
    """Gives each rank the other job's parameters."""
    for stage, of_job in enumerate(_ranks_of(places)):
        for _, parameter in _of_stage(model, stage):
            values = parameter.detach().clone()
            dist.broadcast(values, of_job[0])
            if stage != places[rank][0]:
                parameter.data.copy_(values)


def _take_step(model, optimizer, rank, places, step):
    model.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()
    _exchange(model, rank, places)


def _train(connection, rank, endpoints, places, job, until, kwargs=None, pause=None, within=None):
    """Trains to a step; returns where it began, and the bits of all parameters.

    pause: before the optimizer is constructed. within: a step, as in nodes.py."""
    if pause is not None:
        pause(connection, rank)
    model, optimizer = _open(rank, endpoints, places, job, kwargs or {})
    begun = optimizer.committed_step
    if within is not None:
        within(connection, rank, optimizer)
    for step in range(begun, until):
        _take_step(model, optimizer, rank, places, step)
    assert optimizer.committed_step == until
    assert begun == until or optimizer.last_outcome.clip_coefficient < 1
    found = begun, bits(model.parameters())
    optimizer.close()
    return found


def _run(nodes, places, job, until=moves.UNTIL, kwargs=None):
    """Returns where all began, and the bits that all have."""
    found = ranks.run(_train, len(places), moves.endpoints(nodes), places, job, until, kwargs)
    assert all(each == found[0] for each in found)
    return found[0]


def _unmoved(daemon, job):
    """The bits of jobs that stay on one node."""
    begun, found = _run([daemon], HOME, f"{job}-unmoved")
    assert begun == 0
    return found


def _jobs(job):
    return [f"{job}-0", f"{job}-1"]


@pytest.mark.parametrize(
    ("before", "after"),
    [(HOME, APART), (APART, EXCHANGED), (HOME, ONE_MOVES)],
    ids=["all", "places", "one"],
)
def test_jobs_move_together(before, after, nodes, daemon, job):
    """Jobs whose state is where it is to be go on with jobs whose state has moved."""
    expected = _unmoved(daemon, job)
    assert _run(nodes, before, job, until=3)[0] == 0
    assert _run(nodes, after, job) == (3, expected)
    assert sorted({each for of_node in moves.jobs(nodes) for each in of_node}) == _jobs(job)


def test_a_job_of_which_a_part_is_missing(nodes, daemon, job):
    """No job moves then, and with the part's ranks all go on."""
    expected = _unmoved(daemon, job)
    _run(nodes, APART, job, until=3)
    # The second node has a part of job 1, and no rank; job 0 would move.
    for kind, text in ranks.run(_said, 2, moves.endpoints(nodes), HOME, job):
        assert kind == "FailedPreconditionError" and "elements are missing" in text
    assert moves.jobs(nodes) == [_jobs(job)] * 2
    assert _run(nodes, EXCHANGED, job) == (3, expected)


def _said(connection, rank, endpoints, places, job):
    try:
        _open(rank, endpoints, places, job, {})[1].close()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("where", "resumed_at"),
    [
        (on_nodes.stops_when_prepared, 2),
        (on_nodes.stops_when_noted, 3),
        (on_nodes.stops_before_committing, 3),  # by one job
    ],
)
def test_a_step_that_was_under_way_is_settled_by_all_jobs(where, resumed_at, nodes, daemon, job):
    """A job that moves does not know by itself what the other one has done with it."""
    expected = _unmoved(daemon, job)
    arguments = (moves.endpoints(nodes), HOME, job, moves.UNTIL, None, None, where)
    with ranks.running(_train, 2, *arguments) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        running.kill(0, 1)
    assert _run(nodes, APART, job) == (resumed_at, expected)


def _without_others(connection, rank, endpoint, job, across):
    """One of the jobs, which is started by itself; returns its step."""
    os.environ["OPTSTATE_NODE"] = "node0"
    optimizer = optstate.AdamW(
        _of_stage(small_model(), 0),
        lr=0.01,
        job=f"{job}-0",
        endpoint=endpoint,
        across_nodes=across,
        max_norm=MAX_NORM,
    )
    step = optimizer.committed_step
    optimizer.close()
    return step


@pytest.mark.parametrize("across", ["sharded", "replicated"])
@pytest.mark.parametrize(
    ("where", "resumed_at"), [(on_nodes.stops_when_prepared, 2), (on_nodes.stops_when_noted, 3)]
)
def test_a_job_that_is_started_without_the_others(where, resumed_at, across, nodes, daemon, job):
    """It does not take a step that is not clipped yet, and all go on together."""
    expected = _unmoved(daemon, job)
    arguments = (moves.endpoints(nodes), HOME, job, moves.UNTIL, None, None, where)
    with ranks.running(_train, 2, *arguments) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        running.kill(0, 1)
    assert ranks.run(_without_others, 1, nodes[0].shm, job, across) == [resumed_at]
    assert _run(nodes, APART, job) == (resumed_at, expected)


STOPS = [("begin", 1), ("load_nothing", 1), ("finish_load", 2), ("begin_at", 1)]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: "-".join(map(str, stop)))
@pytest.mark.parametrize("rank", [2, 3])
def test_ranks_that_are_killed_while_one_job_moves(stop, rank, nodes, daemon, job):
    """The other one may have moved."""
    expected = _unmoved(daemon, job)
    _run(nodes, HOME, job, until=3)
    stopping = moves.Stop(*stop, rank=rank)
    arguments = (moves.endpoints(nodes), APART, job, moves.UNTIL, None, stopping)
    with ranks.running(_train, 4, *arguments) as running:
        assert running.hear(rank) == "stopped"
        running.kill(*range(4))
    assert _run(nodes, EXCHANGED, job, until=4)[0] == 3
    assert _run(nodes, APART, job) == (4, expected)
    assert moves.jobs(nodes) == [_jobs(job)] * 2


def test_power_that_is_lost_while_jobs_move(tmp_path, daemon, job):
    """Both are durable at the step at which they move, before any of them does."""
    expected = _unmoved(daemon, job)
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    disks = [start_daemon_with_disks(folder, "disk") for folder in folders]
    try:
        _run(disks, HOME, job, until=3, kwargs=DURABLE)
        stopping = moves.Stop("load_nothing", 1, rank=2)
        arguments = (moves.endpoints(disks), APART, job, moves.UNTIL, DURABLE, stopping)
        with ranks.running(_train, 4, *arguments) as running:
            assert running.hear(2) == "stopped"
            running.kill(*range(4))
        moves.lose_power(disks)
        assert _run(disks, APART, job, kwargs=DURABLE) == (3, expected)
    finally:
        for each in disks:
            each.stop()


def _leave(connection, rank, endpoints, places, job, leaving):
    """Trains to step 3, at which the ranks of these nodes, and of these jobs there, leave."""
    model, optimizer = _open(rank, endpoints, places, job, {})
    for step in range(3):
        _take_step(model, optimizer, rank, places, step)
        assert not optimizer.hand_over()
    assert optimizer.hand_over(leaves=places[rank] in leaving)
    with pytest.raises(RuntimeError, match="was handed over"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize(
    ("leaving", "after"),
    [(((0, 1), (1, 1)), HOME), (((0, 1),), ((0, 0), (1, 0), (1, 1)))],
    ids=["node", "one job's part"],
)
def test_a_node_that_leaves_hands_over(leaving, after, nodes, daemon, job):
    expected = _unmoved(daemon, job)
    ranks.run(_leave, 4, moves.endpoints(nodes), APART, job, leaving)
    there = [f"{job}-{stage}" for stage in (0, 1) if (stage, 1) not in leaving]
    assert nodes[1].jobs() == there
    assert _run(nodes, after, job) == (3, expected)


def _refuses(connection, rank, endpoints, job):
    """All nodes of one job would leave, which no rank of any job does then."""
    model, optimizer = _open(rank, endpoints, APART, job, {})
    _take_step(model, optimizer, rank, APART, 0)
    try:
        optimizer.hand_over(leaves=APART[rank][0] == 1)
    except (ValueError, optstate.OptstateError) as error:
        said = str(error)
    _take_step(model, optimizer, rank, APART, 1)
    step = optimizer.committed_step
    optimizer.close()
    return step, said


def test_a_job_that_all_nodes_would_leave(nodes, job):
    for step, said in ranks.run(_refuses, 4, moves.endpoints(nodes), job):
        assert step == 2 and "all nodes leave" in said


def _made_up(*_args, **_kwargs):
    raise optstate.ResourceExhaustedError("made up")


def _cannot_send(connection, rank, endpoints, job):
    """The daemons of one job refuse what was changed: no rank of any job leaves, or waits."""
    model, optimizer = _open(rank, endpoints, APART, job, {})
    _take_step(model, optimizer, rank, APART, 0)
    stage, node = APART[rank]
    with pytest.MonkeyPatch.context() as patch:
        if stage == 0:
            patch.setattr(optimizer._served, "send_changes", _made_up)
        with pytest.raises(optstate.ResourceExhaustedError, match="made up"):
            optimizer.hand_over(leaves=node == 1)
    _take_step(model, optimizer, rank, APART, 1)
    step = optimizer.committed_step
    optimizer.close()
    return step


def test_a_job_that_cannot_leave(nodes, job):
    assert ranks.run(_cannot_send, 4, moves.endpoints(nodes), job) == [2] * 4
    assert moves.jobs(nodes) == [_jobs(job)] * 2
