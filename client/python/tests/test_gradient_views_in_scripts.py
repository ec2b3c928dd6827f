"""Gradients that are views in what scripts do beyond the plain loop."""

from __future__ import annotations

import optstate
import pytest
import ranks
import torch
from gradients_in_place import OPTIONS, SGD, assert_as_torchs, backward, in_place, run, viewable
from torch.nn.parallel import DistributedDataParallel
from training import bits, largest_difference, loss_of, small_model


def test_create_graph():
    """A gradient with a graph is left alone, and can go backward itself."""

    def between(model, optimizer, step):
        loss_of(model, step).backward(create_graph=True)
        if isinstance(optimizer, SGD):
            assert not in_place(optimizer)
        penalty = sum(each.grad.square().sum() for each in model.parameters())
        gradients = [each.grad for each in model.parameters()]
        assert all(each.requires_grad for each in gradients)
        model.zero_grad()
        (0.01 * penalty).backward()
        return None

    assert_as_torchs(between)


def test_autograd_grad():
    """No hook is called for these, and each is the script's own."""

    def between(model, optimizer, step):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model, step), parameters)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        if isinstance(optimizer, SGD):
            assert not in_place(optimizer)

    assert_as_torchs(between)


class _Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.last = torch.nn.Linear(8, 4)

    def forward(self, batch):
        return self.last(self.second(self.first(batch).tanh()).tanh())


def _tied():
    torch.manual_seed(5)
    return _Tied()


def test_tied_parameters():
    def between(model, optimizer, step):
        backward(model, optimizer, step)
        if step % 2:
            model.first.weight.grad.data.mul_(0.5)

    assert_as_torchs(between, model=_tied)


class _Halves(torch.nn.Module):
    """A module of whose two parameters backward() makes one gradient that both have."""

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.full((4, 8), 0.1))
        self.other = torch.nn.Parameter(torch.full((4, 8), 0.2))
        self.flat = torch.nn.Parameter(torch.full((32,), 0.3))

    def forward(self, batch):
        return batch @ (self.one + self.other + self.flat.view(4, 8)).t()


def test_parameters_that_have_one_gradient():
    def between(model, optimizer, step):
        backward(model, optimizer, step)
        model.one.grad.mul_(0.5)

    ours, _ = run(SGD, between, model=_Halves)
    copied, _ = run(SGD, between, model=_Halves, gradients_as_views=False)
    theirs, _ = run(torch.optim.SGD, between, model=_Halves)
    assert bits(ours.parameters()) == bits(copied.parameters())
    assert largest_difference(ours, theirs) < 1e-6


@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("what", ["replaces", "edits", "keeps", "drops", "tensor hook keeps"])
def test_hooks_of_the_script(what, registered):
    kept = []

    def hook(parameter):
        if what == "replaces":
            parameter.grad = parameter.grad * 0.5
        elif what == "edits":
            parameter.grad.data.mul_(0.5)
        elif what == "keeps":
            kept.append((parameter.grad, parameter.grad.clone()))
        elif what == "drops":
            parameter.grad = None

    def train(optimizer_class, **options):
        model = small_model()

        def register():
            if what == "tensor hook keeps":
                model[0].weight.register_hook(lambda each: kept.append((each, each.clone())))
                model[2].bias.register_hook(
                    lambda each: kept.append((each.detach(), each.clone())) or each * 2
                )
            else:
                model[0].weight.register_post_accumulate_grad_hook(hook)
                model[2].bias.register_post_accumulate_grad_hook(hook)

        if registered == "before":
            register()
        optimizer = optimizer_class(model.parameters(), **OPTIONS, **options)
        if registered == "after":
            register()
        for step in range(5):
            optimizer.zero_grad()
            backward(model, optimizer, step)
            if what == "keeps":
                kept[-1][0].mul_(0.5)  # it is the gradient, in torch
                kept[-1][1].mul_(0.5)
            optimizer.step()
        if isinstance(optimizer, SGD):
            optimizer.close()
        return model

    ours = train(SGD)
    for held, value in kept:
        assert torch.equal(held, value)
    copied = train(SGD, gradients_as_views=False)
    assert bits(ours.parameters()) == bits(copied.parameters())
    assert largest_difference(ours, train(torch.optim.SGD)) < 1e-6


def test_an_alias_from_a_tensor_hook():
    """torch makes the tensor that the hook sees the gradient."""

    def train(optimizer_class):
        model = small_model()
        seen = []
        model[0].weight.register_hook(lambda each: seen.append(each.detach()))
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, optimizer, step)
            seen[-1].mul_(0.5)
            optimizer.step()
        return model

    assert largest_difference(train(SGD), train(torch.optim.SGD)) < 1e-6


