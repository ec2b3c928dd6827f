"""The checks that torch has for its ZeroRedundancyOptimizer, made of ours where nodes share the
state out (across_nodes="sharded"), each with a daemon of its own. Those of one node are in
test_zero_redundancy_facts.py.

Those of uneven inputs (torch's Join) are in test_join.py.
"""

from __future__ import annotations

import copy

import nodes as on_nodes
import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from sharded import assert_close, assert_same_bits
from torch.nn.parallel import DistributedDataParallel
from training import bits

SIZES = [9, 7, 5, 3]
nodes = on_nodes.nodes


def _on_nodes(rank, endpoints, per_node=1, **kwargs):
    """Returns the keywords of a rank's optimizer."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    return {"endpoint": endpoint, "across_nodes": "sharded", **kwargs}


def _average(parameters, group=None):
    for each in parameters:
        dist.all_reduce(each.grad, group=group)
        each.grad /= dist.get_world_size(group)


def _ones(sizes):
    return [torch.ones(size, 1, requires_grad=True) for size in sizes]


def _shares(connection, rank, endpoints):
    """The nodes' shares of the state are equal, at construction and when a group is added."""
    kwargs = _on_nodes(rank, endpoints, lr=0.01, momentum=0.9)

    def share(optimizer):
        trained = [
            each
            for group in optimizer.param_groups
            for each in group["params"]
            if each.requires_grad
        ]
        for each in trained:
            each.grad = torch.ones_like(each)
        optimizer.step()
        for each in trained:
            assert torch.equal(each, torch.full_like(each, 0.99))
        return sum(optimizer.state[each]["momentum_buffer"].numel() for each in trained)

    sizes = SIZES * 2
    found = [share(optstate.SGD(_ones(sizes), **kwargs))]
    optimizer = optstate.SGD(_ones(sizes[:-1]), **kwargs)
    optimizer.add_param_group({"params": _ones([3])})
    assert len(optimizer.param_groups) == 2
    found.append(share(optimizer))
    # A first big parameter that is not trained has no share in it.
    frozen = torch.ones(100, 1)
    optimizer = optstate.SGD([frozen, *_ones([3, 5, 2, 6, 4])], **kwargs)
    optimizer.add_param_group({"params": _ones([3])})
    found.append(share(optimizer))
    assert torch.equal(frozen, torch.ones(100, 1))
    return found


def test_shares(nodes):
    one, other = ranks.run(_shares, 2, [each.shm for each in nodes])
    assert one[:2] == other[:2] == [sum(SIZES)] * 2
    assert one[2] + other[2] == 23 and abs(one[2] - other[2]) <= 6


def _line():
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
    return model


def _layers():
    return torch.nn.Sequential(
        torch.nn.Linear(5, 10), torch.nn.Linear(10, 10), torch.nn.Linear(10, 10)
    )


def _two_groups(model):
    return [
        {"params": [layer.weight for layer in model], "weight_decay": 0.0},
        {"params": [layer.bias for layer in model], "weight_decay": 0.01},
    ]


def _steps(connection, rank, endpoints):
    """step(), step(closure), and groups given at once and one by one."""
    kwargs = _on_nodes(rank, endpoints)
    x = torch.tensor([float(rank + 1)])
    models = [_line(), _line()]
    optimizers = [
        optstate.SGD(models[0].parameters(), lr=0.01, **kwargs),
        torch.optim.SGD(models[1].parameters(), lr=0.01),
    ]
    for model, optimizer in zip(models, optimizers):
        model(x).backward(x)
        _average(model.parameters())
        optimizer.step()
    assert_same_bits(list(models[0].parameters()), list(models[1].parameters()))
    # A closure's gradients are the step's, and its loss is returned.
    model = _line()
    optimizer = optstate.SGD(model.parameters(), lr=0.1, **kwargs)
    target = x + 3
    model(x).backward(x)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.l1_loss(model(x), target)
        loss.backward()
        for each in model.parameters():
            each.grad.fill_(-1)  # the same on all ranks
        return loss

    assert_close([optimizer.step(closure)], [torch.tensor(1.0)])
    assert_close([model.weight[0], model.bias], torch.tensor([[1.1], [2.1]]).unbind())
    # Groups.
    torch.manual_seed(0)
    first = _layers()
    models = [first, copy.deepcopy(first), copy.deepcopy(first)]
    at_once = optstate.AdamW(_two_groups(models[0]), lr=0.01, **kwargs)
    one_by_one = optstate.AdamW(_two_groups(models[1])[:1], lr=0.01, **kwargs)
    one_by_one.add_param_group(_two_groups(models[1])[1])
    reference = torch.optim.AdamW(_two_groups(models[2]), lr=0.01)
    for _ in range(3):
        inputs = torch.randn(8, 5)
        for model, optimizer in zip(models, (at_once, one_by_one, reference)):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
    parameters = [list(model.parameters()) for model in models]
    assert_same_bits(parameters[0], parameters[1])
    assert_close(parameters[0], parameters[2])


