"""Tensors and hyperparameters that torch takes and few trainers have."""

from __future__ import annotations

import copy

import optstate
import pytest
import torch


def test_memory_that_holds_minus_the_values():
    """Gradients and parameters with torch's negative bit, as of an imaginary part."""

    def run(optimizer_class):
        real = torch.nn.Parameter(torch.ones(1))
        negated = torch.nn.Parameter(torch._neg_view(torch.ones(3)))
        optimizer = optimizer_class([real, negated], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            part = torch.complex(torch.zeros(1), real).conj().imag
            (part.sum() + negated.square().sum()).backward()
            real.grad = torch._neg_view(-real.grad.clone())
            assert real.grad.is_neg() and negated.is_neg()
            optimizer.step()
        return [*real.tolist(), *negated.tolist()]

    assert run(optstate.SGD) == pytest.approx(run(torch.optim.SGD))


def test_a_parameter_that_is_transposed_where_it_lies():
    def run(optimizer_class):
        parameter = torch.nn.Parameter(torch.arange(4.0).reshape(2, 2))
        optimizer = optimizer_class([parameter], lr=0.1)
        parameter.square().sum().backward()
        optimizer.step()
        parameter.data = parameter.data.t()
        if optimizer_class is optstate.SGD:
            optimizer.upload_parameters()
        optimizer.zero_grad()
        (parameter * torch.arange(4.0).reshape(2, 2)).sum().backward()
        optimizer.step()
        return parameter.flatten().tolist()

    assert run(optstate.SGD) == pytest.approx(run(torch.optim.SGD))


def test_a_parameter_that_comes_back_to_its_place_in_another_order():
    """model.to(memory_format=...) may change the order of elements so, without a new version."""

    def run(optimizer_class):
        parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        optimizer = optimizer_class([parameter], lr=0.1)
        parameter.square().sum().backward()
        optimizer.step()
        place = parameter.data.view(-1)
        values = parameter.detach().clone()
        place.copy_(values.t().reshape(-1))
        parameter.data = place.as_strided((2, 3), (1, 2))
        assert torch.equal(parameter, values)
        optimizer.zero_grad()
        (parameter * values).sum().backward()
        optimizer.step()
        return parameter.flatten().tolist()

    assert run(optstate.SGD) == pytest.approx(run(torch.optim.SGD))


@pytest.mark.parametrize("name", ["maximize", "nesterov"])
def test_flags_may_be_none_as_in_torch(name):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = optstate.SGD([parameter], lr=0.1, momentum=0.9, **{name: None})
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert parameter.tolist() == pytest.approx([0.9, 0.9])


@pytest.mark.parametrize("name", ["lr", "dampening"])
def test_a_hyperparameter_that_is_none_is_refused(name):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = optstate.SGD([parameter], lr=0.1)
    optimizer.param_groups[0][name] = None
    parameter.grad = torch.ones(2)
    with pytest.raises(ValueError, match=f"Invalid {name}: None"):
        optimizer.step()
    assert parameter.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("how", ["grow", "copy"])
def test_a_private_job_keeps_its_loss_scale(how):
    parameter = torch.nn.Parameter(torch.ones(2))
    scaler = optstate.LossScaler(init_scale=8.0, growth_interval=1)
    optimizer = optstate.SGD([parameter], lr=0.1, loss_scaler=scaler)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.scale(parameter.sum()).backward()
        optimizer.step()
    assert optimizer.loss_scale == 64.0
    if how == "grow":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    else:
        optimizer = copy.deepcopy(optimizer)
        optimizer.attach()
    assert optimizer.loss_scale == 64.0
