"""Training runs whose tensors are in host memory, or on an emulated device."""

from __future__ import annotations

import optstate
import torch
from training import bits, small_model, train

STEPS = 5
REFUSAL = "operation not supported"


def trained(train_it, dtype=torch.float32, **options):
    """Returns the parameters' bits after training: within emulated(), of the device's tensors."""
    model = small_model(3, dtype)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, **options)
    train_it(model, optimizer)
    optimizer.close()
    return bits(model.parameters())


def plain(model, optimizer):
    train(model, optimizer, range(STEPS))