def test_steps(nodes):
    ranks.run(_steps, 2, [each.shm for each in nodes])


def _collected(connection, rank, endpoints, to):
    """One rank gets the whole state, which all load; the steps after it are those without it."""
    torch.manual_seed(0)
    inputs, target = torch.rand(3, 20), torch.rand(3, 5)
    first = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.Linear(10, 5))
    models = [first, copy.deepcopy(first)]
    kwargs = _on_nodes(rank, endpoints)
    optimizers = [
        optstate.SGD(models[0].parameters(), lr=1e-3, momentum=0.99, **kwargs),
        torch.optim.SGD(models[1].parameters(), lr=1e-3, momentum=0.99),
    ]

    def train():
        for model, optimizer in zip(models, optimizers):

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = torch.nn.functional.l1_loss(model(inputs), target)
                loss.backward()
                return loss

            optimizer.step(closure=closure)

    train()
    optimizer, reference = optimizers
    optimizer.consolidate_state_dict(to=to)
    box = [None]
    if rank == to:
        box = [optimizer.state_dict()]
        expected = reference.state_dict()["state"]
        assert box[0]["state"].keys() == expected.keys()
        for index, entry in expected.items():
            found = box[0]["state"][index]["momentum_buffer"]
            assert_close([found], [entry["momentum_buffer"]])
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    dist.broadcast_object_list(box, src=to)
    optimizer.load_state_dict(box[0])
    train()
    assert_close(list(models[0].parameters()), list(models[1].parameters()))
    # A step makes what was gathered old.
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()
    return bits(models[0].parameters())


@pytest.mark.parametrize("to", [0, 1])
def test_the_state_is_collected(to, nodes):
    one, other = ranks.run(_collected, 2, [each.shm for each in nodes], to)
    assert one == other


def _of_a_group(connection, rank, endpoints, reduction):
    """The even ranks train a job; the others have nothing to do with it."""
    group = dist.new_group([0, 2])
    if rank % 2:
        return None
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.Linear(10, 5))
    models = [first, copy.deepcopy(first)]
    kwargs = _on_nodes(rank, endpoints, 2, process_group=group, reduction=reduction)
    optimizers = [
        optstate.SGD(models[0].parameters(), lr=1e-3, momentum=0.99, **kwargs),
        torch.optim.SGD(models[1].parameters(), lr=1e-3, momentum=0.99),
    ]
    torch.manual_seed(rank)
    for _ in range(3):
        inputs, target = torch.rand(3, 20), torch.rand(3, 5)
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            torch.nn.functional.l1_loss(model(inputs), target).backward()
            if model is models[1] or reduction == "trainer":
                _average(model.parameters(), group)
            optimizer.step()
    assert_close(list(models[0].parameters()), list(models[1].parameters()))
    optimizers[0].consolidate_state_dict(to=1)  # of the group: rank 2
    assert dist.get_rank(group) == 0 or len(optimizers[0].state_dict()["state"]) == 4
    return bits(models[0].parameters())


@pytest.mark.parametrize("reduction", ["trainer", "collective"])
def test_another_process_group(reduction, nodes):
    found = ranks.run(_of_a_group, 4, [each.shm for each in nodes], reduction)
    assert found[0] == found[2] is not None


def _under_ddp(connection, rank, endpoints, name, maximize):
    """Beside torch's class, both under DDP, with a buffer of each rank's own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model.register_buffer("test_buffer", torch.ones(1) * rank)
    local = copy.deepcopy(model)
    models = [DistributedDataParallel(each) for each in (model, local)]
    options = {"lr": 1e-3, "maximize": maximize}
    optimizers = [
        getattr(optstate, name)(model.parameters(), **options, **_on_nodes(rank, endpoints)),
        getattr(torch.optim, name)(local.parameters(), **options),
    ]
    torch.manual_seed(rank)
    for _ in range(10):
        inputs = torch.rand(64, 2)
        for each, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            each(inputs).abs().sum().backward()
            optimizer.step()
        assert_close(list(model.parameters()), list(local.parameters()))
    assert_close([model.test_buffer], [local.test_buffer])
    return bits(model.parameters())


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_parity_under_ddp(name, maximize, nodes):
    one, other = ranks.run(_under_ddp, 2, [each.shm for each in nodes], name, maximize)
    assert one == other
