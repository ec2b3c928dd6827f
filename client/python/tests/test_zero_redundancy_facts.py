"""The checks that torch has for its ZeroRedundancyOptimizer, made of ours: state that is in one
place only, whichever rank asks.

Where nodes share the state out, test_zero_redundancy_facts_on_nodes.py has them. These have no
counterpart here: `consolidate_state_dict()` (each rank's `state_dict()` is whole),
`parameters_as_bucket_view`, and models whose layers are on several GPUs.
"""

from __future__ import annotations

import copy

import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from sharded import assert_close, assert_same_bits
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

SIZES = [9, 7, 5, 3]


def _one():
    return torch.tensor([1.0], requires_grad=True)


def test_state_dict_has_torchs_form_and_goes_on():
    x = _one()
    optimizer = optstate.SGD([x], lr=0.1, momentum=0.9)
    x.backward()
    optimizer.step()
    assert_close([x, optimizer.state[x]["momentum_buffer"]], torch.tensor([[0.9], [1.0]]).unbind())
    optimizer.zero_grad()
    state = optimizer.state_dict()
    group = state["param_groups"][0]
    expected = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0, "dampening": 0}
    assert {key: group[key] for key in expected} == expected
    assert all(optimizer.param_groups[0][key] == group[key] for key in group if key != "params")
    optimizer.close()
    # A load brings the options of the checkpoint, also the rate.
    again = optstate.SGD([x], lr=0.01, momentum=0.5)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 0.1
    assert_close([again.state[x]["momentum_buffer"]], [torch.ones(1)])
    x.backward()
    again.step()
    assert_close([x, again.state[x]["momentum_buffer"]], torch.tensor([[0.71], [1.9]]).unbind())
    assert again.param_groups[0]["params"][0].device == x.device


def test_a_scheduler_without_gradients():
    """`zero_grad()` before `step()`: nothing is updated, and the scheduler goes on."""
    x, other = _one(), _one()
    optimizer, reference = optstate.SGD([x], lr=0.01), torch.optim.SGD([other], lr=0.01)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1) for each in (optimizer, reference)]
    for step in range(5):
        for each, of, scheduler in zip((x, other), (optimizer, reference), schedulers):
            each.backward()
            if step != 3:
                of.zero_grad()
            of.step()
            scheduler.step()
        assert torch.equal(x, other)
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]


class _Subclass(optstate.SGD):
    """Its step() takes a keyword, returns nothing, and adds a key to the groups."""

    def step(self, closure=None, kwarg=None):
        super().step()
        kwarg.append(5)
        self.param_groups[0]["new_key"] = 0.1


def test_a_subclass_with_a_step_of_its_own():
    x = _one()
    optimizer = _Subclass([x], lr=0.1)
    x.backward()
    kwarg = []
    optimizer.step(0, kwarg=kwarg)
    assert kwarg == [5] and optimizer.param_groups[0]["new_key"] == 0.1
    assert_close([x], [torch.tensor([0.9])])
    optimizer.zero_grad()
    assert x.grad is None


def _layers():
    return torch.nn.Sequential(
        torch.nn.Linear(5, 10), torch.nn.Linear(10, 10), torch.nn.Linear(10, 10)
    )


def _two_groups(model, decay=0.01):
    return [
        {"params": [layer.weight for layer in model], "weight_decay": 0.0},
        {"params": [layer.bias for layer in model], "weight_decay": decay},
    ]


def test_constructor():
    model = _layers()
    for params, error in (
        ([], ValueError),
        (torch.randn(1), TypeError),
        (1.2, TypeError),
        ([*model.parameters(), 42], TypeError),
        # torch's says ValueError of these.
        ([torch.sparse_coo_tensor(size=(2, 3))], TypeError),
        ([torch.ones(1), torch.ones(1, dtype=torch.float64)], TypeError),
        ([torch.ones(1), torch.ones(1), torch.sparse_coo_tensor(size=(2, 3))], TypeError),
    ):
        with pytest.raises(error):
            optstate.SGD(params, lr=0.01)
    for make in (model.parameters, lambda: list(model.parameters()), lambda: _two_groups(model)):
        optstate.SGD(make(), lr=0.01).close()
    optimizer = optstate.AdamW(_two_groups(model), lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01]


def _area(optimizer):
    """Elements of which this rank pushes gradients."""
    return optimizer.memory().gradients // 4


