"""Meshes of more than one dimension: HSDP, tensor parallelism, and FSDP2 over it."""

from __future__ import annotations

import optstate
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from sharded import assert_close, assert_states_close, wholes

STEPS = 6


def _mesh(shape, names):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Feedforward(torch.nn.Module):
    """Two layers to be split. The norm is not split at all."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, hidden)
        self.down = torch.nn.Linear(hidden, 1)
        self.norm = torch.nn.LayerNorm(8)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(inputs))))


def _tensor_parallel(mesh, hidden=6):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Feedforward(hidden), mesh, plan)


def _compare(models, endpoint, batch_of, **kwargs):
    optimizer = optstate.AdamW(models[0].named_parameters(), lr=0.01, endpoint=endpoint, **kwargs)
    reference = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    for step in range(STEPS):
        for model, each in zip(models, (optimizer, reference)):
            each.zero_grad()
            sharded.loss_of(model, batch_of(step)).backward()
            each.step()
    assert_close(wholes(models[0]), wholes(models[1]))
    assert_states_close(*map(sharded.whole_state, (optimizer, reference)))
    for one, other in zip(
        optimizer.state_dict()["state"].values(), reference.state_dict()["state"].values()
    ):
        for key, value in other.items():
            assert type(one[key]) is type(value)
            if key != "step":
                assert one[key].shape == value.shape and one[key].stride() == value.stride()
            if hasattr(value, "placements"):
                assert one[key].placements == value.placements
                assert one[key].device_mesh == value.device_mesh
    return optimizer


def _hybrid(connection, rank, endpoint, job):
    mesh = _mesh((2, 2), ("replicate", "shard"))
    models = [sharded.fsdp(sharded.make_model(), mesh) for _ in range(2)]
    optimizer = _compare(models, endpoint, lambda step: 4 * step + rank, job=job)
    return optimizer.last_outcome.gradient_norm


def test_hybrid_sharding(daemon, job):
    """The lowest rank that holds a shard owns it; its replica reads the new values."""
    norms = ranks.run(_hybrid, 4, daemon.shm, job)
    assert len(set(norms)) == 1
    owners = [each["shard"].get("owner", 0) for each in daemon.parameters(job)]
    assert owners == [0, 1] * 6


def _two_dimensions(connection, rank, endpoint):
    tensor_parallel = _tensor_parallel(_mesh((2,), ("tp",)))
    assert tensor_parallel.down.weight.to_local().shape == (1, 3)
    other = _tensor_parallel(_mesh((2,), ("tp",)))
    optimizer = _compare([tensor_parallel, other], endpoint, lambda step: step)
    facts = {each.name: each.shard for each in optimizer._served.attachment._spec.parameters}
    return {name: (shard.owner, tuple(shard.offset)) for name, shard in facts.items()}


def test_tensor_parallel(daemon):
    """Shard(0), Shard(1), Replicate, and parameters that are no DTensors, which rank 0 owns."""
    facts = ranks.run(_two_dimensions, 2, daemon.shm)[1]
    assert facts["up.weight"] == (1, (3, 0))
    assert facts["down.weight"] == (1, (0, 3))
    assert facts["down.bias"] == facts["norm.weight"][:1] + ((0,),) == (0, (0,))


def _fsdp_over_tensor_parallel(connection, rank, endpoint, hidden):
    mesh = _mesh((2, 2), ("dp", "tp"))

    def make():
        from torch.distributed.fsdp import fully_shard

        model = _tensor_parallel(mesh["tp"], hidden)
        fully_shard(model, mesh=mesh["dp"])
        return model

    models = [make(), make()]
    offsets = sorted(
        tuple(each.shard.offset)
        for each in _compare(
            models, endpoint, lambda step: 2 * step + rank // 2
        )._served.attachment._spec.parameters
        if each.name == "up.weight"
    )
    assert dist.get_world_size() == 4
    return offsets


def test_fsdp2_over_tensor_parallel(daemon):
    """_StridedShard: torch splits for tensor parallelism first."""
    offsets = ranks.run(_fsdp_over_tensor_parallel, 4, daemon.shm, 8)
    assert offsets == [[(0, 0), (2, 0), (4, 0), (6, 0)]] * 4


def _several_groups(connection, rank, endpoint, job):
    """Two jobs on one node: tensor parallelism within each half of the ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = _mesh((2, 2), ("dp", "tp"))
    models = [_tensor_parallel(mesh["tp"]) for _ in range(2)]
    half = rank // 2
    _compare(
        models,
        endpoint,
        lambda step: 2 * step + half,
        job=f"{job}-{half}",
        process_group=groups[half],
    )


def test_groups_of_ranks_have_jobs_of_their_own(daemon, job):
    ranks.run(_several_groups, 4, daemon.shm, job)


def _by_name(connection, rank, endpoint, partition):
    model = Feedforward(6)
    with pytest.raises(ValueError, match="leave out|leave reduction out|no meaning"):
        optstate.AdamW(
            model.parameters(), endpoint=endpoint, partition=partition, reduction="daemon"
        )
    models = [model, Feedforward(6)]
    optimizer = _compare(models, endpoint, lambda step: step, partition=partition)
    return {each.shard.owner for each in optimizer._served.attachment._spec.parameters}


def test_partition_local_by_name(daemon):
    """Rank 0 owns all tensors that are not sharded."""
    assert ranks.run(_by_name, 2, daemon.shm, "local") == [{0}, {0}]
