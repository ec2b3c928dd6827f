"""Jobs that are sharded over nodes go on with other nodes or ranks: their state moves."""

from __future__ import annotations

import nodes as on_nodes
import nodes_moves as moves
import pytest
import ranks
import sharded

nodes = on_nodes.nodes


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("fsdp", "AdamW"),
        ("fsdp", "amsgrad"),
        ("fsdp", "split"),
        ("fsdp", "scaler"),
        ("zero", "AdamW"),
        ("zero", "eight"),
        ("zero", "Lion"),
        ("zero", "bfloat16"),
        ("zero", "scaler"),
        ("zero", "NAdam"),
        ("zero", "Adafactor"),
        ("zero", "Muon"),
    ],
)
def test_one_node_becomes_two(kind, case, nodes, daemon, job):
    expected = moves.unmoved(daemon, job, kind, case)
    assert moves.run([nodes[0].shm], 2, job, kind, case, until=3)[0] == 0
    begun, *found = moves.run(moves.endpoints(nodes), 2, job, kind, case)
    assert begun == 3 and tuple(found) == expected
    assert moves.jobs(nodes) == [[job], [job]]


@pytest.mark.parametrize("case", ["AdamW", "NAdam"])
def test_whole_parameters_become_cut_ones(case, nodes, daemon, job):
    """And whole ones again, on the nodes in another order."""
    expected = moves.unmoved(daemon, job, "zero", case)
    moves.run(moves.endpoints(nodes), 1, job, "zero", case, until=2)
    wholes = _elements(nodes, job)
    begun, *_ = moves.run(
        moves.endpoints(nodes), 1, job, "zero", case, until=4, partition="contiguous"
    )
    assert begun == 2 and _elements(nodes, job) != wholes
    begun, *found = moves.run(moves.endpoints(nodes)[::-1], 1, job, "zero", case)
    assert begun == 4 and tuple(found) == expected
    assert _elements(nodes[::-1], job) == wholes


def _elements(nodes, job):
    """By node, the elements of each of its parameters."""
    return [[int(each["numel"]) for each in node.parameters(job)] for node in nodes]


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
@pytest.mark.parametrize("order", [1, -1], ids=["same places", "other places"])
def test_nodes_with_fewer_ranks(kind, order, nodes, daemon, job):
    """The nodes may change places too."""
    expected = moves.unmoved(daemon, job, kind)
    moves.run(moves.endpoints(nodes), 2, job, kind, until=3)
    begun, *found = moves.run(moves.endpoints(nodes)[::order], 1, job, kind)
    assert begun == 3 and tuple(found) == expected
    assert moves.jobs(nodes) == [[job], [job]]


def test_a_node_of_a_replica_goes_on_alone(nodes, daemon, job):
    """It has everything, and the other one's job is of another run then."""
    expected = moves.unmoved(daemon, job)
    moves.run(moves.endpoints(nodes), 2, job, "hsdp", until=3)
    begun, *found = moves.run([nodes[1].shm], 2, job)
    assert begun == 3 and tuple(found) == expected
    for rank, said in enumerate(ranks.run(moves.said, 2, moves.endpoints(nodes), 1, job, {})):
        assert said[0] == "FailedPreconditionError" and "do not belong together" in said[1], rank
    nodes[0].run_optctl("delete", "job", job)
    assert moves.run(moves.endpoints(nodes), 1, job, until=7)[0] == moves.UNTIL


def test_more_ranks_on_one_node(daemon, job):
    expected = moves.unmoved(daemon, job)
    moves.run([daemon.shm], 1, job, until=3)
    begun, *found = moves.run([daemon.shm], 4, job)
    assert begun == 3 and tuple(found) == expected


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_state_of_16_bits(kind, nodes, job):
    """The state that moves has the same bits; how later steps round it depends on where it lies."""
    before = moves.run(moves.endpoints(nodes), 1, job, kind, "state", until=3)
    after = moves.run(moves.endpoints(nodes)[::-1], 1, job, kind, "state", until=3)
    assert after == (3, *before[1:])