def _shares(connection, rank, endpoint):
    """The ranks' shares are equal, at construction and when a group is added."""
    world = dist.get_world_size()
    sizes = SIZES * world

    def ones(sizes):
        return [torch.ones(size, 1, requires_grad=True) for size in sizes]

    optimizer = optstate.SGD(ones(sizes), lr=0.01, endpoint=endpoint)
    found = [_area(optimizer)]
    optimizer = optstate.SGD(ones(sizes[:-1]), lr=0.01, endpoint=endpoint)
    optimizer.add_param_group({"params": ones([3])})
    found.append(_area(optimizer))
    assert len(optimizer.param_groups) == 2
    # A first big parameter that is not trained has no share in it.
    frozen = torch.ones(100, 1)
    optimizer = optstate.SGD([frozen, *ones([3, 5, 2, 6, 4])], lr=0.01, endpoint=endpoint)
    optimizer.add_param_group({"params": ones([3])})
    found.append(_area(optimizer))
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each) if each.requires_grad else None
    optimizer.step()
    for group in optimizer.param_groups:
        for each in group["params"]:
            assert torch.equal(each, torch.full_like(each, 0.99 if each.requires_grad else 1))
    return found


def test_shares(daemon):
    found = ranks.run(_shares, 2, daemon.shm)
    for shares in zip(*found[:2]):
        assert max(shares) - min(shares) <= max(SIZES)
    assert sum(of_rank[0] for of_rank in found) == 2 * sum(SIZES)
    assert sum(of_rank[1] for of_rank in found) == 2 * sum(SIZES)
    assert sum(of_rank[2] for of_rank in found) == 23


def _average(parameters):
    for each in parameters:
        dist.all_reduce(each.grad)
        each.grad /= dist.get_world_size()


def _line():
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
    return model


def _steps(connection, rank, endpoint):
    """step(), step(closure), groups given at once and one by one, and the state of all ranks."""
    x = torch.tensor([float(rank + 1)])
    models = [_line(), _line()]
    optimizers = [
        optstate.SGD(models[0].parameters(), lr=0.01, endpoint=endpoint),
        torch.optim.SGD(models[1].parameters(), lr=0.01),
    ]
    for model, optimizer in zip(models, optimizers):
        model(x).backward(x)
        _average(model.parameters())
        optimizer.step()
    assert_same_bits(list(models[0].parameters()), list(models[1].parameters()))
    # A closure's gradients are the step's, and its loss is returned.
    model = _line()
    optimizer = optstate.SGD(model.parameters(), lr=0.1, endpoint=endpoint)
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
    at_once = optstate.AdamW(_two_groups(models[0]), lr=0.01, endpoint=endpoint)
    one_by_one = optstate.AdamW(_two_groups(models[1])[:1], lr=0.01, endpoint=endpoint)
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
    # Each rank has the state of all, without asking the others; and loads what one has.
    state = at_once.state_dict()
    assert len(state["state"]) == 6
    box = [state if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    assert_same_bits(
        [each["exp_avg"] for each in box[0]["state"].values()],
        [each["exp_avg"] for each in state["state"].values()],
    )
    at_once.load_state_dict(box[0])
    for index, entry in reference.state_dict()["state"].items():
        assert_close([state["state"][index][key] for key in entry], list(entry.values()))


def test_steps(daemon):
    ranks.run(_steps, 2, daemon.shm)


def _of_a_group(connection, rank, endpoint):
    """The even ranks train a job; the others have nothing to do with it."""
    group = dist.new_group([0, 2])
    if rank % 2:
        return None
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.Linear(10, 5))
    optimizer = optstate.SGD(
        model.parameters(), lr=1e-3, momentum=0.99, process_group=group, endpoint=endpoint
    )
    torch.manual_seed(rank)
    for _ in range(3):
        inputs, target = torch.rand(3, 20), torch.rand(3, 5)

        def closure(inputs=inputs, target=target):
            optimizer.zero_grad()
            loss = torch.nn.functional.l1_loss(model(inputs), target)
            loss.backward()
            for each in model.parameters():
                dist.all_reduce(each.grad, group=group)
            return loss

        optimizer.step(closure)
    return [each.detach().numpy() for each in model.parameters()]


def test_another_process_group(daemon):
    found = ranks.run(_of_a_group, 4, daemon.shm)
    for one, other in zip(found[0], found[2]):
        assert (one == other).all()


