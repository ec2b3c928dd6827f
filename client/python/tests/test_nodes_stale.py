"""Nodes that were away while others took steps of a replicated job (stale_nodes=)."""

from __future__ import annotations

import nodes as on_nodes
import optstate
import pytest
import ranks
from training import bits, loss_of, small_model

nodes = on_nodes.nodes


def _make(rank, endpoints, per_node, job, **kwargs):
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    model = small_model()
    kwargs = {"lr": 0.01, "across_nodes": "replicated", **kwargs}
    parameters = model.named_parameters()
    return model, optstate.AdamW(parameters, job=job, endpoint=endpoint, **kwargs)


def _replaces(connection, rank, endpoints, job, until, per_node=1):
    model, optimizer = _make(rank, endpoints, per_node, job, stale_nodes="replace", max_norm=0.1)
    begun = optimizer.committed_step
    for step in range(begun, until):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    state = [
        value for entry in optimizer.state_dict()["state"].values() for value in entry.values()
    ]
    result = begun, bits(model.parameters()), bits(state)
    optimizer.close()
    return result


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_a_node_that_was_away_gets_the_job_of_the_others(nodes, daemon, job):
    """With stale_nodes="replace". It is refused while the others differ too."""
    endpoints = [each.shm for each in nodes]
    expected = ranks.run(_replaces, 3, [daemon.shm], f"{job}-there", 9, 3)
    assert ranks.run(_replaces, 3, endpoints, job, 2)[0][0] == 0
    ranks.run(_replaces, 2, endpoints[:2], job, 4)  # the third one was away
    ranks.run(_replaces, 1, endpoints[:1], job, 7)  # and so was the second
    found = ranks.run(_replaces, 3, endpoints, job, 9)
    assert [begun for begun, *_ in found] == [7, 7, 7]
    assert [each[1:] for each in found] == [each[1:] for each in expected]
    # A run of another history that has as many steps: nobody knows which is right.
    for node in nodes[1:]:
        node.run_optctl("delete", "job", job)
    ranks.run(_replaces, 1, endpoints[1:2], job, 9)
    ranks.run(_replaces, 1, endpoints[2:], job, 3)
    for said in ranks.run(_refused_replacement, 3, endpoints, job):
        assert "not at one step" in said and "node2: step 3" in said
    assert [int(each.optctl("describe", "job", job)["committed_step"]) for each in nodes] == [
        9,
        9,
        3,
    ]


def _refused_replacement(connection, rank, endpoints, job):
    with pytest.raises(optstate.FailedPreconditionError) as raised:
        _replaces(connection, rank, endpoints, job, 10)
    return str(raised.value)


def _other_keyword(connection, rank, endpoints, job):
    with pytest.raises(ValueError, match="stale_nodes") as raised:
        _make(rank, endpoints, 1, job, stale_nodes=("refuse", "replace")[rank])
    with pytest.raises(ValueError, match='needs across_nodes="replicated"'):
        optstate.AdamW(small_model().parameters(), across_nodes="sharded", stale_nodes="replace")
    return str(raised.value)


def test_all_ranks_say_what_becomes_of_nodes_that_were_away(nodes, job):
    for said in ranks.run(_other_keyword, 2, [each.shm for each in nodes], job):
        assert "rank 1 has stale_nodes='replace'" in said
    assert nodes[0].jobs() == nodes[1].jobs() == []
