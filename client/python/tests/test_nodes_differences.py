"""Ranks that prepare other steps than each other are told in which way they differ."""

from __future__ import annotations

import nodes as on_nodes
import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from training import loss_of, small_model

nodes = on_nodes.nodes


def _change(optimizer, model, what):
    [group] = optimizer.param_groups
    if what == "lr":
        group["lr"] = 0.5
    elif what == "betas":
        group["betas"] = (0.9, 0.5)
    elif what == "group norm":
        group["max_norm"] = 0.25
    elif what == "max_norm":
        optimizer.max_norm = 0.25
    elif what == "gradients":
        model[0].weight.grad.mul_(2)
    elif what == "values":
        model[0].weight.data[0, 0] = 7


def _differs(connection, rank, endpoints, per_node, job, what, across):
    """Returns the error of a step in which the second node differs; then all take the step."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    model = small_model()
    optimizer = optstate.AdamW(
        model.named_parameters(), lr=0.01, job=job, endpoint=endpoint, across_nodes=across
    )
    loss_of(model, 0).backward()
    if rank // per_node == 1:
        _change(optimizer, model, what)
    with pytest.raises(optstate.FailedPreconditionError) as raised:
        optimizer.step()
    if what not in ("values", "gradients"):
        for each in range(2):
            optimizer.param_groups[0].update(lr=0.01, betas=(0.9, 0.5), max_norm=0.0)
            optimizer.max_norm = None
            optimizer.step()
            assert optimizer.committed_step == each + 1
    optimizer.close()
    return str(raised.value)


NAMED = [
    ("lr", "another lr of param_groups[0]", "0.01 on rank 0 (node0), 0.5 on rank 2 (node1)"),
    ("betas", "another betas.1 of param_groups[0]", "0.999 on rank 0 (node0), 0.5 on rank 2"),
    ("max_norm", "another max_norm than", "none on rank 0 (node0), 0.25 on rank 2 (node1)"),
]
NOT_SHARED_OUT = [
    ("group norm", "another max_norm of param_groups[0]", "none on rank 0 (node0), 0.25 on"),
    ("gradients", "gradients differ on rank 0 (node0) and on rank 2", "DistributedDataParallel"),
    ("values", "what was loaded since", "Load equal state on all nodes"),
]


@pytest.mark.parametrize(
    ("across", "what", "named", "values"),
    [("replicated", *each) for each in NAMED + NOT_SHARED_OUT]
    + [("sharded", *each) for each in NAMED],
)
def test_what_nodes_differ_in_is_named(across, what, named, values, nodes, job):
    for said in ranks.run(_differs, 4, [each.shm for each in nodes], 2, job, what, across):
        assert "prepared different steps (node0: step 1, digest" in said
        assert named in said and values in said, said
        assert ("DistributedDataParallel" in said) == (what == "gradients")


def _stage(connection, rank, endpoint, job, what):
    groups = [dist.new_group([each]) for each in range(2)]
    weight = torch.nn.Parameter(torch.ones(5 + rank))
    optimizer = optstate.AdamW(
        [("weight", weight)],
        lr=0.01 * (1 + rank),  # which each stage has of its own
        job=f"{job}-{rank}",
        endpoint=endpoint,
        max_norm=0.1 + rank if what == "max_norm" else 0.1,
        norm_type=1 + rank if what == "norm_type" else 2,
        process_group=groups[rank],
        norm_group=dist.group.WORLD,
    )
    weight.grad = torch.ones_like(weight)
    with pytest.raises(optstate.FailedPreconditionError) as raised:
        optimizer.step()
    optimizer.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "values"), [("max_norm", ("0.1", "1.1")), ("norm_type", ("1.0", "2.0"))]
)
def test_stages_have_no_gradients_to_average(what, values, daemon, job):
    for said in ranks.run(_stage, 2, daemon.shm, job, what):
        assert f"jobs of norm_group have another {what} than each other: {values[0]} on" in said
        assert f'{values[1]} on rank 1 (job "{job}-1"' in said
        assert "DistributedDataParallel" not in said and "gradients" not in said