def _beside_a_local_one(connection, rank, endpoint, name, maximize):
    """Under DDP, beside torch's class under DDP; the first parameter is frozen now and then; each
    loads the other's state."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(*(torch.nn.Linear(*sizes) for sizes in ((2, 3), (3, 3), (3, 3))))
    model.register_buffer("of_rank", torch.ones(1) * rank)
    pairs = []
    for make in (torch.optim, optstate):
        module = copy.deepcopy(model)
        ddp = DistributedDataParallel(module, find_unused_parameters=True)
        how = {"endpoint": endpoint} if make is optstate else {}
        pairs.append(
            (ddp, getattr(make, name)(module.parameters(), lr=1e-3, maximize=maximize, **how))
        )

    def step():
        inputs = torch.rand(16, 2)
        losses = []
        for ddp, optimizer in pairs:

            def closure(ddp=ddp, optimizer=optimizer):
                optimizer.zero_grad()
                loss = ddp(inputs).abs().sum()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
        assert_close(*(list(ddp.parameters()) for ddp, _ in pairs))
        assert_same_bits(*(list(ddp.buffers()) for ddp, _ in pairs))

    for i in range(10):
        step()
        if i > 5:
            for ddp, _ in pairs:
                next(ddp.parameters()).requires_grad = bool(i % 2)
    (_, theirs), (_, mine) = pairs
    states = [copy.deepcopy(each.state_dict()) for each in (theirs, mine)]
    theirs.load_state_dict(copy.deepcopy(states[1]))  # torch's steps write into what is loaded
    mine.load_state_dict(states[0])
    step()
    theirs.load_state_dict(states[0])
    mine.load_state_dict(states[1])
    step()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("maximize", [False, True])
def test_parity_under_ddp(name, maximize, daemon):
    ranks.run(_beside_a_local_one, 2, daemon.shm, name, maximize)


class _Gradients(Joinable):
    """Gives a rank without inputs the gradients that DDP had, as torch's test does."""

    def __init__(self, parameters, gradients):
        super().__init__()
        self.parameters, self.gradients = parameters, iter(gradients)

    def put(self):
        for each, gradient in zip(self.parameters, next(self.gradients)):
            each.grad = gradient.clone()

    def join_hook(self, **kwargs):
        hook = JoinHook()
        hook.main_hook = self.put
        return hook

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


def _joined(connection, rank, endpoint):
    """Rank i has i inputs more than rank 0; the steps are those of DDP with a local optimizer."""
    torch.manual_seed(0)
    last = dist.get_world_size() - 1
    module = _layers()
    model = DistributedDataParallel(copy.deepcopy(module))
    local = torch.optim.Adam(model.parameters(), lr=0.01)
    parameters = list(module.parameters())
    optimizer = optstate.Adam(parameters, lr=0.01, endpoint=endpoint)
    inputs = [torch.randn(4, 5) for _ in range(3 + rank)]
    kept = []
    with model.join():
        for each in inputs:
            local.zero_grad()
            model(each).square().mean().backward()
            gradients = [one.grad.clone() for one in model.parameters()]
            local.step()
            kept.append((gradients, [one.detach().clone() for one in model.parameters()]))
    box = [kept]
    dist.broadcast_object_list(box, src=last)
    setter = _Gradients(parameters, [gradients for gradients, _ in box[0]])
    with Join([setter, optimizer]):
        for step in range(len(inputs)):
            Join.notify_join_context(setter)
            setter.put()
            optimizer.step()
            assert_close(parameters, box[0][step][1])
    assert optimizer.committed_step == len(box[0])
    assert_close(parameters, box[0][-1][1])


def test_uneven_inputs(daemon):
    ranks.run(_joined, 3, daemon.shm)


def _overlapped(connection, rank, endpoint):
    """Steps that overlap with DDP's backward pass, in all of its ways, beside DDP."""
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 50))
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.001}
    torch.manual_seed(rank)
    inputs = [torch.randn(4, 100) for _ in range(4)]
    for how in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        pairs = []
        for is_ours in (True, False):
            module = copy.deepcopy(base)
            model = DistributedDataParallel(module, **how)
            if is_ours:
                model.register_comm_hook(None, optstate.ddp_hook)
                optimizer = optstate.SGD(
                    module.parameters(),
                    reduction="daemon",
                    overlap=True,
                    endpoint=endpoint,
                    **options,
                )
            else:
                optimizer = torch.optim.SGD(module.parameters(), **options)
            pairs.append((model, optimizer))
        start = [each.clone() for each in base.parameters()]
        for each in inputs:
            losses = []
            for model, optimizer in pairs:
                optimizer.zero_grad()
                losses.append(model(each).sum())
                losses[-1].backward()
                optimizer.step()
            torch.testing.assert_close(*losses)
        for one, other, begun in zip(*(model.parameters() for model, _ in pairs), start):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
            assert not torch.equal(one, begun)


def test_overlap_with_ddp(daemon):
    ranks.run(_overlapped, 2, daemon.shm)
