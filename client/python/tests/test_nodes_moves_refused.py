"""State of sharded jobs that cannot move to other nodes or ranks."""

from __future__ import annotations

import dataclasses

import nodes as on_nodes
import nodes_moves as moves
import optstate
import pytest
import ranks
import sharded
import torch
from daemon import start_daemon_with_disks
from optstate import _native
from optstate._torch.nodes.moves.deletion import delete_left
from optstate._torch.state.arrays import ArrayTransfer
from optstate.session import Session
from optstate.session_spec import SessionSpec
from training import small_model

nodes = on_nodes.nodes


def _refused(endpoints, per_node, job, **kwargs):
    """Returns the error that all ranks get."""
    found = ranks.run(moves.said, len(endpoints) * per_node, endpoints, per_node, job, kwargs)
    assert len(set(found)) == 1 or all(each[0] == found[0][0] for each in found)
    return found[0]


def test_a_node_that_left_with_its_memory(nodes, daemon, job):
    """The error names what is missing; with the node back, or another one gone, all goes on."""
    expected = moves.unmoved(daemon, job)
    moves.run(moves.endpoints(nodes), 1, job, until=3)
    for endpoints in ([nodes[0].shm], [nodes[0].shm, daemon.shm]):
        kind, text = _refused(endpoints, 1, job)
        assert kind == "FailedPreconditionError"
        assert 'of parameters "0.weight", "0.bias"' in text and "elements are missing" in text
        assert "those of part 2 have no ranks here" in text and "they go on from step 3" in text
        assert "of step 3 or before" in text
    begun, *found = moves.run(moves.endpoints(nodes), 1, job)
    assert begun == 3 and tuple(found) == expected


def test_a_parameter_that_the_script_lacks(nodes, job):
    moves.run([nodes[0].shm], 2, job, until=2)
    for kind, text in ranks.run(_lacks, 2, moves.endpoints(nodes), job):
        assert kind == "FailedPreconditionError"
        assert 'the script lacks its parameters "3.weight", "3.bias"' in text
    assert moves.jobs(nodes) == [[job], []]


def _lacks(connection, rank, endpoints, job):
    endpoint = on_nodes.enter(rank, endpoints, 1)
    parameters = list(sharded.fsdp(sharded.make_model()).named_parameters())[:-2]
    try:
        optstate.AdamW(parameters, job=job, endpoint=endpoint, across_nodes="sharded")
    except optstate.OptstateError as error:
        return type(error).__name__, str(error)
    return None


def test_state_of_8_bits_that_would_be_cut_within_blocks(nodes, job):
    """The error names the parameters, and where the job can go on."""
    kwargs = {"state_dtype": "dynamic8"}
    moves.run([nodes[0].shm], 2, job, until=2, **kwargs)
    for endpoints, per_node in ((moves.endpoints(nodes), 2), ([nodes[1].shm, nodes[0].shm], 2)):
        kind, text = _refused(endpoints, per_node, job, **kwargs)
        assert kind == "UnimplementedError" and 'state_dtype="dynamic8"' in text
        assert '"0.weight"' in text and "[4, 8] at [0, 0] of [7, 8] before" in text
        assert "multiples of 256 elements" in text and "delete the job" in text
        assert sorted(map(len, moves.jobs(nodes))) == [0, 1]
    assert moves.run(moves.endpoints(nodes), 1, job, until=3, **kwargs)[0] == 2


def test_a_durable_job_does_not_stop_being_durable_unasked(tmp_path, job):
    daemon = start_daemon_with_disks(tmp_path, "disk")
    try:
        moves.run([daemon.shm], 1, job, until=2, durability="step")
        kind, text = _refused([daemon.shm], 2, job)
        assert kind == "FailedPreconditionError" and "say durability= again" in text
        assert moves.run([daemon.shm], 1, job, until=3)[0] == 2
        assert moves.run([daemon.shm], 2, job, until=4, durability="step")[0] == 3
    finally:
        daemon.stop()


def test_state_on_disk_does_not_leave_it_unasked(tmp_path, job):
    daemon = start_daemon_with_disks(tmp_path, "disk")
    try:
        expected = moves.unmoved(daemon, job)
        moves.run([daemon.shm], 1, job, until=3, placement="nvme")
        kind, text = _refused([daemon.shm], 2, job)
        assert kind == "FailedPreconditionError" and 'placement="nvme"' in text
        begun, *found = moves.run([daemon.shm], 2, job, placement="nvme")
        assert begun == 3 and tuple(found) == expected
        assert daemon.optctl("describe", "job", job)["storage"]["placement"] == "PLACEMENT_NVME"
    finally:
        daemon.stop()


# A job of one node that another client has made beside parcels.


def _made_by_another(connection, rank, endpoint, job, loads):
    """Makes a job of the model's parameters, which no mover did, and loads it."""
    parameters = list(small_model().named_parameters())
    optimizer = optstate.AdamW(parameters, job=f"{job}-like", endpoint=endpoint)
    spec = optimizer._served.attachment.spec
    optimizer.close()
    session = Session.open(dataclasses.replace(spec, job=job))
    if loads:
        arrays = ArrayTransfer(session, spec.parameters)
        session.begin_load()
        for index, (_, parameter) in enumerate(parameters):
            arrays.load_array(_native.MASTER, index, torch.full_like(parameter, 7.0))
        arrays.flush_loads()
        session.finish_load()
    session.close()


def _delete(node, job):
    """Deletes a job there whose ranks may just have ended."""
    address = SessionSpec(job=job, optimizer=0, group_options=[], parameters=[], endpoint=node.shm)
    delete_left(address, job)


def _leave(connection, rank, endpoints, job):
    model, optimizer = moves.make(rank, endpoints, 1, job, "zero", "AdamW", {})
    for step in range(3):
        moves.take_step(model, optimizer, "zero", "AdamW", step)
    assert optimizer.hand_over(leaves=rank == 1)


@pytest.mark.parametrize("loads", [False, True], ids=["empty", "loaded"])
def test_a_job_that_another_client_made_beside_a_parcel(loads, nodes, daemon, job):
    """It is kept, and the error names both; one that has nothing makes no difference."""
    expected = moves.unmoved(daemon, job, "zero")
    node = nodes[0]
    ranks.run(_leave, 2, moves.endpoints(nodes), job)
    # All is in one parcel, and the job is not there yet.
    moves.kill_while_moving([node.shm], 2, job, moves.Stop("begin", 2, rank=0), "zero")
    _delete(node, job)
    ranks.run(_made_by_another, 1, node.shm, job, loads)
    _delete(node, f"{job}-like")
    if loads:
        [parcel] = [each for each in node.jobs() if each.endswith("1of1")]
        found = ranks.run(_said_of_whole, 2, node.shm, job)
        for kind, text in found:
            assert kind == "FailedPreconditionError" and "nothing says" in text
            assert f"optctl delete job {job}, on node0 alone" in text and f'"{parcel}"' in text
        assert job in node.jobs() and parcel in node.jobs()
        _delete(node, job)
    begun, *after = moves.run([node.shm], 2, job, "zero")
    assert begun == 3 and tuple(after) == expected
    assert node.jobs() == [job]


def _said_of_whole(connection, rank, endpoint, job):
    try:
        moves.make(rank, [endpoint], 2, job, "zero", "AdamW", {})[1].close()
    except Exception as error:
        return type(error).__name__, str(error)
    return None
