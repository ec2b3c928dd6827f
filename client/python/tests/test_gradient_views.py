"""Gradients are views of the gradient area: what a script does to them is in the step."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import optstate
import pytest
import torch
from gradients_in_place import SGD, assert_as_torchs, backward, in_place, run, viewable
from optstate._torch.gradients import views as gradient_views
from training import bits, largest_difference, loss_of, small_model


def test_gradients_of_backward_are_views():
    """backward() makes gradients as views, and step() copies none of them."""

    def between(model, optimizer, step):
        loss_of(model, step).backward()
        if not isinstance(optimizer, SGD):
            return
        views = optimizer._served.attachment.gradients.views
        if views is None:
            return
        assert in_place(optimizer) == set(range(6))
        gathered = optimizer._served.attachment.gradients.gather()
        assert list(gathered.pointers) == [views._addresses[index] for index in range(6)]

    assert_as_torchs(between)


def test_each_view_has_a_storage_of_its_own():
    model = small_model()
    with SGD(model.parameters(), lr=0.1) as optimizer:
        backward(model, optimizer, 0)
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient.untyped_storage().nbytes() == 4 * parameter.numel()
            assert (gradient.storage_offset(), gradient._base) == (0, None)
            assert gradient.stride() == parameter.stride()
            assert not gradient.requires_grad and gradient.is_leaf


def _clamp(gradient):
    gradient.data.clamp_(-0.01, 0.01)


def _numpy(gradient):
    gradient.detach().numpy()[...] *= 0.5


def _alias(gradient):
    gradient.view(-1).detach().mul_(0.5)


def _data(gradient):
    gradient.data = gradient.data * 0.3


def _set(gradient):
    gradient.set_(gradient.clone().mul_(0.3))


@pytest.mark.parametrize("edit", [_clamp, _numpy, _alias, _data, _set, torch.Tensor.zero_])
def test_edits_of_a_gradient(edit):
    def between(model, optimizer, step):
        backward(model, optimizer, step)
        for index, parameter in enumerate(model.parameters()):
            if (step + index) % 3:
                edit(parameter.grad)

    assert_as_torchs(between)


def _clip_norm(model, parameters):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _clip_value(model, parameters):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _foreach(model, parameters):
    torch._foreach_mul_([parameter.grad for parameter in parameters], 0.1)


def _backward_again(model, parameters):
    loss_of(model, 77).backward()
    loss_of(model, 78).backward()


def _replace(model, parameters):
    for parameter in parameters[::2]:
        parameter.grad = parameter.grad * 0.5


def _none(model, parameters):
    for parameter in parameters[1:4]:
        parameter.grad = None


def _zero_in_place(model, parameters):
    model.zero_grad(set_to_none=False)
    loss_of(model, 79).backward()


def _zero_to_none(model, parameters):
    model.zero_grad()
    loss_of(model, 80).backward()


def _drop_all(model, parameters):
    model.zero_grad()


def _transposed(model, parameters):
    parameters[0].grad = parameters[0].grad.t().contiguous().t() * 2


def _expanded(model, parameters):
    parameters[2].grad = torch.full((1,), 0.25).expand(16)


def _negated(model, parameters):
    parameters[2].grad = torch.complex(torch.zeros(16), parameters[2].grad).conj().imag


def _other_dtype_and_back(model, parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad.bfloat16().float()


@pytest.mark.parametrize(
    "change",
    [
        _clip_norm,
        _clip_value,
        _foreach,
        _backward_again,
        _replace,
        _none,
        _zero_in_place,
        _zero_to_none,
        _drop_all,
        _transposed,
        _expanded,
        _negated,
        _other_dtype_and_back,
    ],
)
def test_changes_between_backward_and_step(change):
    def between(model, optimizer, step):
        backward(model, optimizer, step)
        if step % 3 != 2:
            change(model, list(model.parameters()))

    assert_as_torchs(between)


def _two_alike():
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.Linear(8, 4))


def _exchange(model):
    """Each is copied to where the other is."""
    model[0].weight.grad, model[1].weight.grad = model[1].weight.grad, model[0].weight.grad


def _rotate(model):
    a, b, c = (model[i].bias.grad for i in range(3))
    model[0].bias.grad, model[1].bias.grad, model[2].bias.grad = b, c, a


def _share(model):
    model[1].weight.grad = model[0].weight.grad


def _part_of_another(model):
    model[1].bias.grad = model[2].weight.grad[3]
    model[2].weight.grad = torch.ones(8, 8)


def _transpose_of_itself(model):
    model[1].weight.grad = model[1].weight.grad.t()


def _transpose_of_another(model):
    model[2].weight.grad = model[0].weight.grad.t()
    model[0].weight.grad = torch.full((8, 8), 0.125)


@pytest.mark.parametrize(
    "exchange",
    [_exchange, _rotate, _share, _part_of_another, _transpose_of_itself, _transpose_of_another],
)
def test_a_gradient_in_the_place_of_another(exchange):
    def between(model, optimizer, step):
        backward(model, optimizer, step)
        if step % 2:
            exchange(model)

    assert_as_torchs(between, model=_two_alike)


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_a_flat_buffer_stays_the_script_s(sets_to_none):
    """A script that reduces gradients in one buffer edits them there after backward()."""

    def between(model, optimizer, step):
        parameters = list(model.parameters())
        flat = torch.zeros(sum(each.numel() for each in parameters))
        begin = 0
        for parameter in parameters:
            part = flat[begin : begin + parameter.numel()]
            parameter.grad = part.view_as(parameter)
            begin += parameter.numel()
        backward(model, optimizer, step)
        flat.mul_(0.5)
        if sets_to_none:
            parameters[0].grad = None
        return flat.tolist()

    assert_as_torchs(between)


def test_a_lone_tensor_given_as_a_gradient_stays_the_script_s():
    def between(model, optimizer, step):
        given = torch.full_like(model[3].weight, 0.5)
        alias = given.detach()
        model[3].weight.grad = given
        del given
        backward(model, optimizer, step)
        alias.mul_(0.5)
        return alias.tolist()

    assert_as_torchs(between)


def test_numpy_s_memory_stays_the_script_s():
    def between(model, optimizer, step):
        array = np.full((4, 16), 0.5, dtype=np.float32)
        model[3].weight.grad = torch.from_numpy(array)
        backward(model, optimizer, step)
        array *= 0.5
        return array.tolist()

    assert_as_torchs(between)


def test_grad_scaler():
    def run_with(optimizer_class, **options):
        model = small_model()
        optimizer = optimizer_class(model.parameters(), lr=0.05, momentum=0.9, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 3:
                model[0].weight.grad[0, 0] = float("inf")
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return model

    ours = run_with(SGD)
    assert bits(ours.parameters()) == bits(run_with(SGD, gradients_as_views=False).parameters())
    assert largest_difference(ours, run_with(torch.optim.SGD)) < 1e-6


@pytest.mark.parametrize("reduction", ["trainer", "daemon"])
def test_micro_steps(reduction):
    """Each is in the area while the daemon sums the one before."""

    def train(gradients_as_views):
        model = small_model()
        optimizer = SGD(
            model.parameters(),
            lr=0.05,
            momentum=0.9,
            accumulate=True,
            reduction=reduction,
            gradients_as_views=gradients_as_views,
        )
        with optimizer:
            for step in range(5):
                for micro_step in range(3):
                    backward(model, optimizer, 10 * step + micro_step)
                    if gradients_as_views:
                        assert in_place(optimizer) == set(range(6))
                    if micro_step < 2:
                        optimizer.accumulate_step()
                model[0].weight.grad.data.mul_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        return model

    assert bits(train(True).parameters()) == bits(train(False).parameters())


def test_aborted_micro_steps():
    def train(gradients_as_views):
        model = small_model()
        options = {"accumulate": True, "gradients_as_views": gradients_as_views}
        with SGD(model.parameters(), lr=0.1, **options) as optimizer:
            for step in range(4):
                backward(model, optimizer, step)
                optimizer.accumulate_step()
                backward(model, optimizer, 50 + step)
                if step % 2:
                    optimizer.abort_step()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
        return model

    assert bits(train(True).parameters()) == bits(train(False).parameters())


def test_no_gradient_no_update():
    model = small_model()
    with SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) as optimizer:
        backward(model, optimizer, 0)
        optimizer.step()
        optimizer.zero_grad()
        before = bits(model.parameters())
        optimizer.step()
        assert bits(model.parameters()) == before
        model[3](torch.ones(16)).sum().backward()
        optimizer.step()
        assert [a == b for a, b in zip(before, bits(model.parameters()))] == [True] * 4 + [
            False
        ] * 2


def test_copies_of_a_model_with_gradients():
    model = small_model()
    with SGD(model.parameters(), lr=0.1) as optimizer:
        backward(model, optimizer, 0)
        gradients = [parameter.grad for parameter in model.parameters()]
        values = bits(gradients)
        saved = io.BytesIO()
        torch.save(gradients, saved)
        assert saved.tell() < 20_000  # and not the whole area
        saved.seek(0)
        copies = [
            copy.deepcopy(gradients),
            pickle.loads(pickle.dumps(gradients)),
            torch.load(saved),
            [each.clone() for each in gradients],
        ]
        for each in copies:
            assert bits(each) == values
            for tensor in each:
                tensor.mul_(2)
        assert bits(gradients) == values
        other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        optimizer.step()
        assert other[0].weight.grad is None


def test_small_gradients_are_copied(monkeypatch):
    monkeypatch.setattr(gradient_views, "BYTES_MIN", 4 * 16 * 8)
    model = small_model()
    with SGD(model.parameters(), lr=0.1) as optimizer:
        assert viewable(optimizer) == {0}
        assert not model[0].bias._post_accumulate_grad_hooks
        backward(model, optimizer, 0)
        assert in_place(optimizer) == {0}
        optimizer.step()


@pytest.mark.parametrize(
    "wire, options", [("shm", {"gradients_as_views": False}), ("grpc_unix", {})]
)
def test_without_views(wire, options, daemon):
    model = small_model()
    endpoint = getattr(daemon, wire)
    with SGD(model.parameters(), lr=0.1, endpoint=endpoint, **options) as optimizer:
        backward(model, optimizer, 0)
        assert not in_place(optimizer)
        assert not any(each._post_accumulate_grad_hooks for each in model.parameters())
        optimizer.step()


def test_memory(daemon, job):
    model = small_model()
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    with SGD(model.parameters(), lr=0.1, job=job) as optimizer:
        assert optimizer.memory().gradient_views == 0
        backward(model, optimizer, 0)
        assert optimizer.memory().gradient_views == size
        model[0].bias.grad = torch.zeros(16)
        assert optimizer.memory().gradient_views == size - 64
        assert optimizer.memory().gradients == size


def test_the_closure_s_gradients():
    model, reference = small_model(), small_model()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)

    def closure_of(which, optimizer, step):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(which, step)
            loss.backward()
            return loss

        return closure

    with SGD(model.parameters(), lr=0.1) as ours:
        for step in range(4):
            ours.step(closure_of(model, ours, step))
            theirs.step(closure_of(reference, theirs, step))
            assert in_place(ours) == set(range(6))
    assert largest_difference(model, reference) < 1e-6


def test_both_ways_are_the_same_bits_with_every_optimizer():
    for name in ("AdamW", "Adagrad", "RMSprop", "Lion", "Adafactor"):
        results = []
        for views in (True, False):
            model = small_model()
            with getattr(optstate, name)(
                model.parameters(), lr=0.01, gradients_as_views=views, max_norm=0.5
            ) as optimizer:
                for step in range(4):
                    optimizer.zero_grad()
                    backward(model, optimizer, step)
                    optimizer.step()
            results.append(bits(model.parameters()))
        assert results[0] == results[1], name


def test_run_tells_bits_apart():
    """The comparison of these tests can fail."""

    def between(model, optimizer, step):
        backward(model, optimizer, step)
        if isinstance(optimizer, SGD) and step == 3:
            model[0].bias.grad.data[0] += 1e-3

    assert bits(run(SGD, between)[0].parameters()) != bits(run(SGD, backward)[0].parameters())
