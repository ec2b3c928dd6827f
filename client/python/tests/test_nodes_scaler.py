"""Loss scaling over several nodes: an overflow on any of them skips the step on all, and the scale
stays the same. Also where tensor parallelism within nodes meets data parallelism across them."""

from __future__ import annotations

import math

import nodes as on_nodes
import optstate
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from training import bits, loss_of, small_model

STEPS = 9
OVERFLOWS = (1, 5, 6)
SCALER = optstate.LossScaler(init_scale=1024.0, growth_interval=2)
nodes = on_nodes.nodes


def _endpoints(nodes):
    return [each.shm for each in nodes]


def _scales_of_torch():
    """The state of a GradScaler after each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scales = []
    for step in range(STEPS):
        value = math.inf if step in OVERFLOWS else 1.0
        scaler.scale(torch.zeros(()))  # makes its tensors
        parameter.grad = torch.full_like(parameter, value)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def _replicated(connection, rank, endpoints, per_node, job, until):
    """The daemons' scalers, with gradients that DistributedDataParallel has averaged."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    module = small_model()
    model = torch.nn.parallel.DistributedDataParallel(module)
    across = "replicated" if len(endpoints) > 1 else None
    optimizer = optstate.AdamW(
        module.named_parameters(),
        lr=0.01,
        job=job,
        endpoint=endpoint,
        loss_scaler=SCALER,
        max_norm=0.1,
        across_nodes=across,
    )
    found = []
    for step in range(optimizer.committed_step, until):
        optimizer.zero_grad()
        loss = optimizer.scale(loss_of(model, 100 * step + rank))
        # The last rank's loss overflows, which averaging brings to all.
        overflows = step in OVERFLOWS and rank == dist.get_world_size() - 1
        (loss * (math.inf if overflows else 1.0)).backward()
        optimizer.step()
        found.append((optimizer.last_outcome.applied, optimizer.loss_scale))
    result = bits(module.parameters()), found
    optimizer.close()
    return result


def test_replicas_scale_as_one_node(nodes, daemon, job):
    endpoints = _endpoints(nodes)
    one = ranks.run(_replicated, 2, [daemon.shm], 2, job, STEPS)
    # All ranks are replaced after three steps, within a growth interval.
    begun = ranks.run(_replicated, 2, endpoints, 1, job, 3)
    ended = ranks.run(_replicated, 2, endpoints, 1, job, STEPS)
    for (_, first), (values, rest) in zip(begun, ended):
        assert values == one[0][0]
        assert first + rest == one[0][1]
        assert [scale for _, scale in first + rest] == _scales_of_torch()
        applied = [step for step, (was, _) in enumerate(first + rest) if not was]
        assert applied == list(OVERFLOWS)


def _grad_scaler(connection, rank, endpoints, per_node, job):
    """torch's scaler, of each rank's own."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    module = small_model()
    model = torch.nn.parallel.DistributedDataParallel(module)
    across = "replicated" if len(endpoints) > 1 else None
    optimizer = optstate.AdamW(
        module.named_parameters(),
        lr=0.01,
        job=job,
        endpoint=endpoint,
        max_norm=0.1,
        across_nodes=across,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, 100 * step + rank))
        (loss * (math.inf if step in OVERFLOWS and rank == 0 else 1.0)).backward()
        before = optimizer.committed_step
        scaler.step(optimizer)
        scaler.update()
        found.append((optimizer.committed_step - before, scaler.get_scale()))
    result = bits(module.parameters()), found
    optimizer.close()
    return result


def test_a_grad_scaler_with_replicas(nodes, daemon, job):
    one = ranks.run(_grad_scaler, 2, [daemon.shm], 2, job)
    two = ranks.run(_grad_scaler, 2, _endpoints(nodes), 1, job)
    assert two[0] == two[1] == one[0]
    assert [scale for _, scale in two[0][1]] == _scales_of_torch()


def _sharded(connection, rank, endpoints, per_node, job, until):
    """A shard of the last rank overflows, which no other node has."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    model = sharded.fsdp(sharded.make_model())
    optimizer = optstate.AdamW(
        model.parameters(),
        model=model,
        lr=0.01,
        job=job,
        endpoint=endpoint,
        loss_scaler=SCALER,
        max_norm=0.05,
        across_nodes="sharded",
    )
    found = []
    for step in range(optimizer.committed_step, until):
        optimizer.zero_grad()
        optimizer.scale(sharded.loss_of(model, 10 * step + rank)).backward()
        if step in OVERFLOWS and rank == dist.get_world_size() - 1:
            model[0].weight.grad.to_local()[0, 0] = math.inf
        optimizer.step()
        found.append((optimizer.last_outcome.applied, optimizer.loss_scale))
    result = bits(sharded.wholes(model)), found
    optimizer.close()
    return result


