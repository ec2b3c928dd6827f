"""Every optimizer against the one of torch (Lion: against its paper's), in float64 too."""

from __future__ import annotations

import inspect
import math

import optstate
import pytest
import torch
from plain_optimizers import SHAPES, STEPS, Lion, flat
from training import gradients, parameters_of, set_gradients

# name: ours, torch's, and sets of options beside lr.
CASES = {
    "SGD": [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.5, "maximize": True},
    ],
    "Adagrad": [
        {},
        {"lr_decay": 0.01, "weight_decay": 0.1},
        {"initial_accumulator_value": 0.5},
        {"maximize": True, "eps": 1e-3},
    ],
    "RMSprop": [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"centered": True, "alpha": 0.9},
        {"centered": True, "momentum": 0.8, "maximize": True},
    ],
    "NAdam": [
        {},
        {"weight_decay": 0.1, "momentum_decay": 0.01},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True, "betas": (0.8, 0.95)},
    ],
    "RAdam": [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True, "betas": (0.8, 0.95)},
    ],
    "Lion": [{}, {"weight_decay": 0.1}, {"maximize": True, "betas": (0.8, 0.95)}],
}
TORCHS = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Lion": Lion,
}
ALL = [(name, options) for name, cases in CASES.items() for options in cases]
IDS = [f"{name}-{'-'.join(options) or 'defaults'}" for name, options in ALL]
TINY_LR = {"Lion"}  # its updates are of the size of lr


def run(optimizer_class, parameters, seed, options, steps=STEPS, dtype=None):
    lr = 1e-3 if optimizer_class in (Lion, optstate.Lion) else 1e-2
    optimizer = optimizer_class(parameters, lr=lr, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for values in gradients(SHAPES, seed, steps, missing=0.1):
        if dtype is not None:
            values = [None if value is None else value.to(dtype) for value in values]
        set_gradients(parameters, values)
        optimizer.step()
        scheduler.step()
    return optimizer


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_error_is_not_above_torchs(name, options, seed, record_property):
    """200 steps with a schedule and missing gradients: the error against float64 is
    not above that of torch's fp32, in the mean over the elements (see test_numerics)."""
    torchs = parameters_of(SHAPES, seed, torch.float32)
    exact = parameters_of(SHAPES, seed, torch.float64)
    ours = parameters_of(SHAPES, seed, torch.float32)
    run(TORCHS[name], exact, seed, options)
    run(TORCHS[name], torchs, seed, options)
    run(getattr(optstate, name), ours, seed, options)
    truth = flat(exact)
    our_error, torch_error = flat(ours) - truth, flat(torchs) - truth
    excess = our_error.square() - torch_error.square()
    standard_error = excess.std() / math.sqrt(excess.numel())
    ratio = (our_error.square().mean() / torch_error.square().mean()).sqrt().item()
    record_property("error_ratio", ratio)
    print(f"{name} {options}: rms error / torch's {ratio:.3f}")
    # Where signs decide (Lion), an element whose sign is in doubt goes elsewhere, in
    # torch's run too; such runs are compared by the elements that agree.
    assert excess.mean() <= 4 * standard_error or ratio <= 1.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_16_bit_parameters_follow_the_float32_run(name, dtype, seed):
    options = CASES[name][-1]
    start = parameters_of(SHAPES, seed, dtype)
    masters = [torch.nn.Parameter(each.detach().float()) for each in start]
    stream = run(getattr(optstate, name), start, seed, options, 20, dtype)
    reference = getattr(optstate, name)
    lr = 1e-3 if name in TINY_LR else 1e-2
    optimizer = reference(masters, lr=lr, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for values in gradients(SHAPES, seed, 20, missing=0.1):
        rounded = [None if value is None else value.to(dtype).float() for value in values]
        set_gradients(masters, rounded)
        optimizer.step()
        scheduler.step()
    for mine, master in zip(start, masters):
        assert torch.equal(mine, master.to(dtype))
    stream.close()


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
def test_state_goes_to_torch_and_back(name, options, seed):
    """Half the steps here, then half in torch from our state_dict, and the other way
    round, come to the same as all the steps in one."""
    ours, theirs = (parameters_of(SHAPES, seed, torch.float32) for _ in range(2))
    first = run(getattr(optstate, name), ours, seed, options, 10)
    reference = run(TORCHS[name], theirs, seed, options, 10)
    state = first.state_dict()
    carried = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    continued = TORCHS[name](carried, lr=1e-2, **options)
    continued.load_state_dict(state)
    returned = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    back = getattr(optstate, name)(returned, lr=1e-2, **options)
    back.load_state_dict(continued.state_dict())
    from_torch = [torch.nn.Parameter(each.detach().clone()) for each in theirs]
    taken = getattr(optstate, name)(from_torch, lr=1e-2, **options)
    taken.load_state_dict(reference.state_dict())
    for values in gradients(SHAPES, seed + 1, 10):
        for optimizer, parameters in (
            (first, ours),
            (continued, carried),
            (back, returned),
            (taken, from_torch),
        ):
            set_gradients(parameters, [value.clone() for value in values])
            optimizer.step()
    for mine, there, again, taken_over in zip(ours, carried, returned, from_torch):
        assert torch.equal(mine, again)
        torch.testing.assert_close(mine, there, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine, taken_over, rtol=1e-4, atol=1e-4)


def test_signatures_are_torchs_and_ours():
    for name in (*CASES, "Adam", "AdamW"):
        parameters = inspect.signature(getattr(optstate, name)).parameters
        if name != "Lion":
            torchs = inspect.signature(TORCHS.get(name, getattr(torch.optim, name))).parameters
            assert list(torchs) == list(parameters)[: len(torchs)]
        for ours in ("job", "endpoint", "max_norm", "reduction", "overlap", "loss_scaler"):
            assert parameters[ours].kind is inspect.Parameter.KEYWORD_ONLY


def test_options_are_fixed_and_bad_values_named():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optstate.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="momentum of param_groups"):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0
    optimizer.param_groups[0]["weight_decay"] = -1
    with pytest.raises(ValueError, match="Invalid weight_decay value: -1.0"):
        optimizer.step()
    with pytest.raises(ValueError, match="Invalid state_dtype"):
        optstate.SGD([parameter], state_dtype=torch.float64)
    with pytest.raises(ValueError, match="Invalid accumulate_dtype"):
        optstate.SGD([parameter], accumulate=True, accumulate_dtype="bfloat16")
    with pytest.raises(ValueError, match="Invalid reduction"):
        optstate.SGD([parameter], reduction="both")