def _sparse():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(10, 8, sparse=True), torch.nn.Linear(8, 4))


def test_sparse_gradients_are_refused_as_before():
    model = _sparse()
    with SGD(model.parameters(), lr=0.1) as optimizer:
        for _ in range(2):
            model(torch.tensor([1, 2])).square().sum().backward()
            assert in_place(optimizer) <= {1, 2}
            with pytest.raises(optstate.UnimplementedError, match="sparse"):
                optimizer.step()
        model[0].weight.grad = model[0].weight.grad.to_dense()
        optimizer.step()


def test_a_gradient_of_another_dtype():
    """torch casts what comes later; ours refuses it as without views."""
    parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    with SGD([parameter], lr=1.0) as optimizer:
        (parameter * 2).sum().backward()
        assert in_place(optimizer) == {0}
        assert parameter.grad.dtype is torch.bfloat16
        optimizer.step()
        assert parameter.tolist() == [-1.0] * 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    def between(model, optimizer, step):
        backward(model, optimizer, step)
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.05, 0.05)
        if isinstance(optimizer, SGD) and optimizer._served.settings.gradient_views:
            assert in_place(optimizer) == set(range(6))

    def model():
        return small_model(dtype=dtype)

    ours, _ = run(SGD, between, model=model)
    copied, _ = run(SGD, between, model=model, gradients_as_views=False)
    assert bits(ours.parameters()) == bits(copied.parameters())


def _channels_last():
    torch.manual_seed(2)
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 2, 2)),
        torch.nn.Conv2d(2, 4, 2),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 4),
    )
    model[1].weight.data = model[1].weight.data.contiguous(memory_format=torch.channels_last)
    return model


def _channels_first():
    model = _channels_last()
    model[1].weight.data = model[1].weight.data.contiguous()
    return model


@pytest.mark.parametrize("model", [_channels_last, _channels_first])
def test_strides(model):
    """A gradient has the strides of its parameter; only contiguous ones are views."""

    def between(model, optimizer, step):
        if step == 3:
            weight = model[1].weight.data
            model[1].weight.data = weight.contiguous(memory_format=torch.channels_last)
        backward(model, optimizer, step)
        assert model[1].weight.grad.stride() == model[1].weight.stride()
        model[1].weight.grad.data.mul_(0.5)

    assert_as_torchs(between, model=model)


@pytest.mark.parametrize("where", ["before", "after"])
def test_frozen_and_thawed(where):
    def train(optimizer_class, **options):
        model = small_model()
        model[3].weight.requires_grad_(where == "after")
        optimizer = optimizer_class(model.parameters(), **OPTIONS, **options)
        for step in range(6):
            if step == 2:
                model[3].weight.requires_grad_(where == "before")
            if step == 4:
                model[3].weight.requires_grad_(True)
            optimizer.zero_grad()
            backward(model, optimizer, step)
            if step % 2:
                model[0].weight.grad.data.mul_(0.5)
            optimizer.step()
        if isinstance(optimizer, SGD):
            assert len(in_place(optimizer) if not options else range(5)) >= 5
            optimizer.close()
        return model

    ours = train(SGD)
    assert bits(ours.parameters()) == bits(train(SGD, gradients_as_views=False).parameters())
    assert largest_difference(ours, train(torch.optim.SGD)) < 1e-6


def test_groups_that_are_added():
    def train(optimizer_class, **options):
        model = small_model()
        optimizer = optimizer_class(model[0].parameters(), **OPTIONS, **options)
        kept = None
        for step in range(6):
            optimizer.zero_grad()
            backward(model, optimizer, step)
            if step == 2:
                kept = (model[0].weight.grad, model[0].weight.grad.clone())
                optimizer.add_param_group({"params": list(model[3].parameters())})
                model[0].weight.grad.data.mul_(0.5)
                kept[1].mul_(0.5)
            optimizer.step()
        assert torch.equal(*kept)
        if isinstance(optimizer, SGD) and not options:
            # The kept one is of the former area.
            assert in_place(optimizer) == set(range(4))
        return model

    ours = train(SGD)
    assert bits(ours.parameters()) == bits(train(SGD, gradients_as_views=False).parameters())
    assert largest_difference(ours, train(torch.optim.SGD)) < 1e-6


def test_two_optimizers_of_one_parameter():
    """The second copies what is a view of the first."""

    def train(optimizer_class):
        model = small_model()
        first = optimizer_class(model.parameters(), lr=0.05)
        second = optimizer_class(model[0].parameters(), lr=0.01, momentum=0.9)
        for step in range(4):
            first.zero_grad()
            backward(model, first, step)
            first.step()
            model[0].weight.grad.data.mul_(0.5)
            second.step()
        return model

    assert largest_difference(train(SGD), train(torch.optim.SGD)) < 1e-6


