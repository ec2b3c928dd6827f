"""Optimizers whose update needs a whole parameter: LAMB, Adafactor, Muon."""

from __future__ import annotations

import optstate
import pytest
import torch
from plain_optimizers import LAMB, MATRICES, STEPS, flat
from training import gradients, parameters_of, set_gradients

# No shape is without elements, by whose number torch's Adafactor divides.
WHOLE_SHAPES = [[4099], [64, 65], [65, 64], [3, 5, 7], [17], [1], []]
WHOLE = [
    ("LAMB", LAMB, {}),
    ("LAMB", LAMB, {"weight_decay": 0.1}),
    ("Adafactor", torch.optim.Adafactor, {}),
    ("Adafactor", torch.optim.Adafactor, {"weight_decay": 0.1, "d": 2.0, "beta2_decay": -0.5}),
    ("Adafactor", torch.optim.Adafactor, {"maximize": True, "eps": (1e-6, 1e-2)}),
]


def run_whole(optimizer_class, parameters, seed, options, steps):
    optimizer = optimizer_class(parameters, lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    shapes = [list(parameter.shape) for parameter in parameters]
    for values in gradients(shapes, seed, steps, missing=0.1):
        set_gradients(
            parameters, [None if v is None else v.to(parameters[0].dtype) for v in values]
        )
        optimizer.step()
        scheduler.step()
    return optimizer


@pytest.mark.parametrize(("name", "torchs_class", "options"), WHOLE)
def test_whole_parameter_optimizers(name, torchs_class, options, seed):
    ours, torchs = (parameters_of(WHOLE_SHAPES, seed, torch.float32) for _ in range(2))
    exact = parameters_of(WHOLE_SHAPES, seed, torch.float64)
    run_whole(torchs_class, exact, seed, options, STEPS)
    run_whole(torchs_class, torchs, seed, options, STEPS)
    run_whole(getattr(optstate, name), ours, seed, options, STEPS)
    truth = flat(exact)
    our_error = (flat(ours) - truth).square().mean().sqrt().item()
    torch_error = (flat(torchs) - truth).square().mean().sqrt().item()
    print(f"{name} {options}: rms error {our_error:.3e}, torch's {torch_error:.3e}")
    assert our_error <= 1.1 * torch_error + 1e-9


@pytest.mark.parametrize("options", [{}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}])
def test_muon(options, seed):
    """torch's Newton-Schulz runs in bfloat16, so that one rounding moves what follows: the
    runs stay together as two of torch's do whose gradients differ in the last bit."""
    ours, torchs, other = (parameters_of(MATRICES, seed, torch.float32) for _ in range(3))
    optimizers = [
        optstate.Muon(ours, lr=1e-2, **options),
        torch.optim.Muon(torchs, lr=1e-2, **options),
        torch.optim.Muon(other, lr=1e-2, **options),
    ]
    for values in gradients(MATRICES, seed, 50):
        for each, parameters in zip(optimizers, (ours, torchs, other)):
            nudge = 1 + 2**-20 if parameters is other else 1
            set_gradients(parameters, [value * nudge for value in values])
            each.step()
    for mine, theirs, nudged in zip(ours, torchs, other):
        moved = (nudged - theirs).norm().item()
        assert (mine - theirs).norm().item() <= 3 * moved + 1e-3 * theirs.norm().item()
    with pytest.raises(ValueError, match="2D"):
        optstate.Muon([torch.nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    ("name", "torchs_class"),
    [("Adafactor", torch.optim.Adafactor), ("Muon", torch.optim.Muon)],
)
def test_whole_state_goes_to_torch_and_back(name, torchs_class, seed):
    shapes = [[16, 9], [9, 16]] if name == "Muon" else WHOLE_SHAPES
    ours = parameters_of(shapes, seed, torch.float32)
    first = run_whole(getattr(optstate, name), ours, seed, {}, 5)
    carried = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    continued = torchs_class(carried, lr=1e-2)
    continued.load_state_dict(first.state_dict())
    returned = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    back = getattr(optstate, name)(returned, lr=1e-2)
    back.load_state_dict(continued.state_dict())
    for values in gradients(shapes, seed + 1, 5):
        for optimizer, parameters in ((first, ours), (continued, carried), (back, returned)):
            set_gradients(parameters, [value.clone() for value in values])
            optimizer.step()
    for mine, there, again in zip(ours, carried, returned):
        assert torch.equal(mine, again)
        torch.testing.assert_close(mine, there, rtol=2e-2, atol=2e-3)
