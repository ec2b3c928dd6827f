"""norm_group= with stages that are sharded by fully_shard, and with ranks of two jobs."""

from __future__ import annotations

import nodes as on_nodes
import optstate
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from training import loss_of, small_model

STEPS = 5
# The layers of small_model() that each stage has.
STAGES = ((0,), (2, 3))
nodes = on_nodes.nodes


def _sharded_stages(connection, rank, endpoints, per_node, job):
    """Each stage is sharded over two ranks; returns whole parameters and outcomes."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    endpoint = on_nodes.enter(rank, endpoints, per_node)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("stage", "shard"))["shard"]
    stage, model = rank // 2, small_model()
    for layer in STAGES[stage]:
        fully_shard(model[layer], mesh=mesh)
    optimizer = optstate.AdamW(
        [each for layer in STAGES[stage] for each in model[layer].named_parameters(f"{layer}")],
        lr=0.01,
        job=f"{job}-{stage}",
        endpoint=endpoint,
        process_group=mesh.get_group(),
        norm_group=dist.group.WORLD,
        across_nodes="sharded" if len(endpoints) > 1 else None,
        max_norm=0.05,
    )
    outcomes, found = [], []
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        last = optimizer.last_outcome
        outcomes.append((last.gradient_norm, last.clip_coefficient, last.applied))
        found = []
        for number, layers in enumerate(STAGES):
            for layer in layers:
                for parameter in model[layer].parameters():
                    mine = number == stage
                    values = sharded.whole(parameter) if mine else parameter.detach().clone()
                    dist.broadcast(values, 2 * number)
                    if not mine:
                        parameter.data.copy_(values)
                    found.append(values)
    optimizer.close()
    return [each.numpy() for each in found], outcomes


@pytest.mark.parametrize("nodes", [1, 2], indirect=True)
def test_stages_that_are_sharded(nodes, job):
    """On one node, and on two of which each has a stage."""
    model = small_model()
    reference = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        reference.zero_grad()
        loss_of(model, step).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        reference.step()
    found = ranks.run(_sharded_stages, 4, [each.shm for each in nodes], 4 // len(nodes), job)
    assert len({repr(outcomes) for _, outcomes in found}) == 1
    for values, outcomes in found:
        assert [norm for norm, *_ in outcomes] == pytest.approx(norms, rel=1e-5)
        assert min(coefficient for _, coefficient, _ in outcomes) < 1
        for one, expected in zip(values, model.parameters()):
            sharded.assert_close([torch.from_numpy(one)], [expected.detach()])


def _in_two_groups(connection, rank, endpoint):
    groups = dist.new_group([0, 1]), dist.new_group([1, 2])
    with pytest.raises(ValueError) as raised:
        optstate.AdamW(
            small_model().parameters(),
            endpoint=endpoint,
            process_group=groups[rank > 0],
            norm_group=dist.group.WORLD,
        )
    return str(raised.value)


def test_a_rank_in_two_jobs(daemon):
    for said in ranks.run(_in_two_groups, 3, daemon.shm):
        assert "rank 1 is in the process_group of" in said
        assert "ranks of their own" in said