def test_a_compiled_model():
    def model():
        return torch.compile(small_model(), backend="aot_eager")

    def between(compiled, optimizer, step):
        backward(compiled, optimizer, step)
        for parameter in compiled.parameters():
            parameter.grad.data.clamp_(-0.05, 0.05)

    torch._dynamo.reset()
    training = [
        run(SGD, between, model=model)[0],
        run(SGD, between, model=model, gradients_as_views=False)[0],
    ]
    assert bits(training[0].parameters()) == bits(training[1].parameters())


def test_moved_parameters():
    """A parameter with other data has gradients as before; one of another shape is refused."""

    def between(model, optimizer, step):
        if step == 2:
            model[0].weight.data = model[0].weight.data.clone()
        backward(model, optimizer, step)
        model[0].weight.grad.data.mul_(0.5)

    assert_as_torchs(between)
    model = small_model()
    with SGD(model.parameters(), lr=0.1) as optimizer:
        model[3].weight.data = torch.zeros(4, 20)
        (model[3].weight.square().sum() + model[0].weight.square().sum()).backward()
        assert in_place(optimizer) == {0}
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            optimizer.step()


def test_what_is_always_replaced_is_no_view_any_more():
    def between(model, optimizer, step):
        backward(model, optimizer, step)
        if isinstance(optimizer, SGD) and optimizer._served.settings.gradient_views:
            assert viewable(optimizer) == set(range(6)) - ({0} if step >= 2 else set())
            assert in_place(optimizer) == viewable(optimizer)
        for index, parameter in enumerate(model.parameters()):
            if index == 0 or (index + step) % 2:
                parameter.grad = parameter.grad * 0.5

    assert_as_torchs(between)


def _ddp(connection, rank, endpoint, job, how):
    model = small_model()
    options = {"reduction": "daemon"} if how == "hook" else {}
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=how == "bucket views")
    if how == "hook":
        wrapped.register_comm_hook(None, optstate.ddp_hook)
    optimizer = SGD(wrapped.named_parameters(), **OPTIONS, endpoint=endpoint, job=job, **options)
    assert viewable(optimizer)
    for step in range(6):
        optimizer.zero_grad(set_to_none=step != 3)
        with wrapped.no_sync():
            loss_of(wrapped, 2 * step + 100 * rank).backward()
        loss_of(wrapped, 2 * step + 1 + 100 * rank).backward()
        model[0].weight.grad.data.mul_(0.5)
        optimizer.step()
    optimizer.close()
    return bits(model.parameters())


@pytest.mark.parametrize("how", ["buckets", "bucket views", "hook"])
def test_distributed_data_parallel(how, daemon, job):
    results = ranks.run(_ddp, 2, daemon.shm, job, how)
    assert results[0] == results[1]
    reference = small_model()
    optimizer = torch.optim.SGD(reference.parameters(), **OPTIONS)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(2):
            for micro_step in range(2):
                (loss_of(reference, 2 * step + micro_step + 100 * rank) / 2).backward()
        reference[0].weight.grad.data.mul_(0.5)
        optimizer.step()
    for found, expected in zip(results[0], reference.parameters()):
        values = torch.frombuffer(bytearray(found), dtype=torch.float32)
        assert torch.allclose(values, expected.detach().reshape(-1), atol=1e-5)


def _own(connection, rank, endpoint, job, partition):
    model = small_model()
    options = {"partition": partition} if partition else {"reduction": "daemon"}
    optimizer = SGD(model.named_parameters(), **OPTIONS, endpoint=endpoint, job=job, **options)
    pieces = optimizer._served.attachment.session.pieces
    sizes = [each.numel() for each in model.parameters()]
    whole = {each.parameter for each in pieces if each.numel == sizes[each.parameter]}
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        assert in_place(optimizer) == whole
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.05, 0.05)
        optimizer.step()
    optimizer.close()
    return bits(model.parameters()), len(whole)


@pytest.mark.parametrize("partition", ["greedy", "contiguous", None])
def test_only_whole_gradients_are_views(partition, daemon, job):
    results = ranks.run(_own, 2, daemon.shm, job, partition)
    assert results[0][0] == results[1][0]
    count = sum(each for _, each in results)
    assert count == 12 if partition is None else 0 < count <= 6
    reference = small_model()
    optimizer = torch.optim.SGD(reference.parameters(), **OPTIONS)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(reference, step).backward()
        torch.nn.utils.clip_grad_value_(reference.parameters(), 0.05)
        optimizer.step()
    for found, expected in zip(results[0][0], reference.parameters()):
        values = torch.frombuffer(bytearray(found), dtype=torch.float32)
        assert torch.allclose(values, expected.detach().reshape(-1), atol=1e-6)
