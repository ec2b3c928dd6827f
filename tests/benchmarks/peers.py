"""The peers of optstate's kernels in benchmarks: torch's and DeepSpeed's AdamW."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import pathlib
from collections.abc import Callable, Sequence

import torch
from native_step import Arrays, Options, spread

# DeepSpeed would look for a GPU, and torch warn that CUDA has a compiler and none.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def deepspeed_class() -> tuple[type | None, str]:
    """DeepSpeedCPUAdam, compiled where it was not yet, or None and why not."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            _optimizer(DeepSpeedCPUAdam, [torch.nn.Parameter(torch.zeros(1))], Options())
    except (ImportError, RuntimeError) as error:
        return None, f"{error}\n{said.getvalue()}".strip()
    return DeepSpeedCPUAdam, ""


def set_threads(threads: int) -> None:
    """Sets the threads of torch and of each OpenMP in the process: DeepSpeed may have its own."""
    torch.set_num_threads(threads)
    maps = pathlib.Path("/proc/self/maps").read_text()
    for path in {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}:
        ctypes.CDLL(path).omp_set_num_threads(threads)


def _optimizer(kind: type, parameters: list, options: Options, **more):
    return kind(
        parameters,
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        **more,
    )


def _on(arrays: Sequence[Arrays], gradients: Sequence[torch.Tensor], step) -> tuple[list, list]:
    """Parameters on the masters, and the optimizer state on the arrays'."""
    parameters, states = [], []
    for its, gradient in zip(arrays, gradients):
        parameter = torch.nn.Parameter(its.master)
        parameter.grad = gradient
        parameters.append(parameter)
        states.append({"step": step(), "exp_avg": its.state[0], "exp_avg_sq": its.state[1]})
    return parameters, states


def _prepared(kind: type, arrays, gradients, options: Options, step, **more):
    parameters, states = _on(arrays, gradients, step)
    optimizer = _optimizer(kind, parameters, options, **more)
    for parameter, state in zip(parameters, states):
        optimizer.state[parameter] = state
    return optimizer, parameters


def torch_optimizer(arrays: Sequence[Arrays], gradients, options: Options, **more):
    def step():
        return torch.zeros((), dtype=torch.float32)

    return _prepared(torch.optim.AdamW, arrays, gradients, options, step, **more)


def deepspeed_optimizer(kind: type, arrays: Sequence[Arrays], gradients, options: Options):
    return _prepared(kind, arrays, gradients, options, int, adamw_mode=True)


def float32_step(make: Callable, arrays: Sequence[Arrays], options: Options, **more):
    """Gradient and parameter in float32: the optimizer's own step."""
    optimizer, _ = make(arrays, [its.gradients[0] for its in arrays], options, **more)
    return optimizer.step


def torch_mixed(arrays: Arrays, options: Options, *, keep_gradient: bool):
    """grad.float(), or a copy into a float32 gradient that is kept; fused step; copy_."""
    wide = spread(arrays.master.numel(), torch.float32)
    optimizer, (parameter,) = torch_optimizer([arrays], [wide], options, fused=True)

    @torch.no_grad()
    def step() -> None:
        if keep_gradient:
            wide.copy_(arrays.gradients[0])
        else:
            parameter.grad = arrays.gradients[0].float()
        optimizer.step()
        arrays.parameter.copy_(arrays.master)
        if not keep_gradient:
            parameter.grad = None

    return step


def deepspeed_mixed(kind: type, arrays: Arrays, options: Options, factor: float):
    """Copy into a float32 gradient that is kept, unscale, CPUAdam, copy_."""
    wide = spread(arrays.master.numel(), torch.float32)
    optimizer, _ = deepspeed_optimizer(kind, [arrays], [wide], options)

    @torch.no_grad()
    def step() -> None:
        wide.copy_(arrays.gradients[0])
        wide.mul_(factor)
        optimizer.step()
        arrays.parameter.copy_(arrays.master)

    return step
