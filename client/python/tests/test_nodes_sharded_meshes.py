"""Meshes over several nodes, and checkpoints of sharded jobs that go to other numbers of nodes."""

from __future__ import annotations

import nodes as on_nodes
import optstate
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded import assert_close, assert_states_close, wholes
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from training import bits

STEPS = 4
nodes = on_nodes.nodes


def _mesh(order):
    """A mesh of (replicate, shard) with the ranks in this order."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", order, mesh_dim_names=("replicate", "shard"))


def _hybrid(connection, rank, endpoints, job, order, kwargs):
    """HSDP beside torch's class. Returns bits, the norm, and what the nodes compare."""
    endpoint = on_nodes.enter(rank, endpoints, 4 // len(endpoints))
    models = [sharded.fsdp(sharded.make_model(), _mesh(order)) for _ in range(2)]
    optimizer = optstate.AdamW(
        models[0].parameters(),
        lr=0.01,
        model=models[0],
        endpoint=endpoint,
        job=job,
        across_nodes="sharded",
        **kwargs,
    )
    reference = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    for step in range(optimizer.committed_step, STEPS):
        for model, each in zip(models, (optimizer, reference)):
            each.zero_grad()
            sharded.loss_of(model, 4 * step + rank).backward()
            if kwargs and each is reference:
                torch.nn.utils.clip_grad_norm_(model.parameters(), kwargs["max_norm"])
            each.step()
    assert_close(wholes(models[0]), wholes(models[1]))
    assert_states_close(*map(sharded.whole_state, (optimizer, reference)))
    found = bits(wholes(models[0])), optimizer.last_outcome.gradient_norm
    nodes = optimizer._served.attachment.nodes
    return found, None if nodes is None else nodes._kinds


ACROSS = [[0, 1], [2, 3]]  # replicas are nodes, each of which holds all
WITHIN = [[0, 2], [1, 3]]  # shards are nodes', and each has replicas within


@pytest.mark.parametrize(
    ("order", "kinds", "kwargs"),
    [(ACROSS, [0, 0], {"max_norm": 0.05}), (WITHIN, [0, 1], {})],
)
def test_hybrid_sharding(order, kinds, kwargs, nodes, daemon, job):
    """Nodes that hold the same shards compare them, and clip; their norm counts once."""
    one = ranks.run(_hybrid, 4, [daemon.shm], job, order, kwargs)
    two = ranks.run(_hybrid, 4, [each.shm for each in nodes], job, order, kwargs)
    for (found, norm), of_nodes in two:
        assert found == one[0][0][0] and norm == pytest.approx(one[0][0][1], rel=1e-12)
        assert of_nodes == kinds


def _replicas_that_part(connection, rank, endpoints, job):
    endpoint = on_nodes.enter(rank, endpoints, 2)
    model = sharded.fsdp(sharded.make_model(), _mesh(ACROSS))
    optimizer = optstate.AdamW(
        model.parameters(), lr=0.01, model=model, endpoint=endpoint, job=job, across_nodes="sharded"
    )
    said = []
    for step in range(3):
        optimizer.zero_grad()
        sharded.loss_of(model, 4 * step + rank).backward()
        if step == 1 and rank == 2:
            model[0].weight.grad.to_local().mul_(2)
        try:
            optimizer.step()
        except optstate.FailedPreconditionError as error:
            said.append((step, str(error)))
    return said, optimizer.committed_step, bits(wholes(model))


def test_replicas_stay_equal(nodes, job):
    results = ranks.run(_replicas_that_part, 4, [each.shm for each in nodes], job)
    for said, step, found in results:
        assert [at for at, _ in said] == [1] and "gradients" in said[0][1]
        assert step == 2 and found == results[0][2]


def _partly_shared(connection, rank, endpoints, job):
    """A DTensor that both nodes hold whole, beside shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    endpoint = on_nodes.enter(rank, endpoints, 1)
    model = sharded.fsdp(sharded.make_model())
    mesh = init_device_mesh("cpu", (2,))
    replica = torch.nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    pairs = [*model.named_parameters(), ("replica", replica)]
    try:
        optstate.AdamW(pairs, job=job, endpoint=endpoint, across_nodes="sharded")
    except optstate.UnimplementedError as error:
        return str(error)
    return ""


def test_nodes_that_share_some_shards(nodes, job):
    for said in ranks.run(_partly_shared, 2, [each.shm for each in nodes], job):
        assert 'a part of parameter "replica" lies on node0 and on node1' in said


def _beside_plain_ones(connection, rank, endpoints, job):
    """Parameters that fully_shard leaves out: the nodes share them out."""
    from torch.distributed.fsdp import fully_shard

    endpoint = on_nodes.enter(rank, endpoints, 1)
    models = [sharded.make_model(), sharded.make_model()]
    for model in models:
        fully_shard(model[0])
    optimizer = optstate.AdamW(
        models[0].parameters(),
        lr=0.01,
        model=models[0],
        endpoint=endpoint,
        job=job,
        across_nodes="sharded",
    )
    reference = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    for step in range(STEPS):
        for model, each in zip(models, (optimizer, reference)):
            each.zero_grad()
            sharded.loss_of(model, 2 * step + rank).backward()
            for plain in [*model[2].parameters(), *model[3].parameters()]:
                dist.all_reduce(plain.grad)
            each.step()
    assert_close(wholes(models[0]), wholes(models[1]))
    return bits(wholes(models[0]))


def test_plain_parameters_beside_shards(nodes, job):
    one, other = ranks.run(_beside_plain_ones, 2, [each.shm for each in nodes], job)
    assert one == other


def _make(rank, endpoints, job, kind):
    endpoint = on_nodes.enter(rank, endpoints, dist.get_world_size() // len(endpoints))
    model = sharded.fsdp(sharded.make_model())
    if kind == "torch":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optstate.AdamW(
        model.parameters(), lr=0.01, model=model, endpoint=endpoint, job=job, across_nodes="sharded"
    )


def _train_alike(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        sharded.loss_of(model, step).backward()
        optimizer.step()


def _save(connection, rank, endpoints, job, kind, path):
    model, optimizer = _make(rank, endpoints, job, kind)
    _train_alike(model, optimizer, range(3))
    models, optimizers = get_state_dict(model, optimizer)
    dcp.save({"model": models, "optimizer": optimizers}, checkpoint_id=path)


def _load(connection, rank, endpoints, job, kind, path):
    model, optimizer = _make(rank, endpoints, job, kind)
    models, optimizers = get_state_dict(model, optimizer)
    state = {"model": models, "optimizer": optimizers}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    loaded = sharded.whole_state(optimizer)
    _train_alike(model, optimizer, range(3, 6))
    values = [each.numpy() for each in wholes(model)]
    return values, [{key: each.numpy() for key, each in entry.items()} for entry in loaded]


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        (("optstate", 2, 2), ("optstate", 2, 1)),
        (("optstate", 3, 1), ("optstate", 2, 2)),
        (("optstate", 2, 2), ("torch", 2, 2)),
        (("torch", 3, 1), ("optstate", 2, 2)),
    ],
)
def test_checkpoints_go_to_other_numbers_of_nodes(saves, loads, nodes, job, tmp_path):
    """(class, ranks, nodes)"""
    path = str(tmp_path / "checkpoint")
    endpoints = [each.shm for each in nodes]
    kind, world, count = saves
    ranks.run(_save, world, endpoints[:count], job, kind, path)
    kind, world, count = loads
    results = ranks.run(_load, world, endpoints[:count], f"{job}-next", kind, path)
    model = sharded.make_model()
    reference = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train_alike(model, reference, range(3))
    states = [
        {key: value.clone() for key, value in entry.items()}
        for entry in reference.state_dict()["state"].values()
    ]
    _train_alike(model, reference, range(3, 6))
    for values, loaded in results:
        found = [{k: torch.from_numpy(each) for k, each in entry.items()} for entry in loaded]
        assert_states_close(found, states)
        assert_close([torch.from_numpy(each) for each in values], list(model.parameters()))