def test_state_of_8_bits_whose_shards_stay_whole(nodes, daemon, job):
    """On other nodes, by as many ranks."""
    expected = moves.unmoved(daemon, job, "fsdp", "eight")
    moves.run([nodes[0].shm], 2, job, "fsdp", "eight", until=2)
    moves.run(moves.endpoints(nodes), 1, job, "fsdp", "eight", until=4)
    begun, *found = moves.run(moves.endpoints(nodes)[::-1], 1, job, "fsdp", "eight")
    assert begun == 4 and tuple(found) == expected


@pytest.mark.parametrize("before", [1, 2])
def test_state_of_8_bits_that_is_cut_between_blocks(before, nodes, daemon, job):
    """To more ranks, and back to fewer ones; later steps have the bits of any other cut."""
    expected = moves.unmoved(daemon, job, "wide", "eight")
    moves.run([nodes[0].shm], before, job, "wide", "eight", until=2)
    begun, *_ = moves.run(moves.endpoints(nodes), 2, job, "wide", "eight", until=4)
    assert begun == 2
    begun, *found = moves.run(moves.endpoints(nodes)[::-1], 1, job, "wide", "eight")
    assert begun == 4 and tuple(found) == expected


def _leave(connection, rank, endpoints, job, kind, until, leaving):
    """Trains to a step, and hands over what the leaving nodes have."""
    model, optimizer = moves.make(rank, endpoints, 1, job, kind, "AdamW", {})
    for step in range(optimizer.committed_step, until):
        moves.take_step(model, optimizer, kind, "AdamW", step)
        assert not optimizer.hand_over()
    assert optimizer.hand_over(leaves=rank in leaving)
    with pytest.raises(RuntimeError, match="was handed over"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_a_node_that_leaves_hands_over(kind, nodes, daemon, job):
    expected = moves.unmoved(daemon, job, kind)
    ranks.run(_leave, 2, moves.endpoints(nodes), job, kind, 3, (0,))
    assert nodes[0].jobs() == [] and len(nodes[1].jobs()) == 2  # its own part, and the other one
    begun, *found = moves.run([nodes[1].shm], 2, job, kind)
    assert begun == 3 and tuple(found) == expected
    assert moves.jobs(nodes) == [[], [job]]


def test_a_node_that_leaves_and_comes_back(nodes, daemon, job):
    expected = moves.unmoved(daemon, job)
    ranks.run(_leave, 2, moves.endpoints(nodes), job, "fsdp", 3, (1,))
    begun, *found = moves.run(moves.endpoints(nodes), 1, job)
    assert begun == 3 and tuple(found) == expected
    assert moves.jobs(nodes) == [[job], [job]]


def _refuses(connection, rank, endpoints, job):
    """A hand_over() that is refused changes nothing."""
    said = []
    model, optimizer = moves.make(rank, endpoints, 1, job, "fsdp", "AdamW", {"accumulate": True})
    moves.take_step(model, optimizer, "fsdp", "AdamW", 0)
    try:
        optimizer.hand_over(leaves=True)
    except ValueError as error:
        said.append(str(error))
    sharded.loss_of(model, 1).backward()
    optimizer.accumulate_step()
    try:
        optimizer.hand_over(leaves=rank == 0)
    except RuntimeError as error:
        said.append(str(error))
    optimizer.abort_step()
    moves.take_step(model, optimizer, "fsdp", "AdamW", 1)
    step = optimizer.committed_step
    optimizer.close()
    return step, said


def test_what_hand_over_refuses(nodes, job):
    for step, said in ranks.run(_refuses, 2, moves.endpoints(nodes), job):
        assert step == 2
        assert "all nodes leave" in said[0] and "micro-steps" in said[1]
    assert moves.jobs(nodes) == [[job], [job]]
