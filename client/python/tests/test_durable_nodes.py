"""Durable jobs on two nodes, of which one loses its memory while the other one keeps a later step:
the error names the step, and the durable step, that each has."""

from __future__ import annotations

import nodes as on_nodes
import nodes_moves as moves
import optstate
import pytest
import ranks
from daemon import start_daemon_with_disks
from optstate._torch.nodes.moves.holdings import address_of
from optstate._torch.nodes.positions import position_of
from training import loss_of, small_model

# A step would be durable long after the tests, but for what they do.
SELDOM = "every 1000"


@pytest.fixture
def nodes(tmp_path):
    daemons = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        daemons.append(start_daemon_with_disks(folder, "disk"))
    yield daemons
    for each in daemons:
        each.stop()


def _train(connection, rank, endpoints, job, across_nodes, durability, until, pause=None):
    """Trains to a step; returns the step that it began at, or what was said instead."""
    module = small_model()
    try:
        optimizer = optstate.AdamW(
            module.named_parameters(),
            lr=0.01,
            job=job,
            endpoint=on_nodes.enter(rank, endpoints, 1),
            across_nodes=across_nodes,
            durability=durability,
        )
    except optstate.FailedPreconditionError as error:
        return str(error)
    begun = optimizer.committed_step
    if pause is not None:
        pause(connection, rank, optimizer)
    for step in range(begun, until):
        optimizer.zero_grad()
        loss_of(module, step).backward()  # the same on all ranks
        optimizer.step()
    optimizer.close()
    return begun


def _run(nodes, *how):
    found = ranks.run(_train, 2, [each.shm for each in nodes], *how)
    assert found[0] == found[1]
    return found[0]


def _durable_step(node, job):
    return position_of(address_of(node.shm, job, 0)).durable_step


@pytest.mark.parametrize(
    ("across_nodes", "pause"),
    [
        ("replicated", on_nodes.stops_before_deciding),
        ("sharded", on_nodes.stops_before_committing),
    ],
)
def test_each_nodes_durable_step_is_named(across_nodes, pause, nodes, job):
    """The first node takes step 3, which is durable there; the second one has it prepared, in
    memory alone, when the ranks die and the node loses its power."""
    how = [job, across_nodes, "step", 5]
    with ranks.running(_train, 2, [each.shm for each in nodes], *how, pause) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        running.kill(0, 1)
    moves.lose_power(nodes[1:])
    assert [_durable_step(each, job) for each in nodes] == [3, 2]
    said = _run(nodes, *how)
    assert "node0: step 3, durable step 3," in said
    assert "node1: step 2, durable step 2," in said
    assert "all nodes had step 2, and the last one was 3" in said
    assert "--to-durable" not in said  # they have no such step in common
    # Nothing was changed, and it is said again.
    assert _run(nodes, *how) == said
    if across_nodes == "replicated":  # as the text says
        assert "delete the job on node1 alone" in said
        nodes[1].run_optctl("delete", "job", job)
        assert _run(nodes, *how) == 3


def test_a_durable_step_before_the_last_one(nodes, job):
    """Step 2 is durable on both nodes, and step 3 on none: the node that kept its memory has it."""
    how = [job, "replicated", SELDOM]
    _run(nodes, *how, 2)
    for each in nodes:
        each.run_optctl("set", "job", job, f"durability={SELDOM}")  # which makes the step durable
    assert _run(nodes, *how, 3) == 2
    moves.lose_power(nodes[1:])
    said = _run(nodes, *how, 4)
    assert "node0: step 3, durable step 2," in said
    assert "node1: step 2, durable step 2," in said
    assert "Or go back to step 2, which is durable on all of them: optctl recover" in said
    nodes[0].run_optctl("recover", job, "--to-durable")
    assert _run(nodes, *how, 4) == 2