def test_shards_scale_as_one_node(nodes, daemon, job):
    endpoints = _endpoints(nodes)
    one = ranks.run(_sharded, 2, [daemon.shm], 2, job, STEPS)
    begun = ranks.run(_sharded, 2, endpoints, 1, job, 3)
    ended = ranks.run(_sharded, 2, endpoints, 1, job, STEPS)
    for (_, first), (values, rest) in zip(begun, ended):
        assert values == one[0][0]
        assert first + rest == one[0][1]
        assert [scale for _, scale in first + rest] == _scales_of_torch()


def _parts(connection, rank, endpoints, job):
    """Ranks 0 and 1 train two parts of each layer, on node 0; 2 and 3 the same parts, on node 1.
    Both parts have the LayerNorm, which the first one counts."""
    endpoint = on_nodes.enter(rank, endpoints, 2)
    part = rank % 2
    jobs = [dist.new_group([each, each + 2]) for each in range(2)]  # on every rank
    model = small_model()
    layers = ((0, 2), (2, 3))[part]
    mine = [(n, each) for n, each in model.named_parameters() if int(n.split(".")[0]) in layers]
    optimizer = optstate.AdamW(
        mine,
        lr=0.01,
        job=f"{job}-{part}",
        endpoint=endpoint,
        process_group=jobs[part],
        norm_group=dist.group.WORLD,
        norm_duplicates=[each for name, each in mine if part and name.startswith("2.")],
        across_nodes="replicated",
        loss_scaler=SCALER,
        max_norm=0.05,
    )
    found = []
    for step in range(STEPS):
        model.zero_grad()
        optimizer.scale(loss_of(model, step)).backward()  # replicas have equal data
        if step in OVERFLOWS and part:
            model[3].weight.grad[0, 0] = math.inf
        optimizer.step()
        last = optimizer.last_outcome
        found.append((last.applied, last.applied and last.gradient_norm, optimizer.loss_scale))
        for layer, owner in ((0, 0), (3, 1)):  # as the forward pass of tensor parallelism would
            for each in model[layer].parameters():
                dist.broadcast(each.data if part != owner else each.detach().clone(), owner)
    result = bits(model.parameters()), found
    optimizer.close()
    return result


def _whole(daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(
        model.named_parameters(),
        lr=0.01,
        job=job,
        endpoint=daemon.shm,
        loss_scaler=SCALER,
        max_norm=0.05,
    )
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.scale(loss_of(model, step)).backward()
        if step in OVERFLOWS:
            model[3].weight.grad[0, 0] = math.inf
        optimizer.step()
        last = optimizer.last_outcome
        found.append((last.applied, last.applied and last.gradient_norm, optimizer.loss_scale))
    optimizer.close()
    return bits(model.parameters()), found


def test_tensor_parallelism_within_nodes_and_replicas_across_them(nodes, daemon, job):
    """Each part is a job on both nodes, and all clip by one norm and keep one scale."""
    expected = _whole(daemon, job)
    for found in ranks.run(_parts, 4, _endpoints(nodes), job):
        assert found == expected


def _refused(connection, rank, endpoints, job):
    """A GradScaler cannot know what the gradients of another node are before they are reduced."""
    endpoint = on_nodes.enter(rank, endpoints, 1)
    optimizer = optstate.AdamW(
        small_model().named_parameters(),
        lr=0.01,
        job=job,
        endpoint=endpoint,
        reduction="collective",
        across_nodes="replicated",
    )
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="the ranks' scales would part.*loss_scaler="):
        optimizer.step()
    optimizer.close()


def test_a_grad_scaler_that_sees_one_node_alone_is_refused(nodes, job):
    ranks.run(_refused, 2, _endpoints(nodes), job)
