"""Durable jobs that are sharded over nodes go on with other nodes or ranks: a loss of power at any
moment leaves the step at which they move."""

from __future__ import annotations

import dataclasses

import nodes_moves as moves
import optstate
import pytest
import ranks
from daemon import start_daemon_with_disks
from optstate._torch.nodes.moves import durability
from optstate._torch.nodes.moves.holdings import address_of
from optstate._torch.nodes.positions import position_of
from training import small_model

# A step would be durable long after the tests, but for what they and the moves do.
SELDOM = "every 1000"
# Where parcels are not whole, the former jobs go on, from their durable step.
BEFORE = {
    ("begin", 1): (2,),
    ("take", 1): (2,),
    ("finish_load", 1): (2,),
    ("load_nothing", 1): (2, 3),
}


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


def _durable_steps(nodes, job):
    addresses = [address_of(each.shm, job, 0) for each in nodes]
    return [position_of(address).durable_step for address in addresses]


def _durabilities(nodes, job):
    found = [each.optctl("describe", "job", job)["storage"] for each in nodes]
    return [durability.durability_in(each) for each in found]


def _train_to_2(nodes, per_node, job, kind="fsdp"):
    """The step is durable."""
    moves.run(moves.endpoints(nodes), per_node, job, kind, until=2, durability=SELDOM)
    for each in nodes:
        each.run_optctl("set", "job", job, f"durability={SELDOM}")


def _train_to_3(nodes, per_node, job):
    """Step 2 is durable, and step 3 is not."""
    _train_to_2(nodes, per_node, job)
    moves.run(moves.endpoints(nodes), per_node, job, until=3, durability=SELDOM)
    assert _durable_steps(nodes, job) == [2] * len(nodes)


@pytest.mark.parametrize(
    ("asked", "case", "more"),
    [
        ("step", "AdamW", {}),
        (SELDOM, "AdamW", {"placement": "nvme"}),
        ("interval 1h", "scaler", {}),
        ("step", "eight", {}),
    ],
)
def test_a_job_is_durable_where_it_moves_to(asked, case, more, nodes, daemon, job):
    expected = moves.unmoved(daemon, job, case=case)
    kwargs = {"durability": asked, **more}
    moves.run([nodes[0].shm], 2, job, case=case, until=3, **kwargs)
    begun, *_ = moves.run(moves.endpoints(nodes), 1, job, case=case, until=3, **kwargs)
    assert begun == 3 and _durable_steps(nodes, job) == [3, 3]
    shown = "interval 3600000ms" if asked.startswith("interval") else asked
    assert _durabilities(nodes, job) == [shown] * 2
    assert moves.jobs(nodes) == [[job], [job]]
    moves.lose_power(nodes)
    begun, *found = moves.run(moves.endpoints(nodes)[::-1], 1, job, case=case, **kwargs)
    assert begun == 3 and tuple(found) == expected


@pytest.mark.parametrize("stop", moves.STOPS, ids=lambda stop: "-".join(map(str, stop)))
def test_power_that_is_lost_while_state_moves(stop, nodes, daemon, job):
    expected = moves.unmoved(daemon, job)
    back = moves.endpoints(nodes)[::-1]
    _train_to_3(nodes, 1, job)
    moves.kill_while_moving(back, 1, job, moves.Stop(*stop), durability=SELDOM)
    moves.lose_power(nodes)
    begun, *found = moves.run(back, 1, job, durability=SELDOM)
    assert begun in BEFORE.get(stop, (3,)) and tuple(found) == expected
    assert moves.jobs(nodes) == [[job], [job]]
    assert _durabilities(nodes, job) == [SELDOM] * 2


@pytest.mark.parametrize(
    "stop",
    [*moves.STOPS, ("delete_left", 3)],  # the last one: of the note
    ids=lambda stop: "-".join(map(str, stop)),
)
def test_power_that_is_lost_while_a_job_of_one_node_moves(stop, nodes, daemon, job):
    """Its layout does not name its run, and when it was made is not known after a reboot."""
    expected = moves.unmoved(daemon, job)
    node = nodes[0]
    _train_to_3([node], 1, job)
    moves.kill_while_moving([node.shm], 2, job, moves.Stop(*stop, rank=0), durability=SELDOM)
    moves.lose_power([node])
    begun, *found = moves.run([node.shm], 2, job, durability=SELDOM)
    assert begun == 3 and tuple(found) == expected
    assert node.jobs() == [job]


