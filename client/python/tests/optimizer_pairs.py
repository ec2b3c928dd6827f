"""An optimizer of ours beside torch's, after the same steps."""

from __future__ import annotations

import optstate
import torch
from training import small_model, train

OPTIMIZERS = {
    "AdamW": {"lr": 0.01},
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Adagrad": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},
}


def is_close(value, expected):
    """Equal but for rounding; a sum that comes to about 0 has rounding of its terms' size."""
    size = expected.abs().max().item() if expected.numel() else 0.0
    return torch.allclose(value, expected, rtol=1e-4, atol=1e-7 + 1e-6 * size)


def both(name: str, steps: int = 3):
    """(model, optimizer) of ours and of torch's, after the same steps."""
    made = []
    for package in (optstate, torch.optim):
        model = small_model()
        optimizer = getattr(package, name)(model.parameters(), **OPTIMIZERS[name])
        train(model, optimizer, range(steps))
        made.append((model, optimizer))
    return made


def arrays_of(optimizer, parameter):
    return {key: each for key, each in optimizer.state[parameter].items() if key != "step"}
