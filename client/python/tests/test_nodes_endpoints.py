"""Ranks of one node that name different daemons, and nodes that name one."""

from __future__ import annotations

import os

import nodes as on_nodes
import optstate
import pytest
import ranks
from training import small_model

nodes = on_nodes.nodes


def _construct(connection, rank, job, endpoints, names, by_environment, across):
    """Returns the error, or the daemon that the rank has.

    endpoints, names: of the daemon and the node, by rank; None: not given.
    """
    for variable, value in (
        ("OPTSTATE_NODE", names[rank]),
        ("OPTSTATE_ENDPOINT", endpoints[rank] if by_environment else None),
    ):
        os.environ.pop(variable, None)
        if value is not None:
            os.environ[variable] = value
    try:
        optimizer = optstate.AdamW(
            small_model().named_parameters(),
            job=job,
            endpoint=None if by_environment else endpoints[rank],
            across_nodes=across,
        )
    except optstate.FailedPreconditionError as error:
        return str(error)
    endpoint = optimizer._served.attachment.session.endpoint
    optimizer.close()
    return endpoint


def _run(job, endpoints, names=(None, None), *, by_environment=False, across=None):
    return ranks.run(_construct, 2, job, endpoints, names, by_environment, across)


@pytest.mark.parametrize("by_environment", [False, True])
def test_other_endpoints_on_one_machine_are_refused(by_environment, nodes, job):
    """They were passed over in silence: all ranks had the first one's daemon."""
    endpoints = [each.shm for each in nodes]
    for said in _run(job, endpoints, by_environment=by_environment):
        assert all(f'"{each}" on rank {rank}' in said for rank, each in enumerate(endpoints))
        assert "$OPTSTATE_NODE" in said
    assert [each.jobs() for each in nodes] == [[], []]
    # With names they are two nodes.
    found = _run(job, endpoints, ("a", "b"), by_environment=by_environment, across="replicated")
    assert found == endpoints


def test_one_daemon_by_several_names(daemon, job, tmp_path):
    """Other wires and paths of one daemon, and ranks that name none."""
    link = tmp_path / "link.sock"
    link.symlink_to(daemon.socket)
    for other in (daemon.grpc_unix, f"unix:{link}", None):
        assert _run(job, [daemon.shm, other]) == [daemon.shm] * 2


@pytest.mark.parametrize("by_environment", [False, True])
def test_nodes_that_share_a_daemon_are_refused(by_environment, daemon, job):
    """Nothing is made of the job."""
    for other in (daemon.shm, daemon.grpc_unix):
        endpoints = [daemon.shm, other]
        found = _run(job, endpoints, ("a", "b"), by_environment=by_environment, across="replicated")
        for said in found:
            assert "nodes a and b share one daemon" in said
            assert "optstated --socket" in said and "$OPTSTATE_ENDPOINT" in said
    assert job not in daemon.jobs()


def test_nodes_that_both_find_the_machines_daemon(nodes, job, tmp_path):
    """Without any endpoint."""
    (tmp_path / "optstate").mkdir()
    (tmp_path / "optstate" / "optstated.sock").symlink_to(nodes[0].socket)
    for said in ranks.run(
        _in_folder, 2, str(tmp_path), job, [None, None], ("a", "b"), False, "replicated"
    ):
        assert "nodes a and b share one daemon (the machine's" in said


def _in_folder(connection, rank, folder, *args):
    os.environ["XDG_RUNTIME_DIR"] = folder
    return _construct(connection, rank, *args)
