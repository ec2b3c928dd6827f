"""Parameters that several nodes add to a job have the same values on all of them."""

from __future__ import annotations

import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from nodes import enter
from nodes import nodes as nodes
from training import bits, loss_of, small_model


def _step(model, optimizer, step, rank):
    model.zero_grad()
    loss_of(model, 2 * step + rank).backward()
    optimizer.step()


def _adds(connection, rank, endpoints, job, how, kwargs):
    model = small_model()
    first, added = list(model[0].named_parameters("0")), list(model[3].named_parameters("3"))
    for _, parameter in added:
        parameter.requires_grad_(False)
    optimizer = optstate.AdamW(
        [*first, *added] if how == "thaw" else first,
        lr=0.01,
        job=job,
        endpoint=enter(rank, endpoints, 1),
        reduction="collective",
        **kwargs,
    )
    _step(model, optimizer, 0, rank)
    for _, parameter in added:
        parameter.requires_grad_(True)
    with torch.no_grad():
        model[3].bias.add_(rank)

    def extend():
        if how == "thaw":
            _step(model, optimizer, 1, rank)
        else:
            optimizer.add_param_group({"params": added, "lr": 0.02})

    with pytest.raises(ValueError, match="other values on other ranks") as raised:
        extend()
    assert '"3.bias"' in str(raised.value) and "job is as it was" in str(raised.value)
    assert optimizer.committed_step == 1 and len(optimizer.param_groups) == 1
    if how == "add":
        _step(model, optimizer, 1, rank)
    dist.broadcast(model[3].bias.data, src=0)
    extend()
    before = bits([parameter for _, parameter in added])
    for step in range(optimizer.committed_step, 4):
        _step(model, optimizer, step, rank)
    assert not set(before) & set(bits([parameter for _, parameter in added]))
    optimizer.close()
    return bits(model.parameters())


HOWS = {
    "shared out": ("add", {"across_nodes": "sharded"}),
    "cut": ("add", {"across_nodes": "sharded", "partition": "contiguous"}),
    "thawed": ("thaw", {"across_nodes": "sharded"}),
    "replicated": ("add", {"across_nodes": "replicated"}),
}


@pytest.mark.parametrize("how", HOWS)
def test_added_parameters_are_compared(how, nodes, job):
    one, other = ranks.run(_adds, 2, [each.shm for each in nodes], job, *HOWS[how])
    assert one == other
