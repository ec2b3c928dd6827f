"""Jobs of a norm_group, one on each node, whose ranks start on other nodes than before."""

from __future__ import annotations

import os

import nodes as on_nodes
import optstate
import pytest
import ranks
import torch
import torch.distributed as dist

nodes = on_nodes.nodes


def _train(connection, rank, endpoints, places, job, stages, options, until):
    """Trains the job of this rank's stage on node places[rank]; returns the step at which it
    began, or the error.

    stages: of each rank.
    """
    os.environ["OPTSTATE_NODE"] = f"node{places[rank]}"
    of_each = [[r for r, each in enumerate(stages) if each == stage] for stage in sorted({*stages})]
    groups = [dist.new_group(of_stage) for of_stage in of_each]
    torch.manual_seed(stages[rank])
    weight = torch.nn.Parameter(torch.randn(7))
    try:
        optimizer = optstate.AdamW(
            [("weight", weight)],
            lr=0.01,
            max_norm=0.1,
            job=f"{job}-{stages[rank]}",
            endpoint=endpoints[places[rank]],
            process_group=groups[stages[rank]],
            norm_group=dist.group.WORLD,
            **options,
        )
    except optstate.FailedPreconditionError as error:
        return str(error)
    begun = optimizer.committed_step
    for _ in range(begun, until):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    optimizer.close()
    return begun


def _run(nodes, places, job, stages, until, **options):
    endpoints = [each.shm for each in nodes]
    return ranks.run(_train, len(places), endpoints, places, job, stages, options, until)


def _jobs(nodes):
    return [sorted(each.jobs()) for each in nodes]


@pytest.mark.parametrize("stages", [(0, 1), (0, 0, 1, 1)])
def test_swapped_places_are_refused_and_nothing_is_made(stages, nodes, job):
    """First begun where there is no such job at all; afterwards all go on where they were."""
    swapped = [1 - stage for stage in stages]
    assert _run(nodes, stages, job, stages, 3) == [0] * len(stages)
    for said in _run(nodes, swapped, job, stages, 5):
        for stage in range(2):
            assert f'job "{job}-{stage}" lies on node node{stage} at step 3' in said
            assert f"its ranks are on node{1 - stage} now" in said
        assert f"on node0: optctl delete job {job}-0" in said and "--node-rank" in said
    assert _jobs(nodes) == [[f"{job}-0"], [f"{job}-1"]]
    assert _run(nodes, stages, job, stages, 5) == [3] * len(stages)


def test_one_of_the_jobs_is_on_another_node(nodes, job):
    """The others have a step already, so that a new job could not go on with them either way."""
    stages = (0, 1, 2)
    _run(nodes, (0, 0, 1), job, stages, 2)
    for said in _run(nodes, (0, 1, 1), job, stages, 3):
        assert f'job "{job}-1" lies on node node0 at step 2' in said
        assert f"{job}-0" not in said and f"{job}-2" not in said
    # Nobody is on node1 to say what its daemon has.
    for said in _run(nodes, (0, 0, 0), job, stages, 3):
        assert f'job "{job}-2" on node0: no such job' in said
    assert _jobs(nodes) == [[f"{job}-0", f"{job}-1"], [f"{job}-2"]]


def test_jobs_that_were_deleted_begin_anew_anywhere(nodes, job):
    _run(nodes, (0, 1), job, (0, 1), 2)
    for stage, node in enumerate(nodes):
        node.run_optctl("delete", "job", f"{job}-{stage}")
    assert _run(nodes, (1, 0), job, (0, 1), 3) == [0, 0]
    assert _jobs(nodes) == [[f"{job}-1"], [f"{job}-0"]]


@pytest.mark.parametrize("nodes", [4], indirect=True)
def test_replicas_that_are_all_elsewhere(nodes, job):
    """A replica on one of the job's nodes is copied to the other; on none of them it is lost."""
    across = {"across_nodes": "replicated"}
    stages = (0, 0, 1, 1)
    assert _run(nodes, (0, 1, 2, 3), job, stages, 2, **across) == [0] * 4
    for said in _run(nodes, (2, 3, 0, 1), job, stages, 3, **across):
        assert f'job "{job}-0" lies on node node0 at step 2' in said
        assert f'job "{job}-1" lies on node node2 at step 2' in said
    nodes[1].run_optctl("delete", "job", f"{job}-0")
    assert _run(nodes, (0, 1, 2, 3), job, stages, 3, **across) == [2] * 4


def test_shards_whose_nodes_are_all_others(nodes, job):
    """Shards move among the nodes of their ranks, and are not looked for on others."""
    across = {"across_nodes": "sharded"}
    _run(nodes, (0, 1), job, (0, 1), 2, **across)
    for said in _run(nodes, (1, 0), job, (0, 1), 3, **across):
        assert f'job "{job}-0" lies on node node0 at step 2' in said
    assert _run(nodes, (0, 1), job, (0, 1), 3, **across) == [2, 2]
