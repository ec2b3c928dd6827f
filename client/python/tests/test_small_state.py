"""state_dtype= and master=: state and masters that take less memory."""

from __future__ import annotations

import functools

import optstate
import pytest
import torch
from plain_optimizers import MATRICES, SHAPES, STEPS
from training import gradients, parameters_of, set_gradients


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "dynamic8"], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Lion", "LAMB", "Adafactor", "Muon"])
def test_small_state_follows_the_float32_run(name, state_dtype, seed):
    """200 steps towards a target: with less state the loss comes down as far."""
    options = {"SGD": {"momentum": 0.9}}.get(name, {})
    lr = {"SGD": 0.05, "Lion": 3e-3, "Muon": 0.1}.get(name, 1e-2)
    # Adafactor keeps so little for a matrix that it is float32 in any case.
    shape = (5600,) if name == "Adafactor" else (70, 80)
    torch.manual_seed(seed + 1)
    target = torch.randn(shape)
    losses = []
    for dtype in (None, state_dtype):
        torch.manual_seed(seed)
        parameter = torch.nn.Parameter(torch.randn(shape))
        optimizer = getattr(optstate, name)([parameter], lr=lr, state_dtype=dtype, **options)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = (parameter - target).square().mean()
            loss.backward()
            parameter.grad.mul_(100)
            optimizer.step()
        losses.append(loss.item())
        states = optimizer.state_dict()["state"][0]
        assert all(torch.isfinite(value).all() for value in states.values())
        optimizer.close()
    print(f"{name} {state_dtype}: loss {losses[1]:.3e}, with float32 {losses[0]:.3e}")
    assert losses[1] <= 1.5 * losses[0] + 1e-3


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "dynamic8"], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Adafactor", "Muon"])
def test_small_state_is_reproducible_and_survives(name, state_dtype, seed, job):
    """Equal bits over both wires and partitions, and after a new trainer took over."""
    make = functools.partial(getattr(optstate, name), state_dtype=state_dtype)
    shapes = MATRICES if name == "Muon" else SHAPES

    def train(job_name, endpoint=None, stop=None):
        parameters = parameters_of(shapes, seed, torch.float32)
        optimizer = make(parameters, job=job_name, endpoint=endpoint)
        for step, values in enumerate(gradients(shapes, seed, 10)):
            if step == stop:
                optimizer.close()
                parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in parameters]
                optimizer = make(parameters, job=job_name)
            set_gradients(parameters, values)
            optimizer.step()
        return parameters

    whole = train(f"{job}-whole")
    for other in (train(f"{job}-embedded", "embedded"), train(f"{job}-twice", stop=5)):
        assert all(map(torch.equal, whole, other))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "LAMB", "Adafactor", "Muon"])
def test_split_master_takes_the_steps_of_the_float32_one(name, seed):
    """bfloat16 parameters: equal but for those half way between two bfloat16."""
    shapes = [(65, 130), (30, 10) if name == "Muon" else (300,)]
    results = []
    for master in ("float32", "split"):
        parameters = parameters_of(shapes, seed, torch.bfloat16)
        optimizer = getattr(optstate, name)(parameters, lr=1e-3, master=master)
        for values in gradients(shapes, seed, 20):
            set_gradients(parameters, [value.bfloat16() for value in values])
            optimizer.step()
        results.append(parameters)
        optimizer.close()
    different = total = 0
    for one, other in zip(*results):
        different += (one != other).sum().item()
        total += one.numel()
        torch.testing.assert_close(one, other, rtol=0.008, atol=0)
    print(f"{name}: {different} of {total} parameters lay half way")
    assert different < total / 1000


def test_split_master_needs_bfloat16(job):
    half = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(optstate.InvalidArgumentError, match="split master.*float16"):
        optstate.AdamW([half], job=job, master="split").step()
    with pytest.raises(ValueError, match="Invalid master"):
        optstate.AdamW([half], master="half")
    # float32 parameters are their own.
    full = torch.nn.Parameter(torch.zeros(4))
    full.grad = torch.ones(4)
    optstate.AdamW([full], job=f"{job}-full", master="split").step()
    assert full.abs().sum() > 0


@pytest.mark.parametrize("sign", [1, -1])
def test_split_master_half_way_comes_back(sign, job):
    """A master that rounds away from 0, not to even, is the parameter's all the same."""
    master = torch.tensor([sign * (1 + 2**-8), sign * 1.25])
    parameter = torch.nn.Parameter(torch.tensor([sign * (1 + 2**-7), sign * 1.25]).bfloat16())
    optimizer = optstate.SGD([parameter], lr=1.0, job=job, master="split")
    state = optimizer.state_dict()
    state["state"][0] = {"master_param": master}
    optimizer.load_state_dict(state)
    parameter.grad = torch.tensor([sign * 2**-8, 0.0]).bfloat16()
    optimizer.step()
    assert torch.equal(parameter, torch.tensor([sign * 1.0, sign * 1.25]).bfloat16())
