"""State of sharded jobs that cannot move to other nodes or ranks."""

from __future__ import annotations

import nodes as on_nodes
import nodes_moves as moves
import optstate
import ranks
import sharded
from daemon import start_daemon_with_disks
from training import loss_of, small_model

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


def test_state_of_8_bits(nodes, job):
    kwargs = {"state_dtype": "dynamic8"}
    moves.run([nodes[0].shm], 2, job, until=2, **kwargs)
    kind, text = _refused(moves.endpoints(nodes), 1, job, **kwargs)
    assert kind == "UnimplementedError" and 'state_dtype="dynamic8"' in text
    assert moves.jobs(nodes) == [[job], []]
    assert moves.run([nodes[0].shm], 2, job, until=3, **kwargs)[0] == 2


def test_durable_steps(tmp_path, job):
    daemon = start_daemon_with_disks(tmp_path, "disk")
    try:
        moves.run([daemon.shm], 1, job, until=2, durability="step")
        kind, text = _refused([daemon.shm], 2, job)
        assert kind == "UnimplementedError" and "durability=" in text
        assert moves.run([daemon.shm], 1, job, until=3)[0] == 2
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


def _in_group(connection, rank, endpoints, job, count, until):
    """Each job has half of the ranks, and all clip by one norm."""
    import torch.distributed as dist

    endpoint = on_nodes.enter(rank, endpoints, count // len(endpoints))
    halves = [list(range(0, count, 2)), list(range(1, count, 2))]
    groups = [dist.new_group(half) for half in halves]
    model = small_model()
    try:
        optimizer = optstate.AdamW(
            model[0].parameters() if rank % 2 else model[3].parameters(),
            job=f"{job}-{rank % 2}",
            endpoint=endpoint,
            process_group=groups[rank % 2],
            norm_group=dist.group.WORLD,
            across_nodes="sharded",
            max_norm=1.0,
        )
    except optstate.OptstateError as error:
        return type(error).__name__, str(error)
    for step in range(until):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    optimizer.close()
    return None


def test_jobs_that_clip_by_one_norm(nodes, job):
    assert ranks.run(_in_group, 2, [nodes[0].shm], job, 2, 2) == [None] * 2
    for kind, text in ranks.run(_in_group, 4, moves.endpoints(nodes), job, 4, 0):
        assert kind == "UnimplementedError" and "norm_group=" in text
    assert moves.jobs(nodes) == [[f"{job}-0", f"{job}-1"], []]
    assert ranks.run(_in_group, 2, [nodes[0].shm], job, 2, 1) == [None] * 2