@pytest.mark.parametrize("stop", [("finish_load", 1), ("load_nothing", 1), ("delete_left", 1)])
def test_power_that_is_lost_while_one_node_becomes_two(stop, nodes, daemon, job):
    expected = moves.unmoved(daemon, job)
    _train_to_3(nodes[:1], 2, job)
    rank = 0 if stop[0] == "delete_left" else 1  # the one that has a former job
    stopping = moves.Stop(*stop, rank=rank)
    moves.kill_while_moving(moves.endpoints(nodes), 1, job, stopping, durability=SELDOM)
    moves.lose_power(nodes)
    begun, *found = moves.run(moves.endpoints(nodes), 1, job, durability=SELDOM)
    assert begun == 3 and tuple(found) == expected
    assert moves.jobs(nodes) == [[job], [job]]


def _leave(connection, rank, endpoints, job, kind="fsdp"):
    """The second node leaves at step 3, and hands its part over."""
    model, optimizer = moves.make(rank, endpoints, 1, job, kind, "AdamW", {"durability": SELDOM})
    for step in range(optimizer.committed_step, 3):
        moves.take_step(model, optimizer, kind, "AdamW", step)
    assert optimizer.hand_over(leaves=rank == 1)


def test_power_that_is_lost_after_a_node_has_left(nodes, daemon, job):
    """All that stays is durable at the step at which the other part was handed over."""
    expected = moves.unmoved(daemon, job)
    _train_to_2(nodes, 1, job)
    ranks.run(_leave, 2, moves.endpoints(nodes), job)
    moves.lose_power(nodes)
    assert nodes[1].jobs() == []
    begun, *found = moves.run([nodes[0].shm], 2, job, durability=SELDOM)
    assert begun == 3 and tuple(found) == expected


def _without_nodes(connection, rank, endpoint, job):
    try:
        optstate.AdamW(small_model().named_parameters(), job=job, endpoint=endpoint)
    except optstate.OptstateError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    "stop",
    [("begin", 1), ("finish_load", 1), ("begin_at", 1), ("delete_left", 2)],
    ids=lambda stop: "-".join(map(str, stop)),
)
def test_another_script_while_a_job_is_made_of_several_parcels(stop, nodes, daemon, job):
    """The node that stays has both parts in parcels, and makes its job of them as they are. The
    last time it is made, and one of the two is deleted."""
    expected = moves.unmoved(daemon, job, "zero")
    _train_to_2(nodes, 1, job, "zero")
    ranks.run(_leave, 2, moves.endpoints(nodes), job, "zero")
    node = nodes[0]
    assert len(node.jobs()) == 2 and job not in node.jobs()
    stopping = moves.Stop(*stop, rank=0)
    moves.kill_while_moving([node.shm], 2, job, stopping, "zero", durability=SELDOM)
    [(kind, text)] = ranks.run(_without_nodes, 1, node.shm, job)
    assert kind == "FailedPreconditionError" and "was moving to this node" in text
    begun, *found = moves.run([node.shm], 2, job, "zero", durability=SELDOM)
    assert begun == 3 and tuple(found) == expected
    assert node.jobs() == [job]


def _earlier_build(connection, rank, endpoints, job):
    """This rank's daemon sets durabilities, and makes nothing durable by that; a load, which it
    does make so, is not durable yet."""
    position_of = durability.position_of

    def of_nothing_durable(spec):
        found = position_of(spec)
        return None if found is None else dataclasses.replace(found, durable_step=0)

    durability.position_of = of_nothing_durable
    return moves.said(connection, rank, endpoints, 1, job, {"durability": SELDOM})


def test_a_daemon_that_makes_no_step_durable_when_it_is_asked(nodes, job):
    moves.run(moves.endpoints(nodes), 1, job, until=2, durability=SELDOM)
    for kind, text in ranks.run(_earlier_build, 2, moves.endpoints(nodes)[::-1], job):
        assert kind == "UnimplementedError" and "Upgrade optstated" in text
        assert "durable at step 2" in text and "durable at step 0" in text
    # The state is in parcels, and the jobs were removed.
    assert all(len(each) == 1 and "optstate-parcel" in each[0] for each in moves.jobs(nodes))
    assert moves.run(moves.endpoints(nodes), 1, job, until=3, durability=SELDOM)[0] == 2
