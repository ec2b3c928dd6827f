"""Clipping in the daemon is torch's."""

from __future__ import annotations

import math

import optstate
import pytest
import torch
from plain_optimizers import SHAPES
from training import gradients, parameters_of, set_gradients


def test_value_clipping_is_clip_grad_value(seed):
    ours, torchs = (parameters_of(SHAPES, seed, torch.float32) for _ in range(2))
    optimizer = optstate.SGD(ours, lr=0.1, max_value=0.3)
    reference = torch.optim.SGD(torchs, lr=0.1)
    for values in gradients(SHAPES, seed, 5):
        set_gradients(ours, values)
        set_gradients(torchs, [value.clone() for value in values])
        torch.nn.utils.clip_grad_value_(torchs, 0.3)
        optimizer.step()
        reference.step()
    for mine, theirs in zip(ours, torchs):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_norm_types_are_clip_grad_norms(norm_type, seed):
    shapes = [shape for shape in SHAPES if 0 not in shape]  # torch's Linf takes no empty ones
    ours, torchs = (parameters_of(shapes, seed, torch.float32) for _ in range(2))
    optimizer = optstate.SGD(ours, lr=0.1, max_norm=0.5, norm_type=norm_type)
    reference = torch.optim.SGD(torchs, lr=0.1)
    for values in gradients(shapes, seed, 5):
        set_gradients(ours, values)
        set_gradients(torchs, [value.clone() for value in values])
        norm = torch.nn.utils.clip_grad_norm_(torchs, 0.5, norm_type)
        optimizer.step()
        reference.step()
        assert optimizer.last_outcome.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    for mine, theirs in zip(ours, torchs):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_groups_are_clipped_by_their_own_norms(norm_type, seed):
    shapes = [[50], [60]]
    ours, torchs = (parameters_of(shapes, seed, torch.float32) for _ in range(2))
    groups = [{"params": ours[:1], "max_norm": 0.1}, {"params": ours[1:], "max_norm": 0.2}]
    optimizer = optstate.SGD(groups, lr=0.1, norm_type=norm_type)
    reference = torch.optim.SGD(torchs, lr=0.1)
    for values in gradients(shapes, seed, 5):
        set_gradients(ours, values)
        set_gradients(torchs, [value.clone() for value in values])
        for parameter, limit in zip(torchs, (0.1, 0.2)):
            torch.nn.utils.clip_grad_norm_([parameter], limit, norm_type)
        optimizer.step()
        reference.step()
    for mine, theirs in zip(ours, torchs):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
