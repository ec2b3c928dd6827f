"""Sharding that cannot be had on top of the daemon: an error says so."""

from __future__ import annotations

import optstate
import pytest
import ranks
import torch
from training import small_model, train


def test_another_layout_says_how_to_begin_anew(job):
    optstate.AdamW(small_model().parameters(), job=job).close()
    with pytest.raises(optstate.FailedPreconditionError) as raised:
        optstate.AdamW([torch.nn.Parameter(torch.ones(3))], job=job)
    assert f"optctl delete job {job}" in str(raised.value)
    assert "another name" in str(raised.value)


def _dtensors(connection, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    parameters = optimizer.param_groups[0]["params"]
    # As Accelerate does.
    parameters[:] = [torch.nn.Parameter(distribute_tensor(each.data, mesh)) for each in parameters]
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return str(raised.value)


def test_dtensors_after_construction(daemon):
    said = ranks.run(_dtensors, 1)[0]
    assert "DTensors after construction" in said and "shard the model first" in said
    assert "add_param_group" not in said


def test_flattened_parameters():
    """DeepSpeed's ZeRO puts one flat tensor into each group."""
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    group = optimizer.param_groups[0]
    flat = torch.cat([each.detach().flatten() for each in group["params"]])
    group["params"] = [torch.nn.Parameter(flat)]
    with pytest.raises(RuntimeError, match="DeepSpeed"):
        optimizer.step()


def test_a_parameter_that_was_appended():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(RuntimeError, match="add_param_group"):
        train(model, optimizer, range(1))


def _zero_redundancy(connection, rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    # Parts that look alike: each rank would train its own as if it were the other's.
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="ZeroRedundancyOptimizer gives each rank a part"):
        ZeroRedundancyOptimizer(parameters, optstate.AdamW, lr=0.1)
    return True


def test_zero_redundancy_optimizer(daemon):
    assert ranks.run(_zero_redundancy, 2) == [True, True]
