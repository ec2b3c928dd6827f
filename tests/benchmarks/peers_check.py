"""All sides of peers_benchmark.py compute the same; looked at before any speed."""

from __future__ import annotations

import torch
from native_step import Arrays, Options, Step, Workers
from peers import (
    deepspeed_mixed,
    deepspeed_optimizer,
    float32_step,
    torch_mixed,
    torch_optimizer,
)

SIZES = (1, 255, 4097, 300_007)
STEPS = 5
FACTOR = 1.0 / 1024
# Each side rounds the master once or twice a step, by half of 1.2e-7 of it.
CLOSE = {"rtol": 1.2e-7 * STEPS * 2, "atol": 1e-6}


def _arrays(dtype, **more) -> list[Arrays]:
    return [Arrays(numel, dtype, seed=index, **more) for index, numel in enumerate(SIZES)]


def _masters_after(arrays: list[Arrays], *steps) -> torch.Tensor:
    for _ in range(STEPS):
        for step in steps:
            step()
    return torch.cat([its.master for its in arrays])


def _ours(workers: Workers, arrays: list[Arrays], options: Options, factor=1.0) -> torch.Tensor:
    step = Step(workers, arrays, options, factor)
    masters = _masters_after(arrays, step.update)
    for its in arrays:
        torch.testing.assert_close(its.parameter, its.master.to(its.parameter.dtype))
    step.close()
    return masters


def _check_float32(workers, options, deepspeed) -> None:
    ours = _ours(workers, _arrays(torch.float32), options)
    for more in ({"fused": True}, {"foreach": True}):
        arrays = _arrays(torch.float32)
        step = float32_step(torch_optimizer, arrays, options, **more)
        torch.testing.assert_close(ours, _masters_after(arrays, step), **CLOSE)
    if deepspeed is not None:
        arrays = _arrays(torch.float32)
        gradients = [its.gradients[0] for its in arrays]
        optimizer, _ = deepspeed_optimizer(deepspeed, arrays, gradients, options)
        torch.testing.assert_close(ours, _masters_after(arrays, optimizer.step), **CLOSE)


def _check_bfloat16(workers, options, deepspeed) -> None:
    ours = _ours(workers, _arrays(torch.bfloat16), options)
    for keep in (True, False):
        arrays = _arrays(torch.bfloat16)
        steps = [torch_mixed(its, options, keep_gradient=keep) for its in arrays]
        torch.testing.assert_close(ours, _masters_after(arrays, *steps), **CLOSE)
    if deepspeed is not None:
        scaled = {"scale": 1 / FACTOR}
        ours = _ours(workers, _arrays(torch.bfloat16, **scaled), options, FACTOR)
        arrays = _arrays(torch.bfloat16, **scaled)
        steps = [deepspeed_mixed(deepspeed, its, options, FACTOR) for its in arrays]
        torch.testing.assert_close(ours, _masters_after(arrays, *steps), **CLOSE)


def _check_formats(workers, options) -> None:
    before = torch.cat([its.master for its in _arrays(torch.bfloat16)])
    full = _ours(workers, _arrays(torch.bfloat16), options) - before
    # The part of an update that rounding the state costs, on average.
    for state, most in (("bfloat16", 0.02), ("dynamic8", 0.1)):
        rounded = _ours(workers, _arrays(torch.bfloat16, state=state), options) - before
        error = ((rounded - full).abs().mean() / full.abs().mean()).item()
        assert error < most, f"{state} state: updates are {error:.3f} away from float32 state's"


def _check_split(workers, options) -> None:
    """A split master takes the steps of a float32 one that begins with the same values."""
    split, full = (_arrays(torch.bfloat16, master=master) for master in ("split", "float32"))
    for its in full:
        its.master = its.parameter.float()
    for arrays in (split, full):
        step = Step(workers, arrays, options)
        for _ in range(STEPS):
            step.update()
        step.close()
    for its, other in zip(split, full):
        master = (its.parameter.view(torch.int16).int() << 16) + its.master.int()
        torch.testing.assert_close(master.view(torch.float32), other.master, rtol=0, atol=0)


def _check_sums(workers, options) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for ranks in (2, 4, 8):
            ours = _ours(workers, _arrays(dtype, gradients=ranks), options)
            arrays = _arrays(dtype, gradients=ranks)
            for its in arrays:
                its.parameter = its.master  # unused
                its.gradients = [sum(gradient.float() for gradient in its.gradients)]
            step = float32_step(torch_optimizer, arrays, options, fused=True)
            torch.testing.assert_close(ours, _masters_after(arrays, step), **CLOSE)


def _check_additions(workers, options) -> None:
    for ranks in (1, 2, 4, 8):
        for blocks in (False, True):
            arrays = _arrays(torch.float32, gradients=ranks)
            step = Step(workers, arrays, options)
            masters = [its.master.clone() for its in arrays]
            step.add_blocks() if blocks else step.add_vectors()
            step.close()
            for its, master in zip(arrays, masters):
                torch.testing.assert_close(its.parameter, master + sum(its.gradients))


def check(workers: Workers, options: Options, deepspeed: type | None) -> None:
    _check_float32(workers, options, deepspeed)
    _check_bfloat16(workers, options, deepspeed)
    _check_formats(workers, options)
    _check_split(workers, options)
    _check_sums(workers, options)
    _check_additions(workers, options)
