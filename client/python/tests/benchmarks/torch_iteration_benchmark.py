"""A whole training iteration through the daemon against torch's fused AdamW.

Forward, backward and step of an MLP with a small batch, so that parameters count. Both sides
have equal parameters and batches in one process and take turns, so that what else the machine
does hits both. Printed are the median times and the median of the ratios torch / optstate of
neighbours, with the quartiles: above 1, optstate is faster. With bfloat16 torch's side is what
trainers do: float32 masters that the step is taken with, and copies to and fro.

    torch_iteration_benchmark.py [--elements 16M] [--rounds 20] [--batch 8] [--copies] [--overlap]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Callable

import optstate
import torch

WIDTH = 1024  # a layer has 1 Mi parameters


def made_model(elements: int, dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(max(1, elements // WIDTH**2)):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers).to(dtype)


def torchs_step(parameters: list[torch.nn.Parameter], max_norm: float | None) -> Callable[[], None]:
    masters = parameters
    if parameters[0].dtype is not torch.float32:
        masters = [torch.nn.Parameter(each.detach().float()) for each in parameters]
    optimizer = torch.optim.AdamW(masters, fused=True)

    def step() -> None:
        if masters is not parameters:
            for master, parameter in zip(masters, parameters):
                master.grad = parameter.grad.float()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters, max_norm)
        optimizer.step()
        if masters is not parameters:
            with torch.no_grad():
                for master, parameter in zip(masters, parameters):
                    parameter.copy_(master)

    return step


def iteration(model: torch.nn.Module, batch: torch.Tensor, step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    for parameter in model.parameters():
        parameter.grad = None
    model(batch).float().square().mean().backward()
    step()
    return time.perf_counter() - begin


def measure(dtype: torch.dtype, max_norm: float | None, arguments: argparse.Namespace) -> str:
    ours, theirs = made_model(arguments.elements, dtype), made_model(arguments.elements, dtype)
    batch = torch.randn(arguments.batch, WIDTH, dtype=dtype)
    with optstate.AdamW(
        ours.parameters(),
        endpoint=arguments.endpoint,
        max_norm=max_norm,
        parameters_as_views=not arguments.copies,
        overlap=arguments.overlap,
    ) as optimizer:
        step = torchs_step(list(theirs.parameters()), max_norm)
        pairs = []
        for turn in range(arguments.rounds + 3):
            if turn % 2:
                mine = iteration(ours, batch, optimizer.step)
                other = iteration(theirs, batch, step)
            else:
                other = iteration(theirs, batch, step)
                mine = iteration(ours, batch, optimizer.step)
            pairs.append((mine, other, optimizer.last_outcome.update_ns * 1e-9))
    pairs = pairs[3:]  # page faults and lazy state
    low, ratio, high = statistics.quantiles([other / mine for mine, other, _ in pairs], n=4)
    mine, other, update = (1e3 * statistics.median(each) for each in zip(*pairs))
    what = str(dtype).removeprefix("torch.") + (", clipped" if max_norm is not None else "")
    return (
        f"{what:20} optstate {mine:7.1f} ms (update {update:6.1f}), torch {other:7.1f} ms,"
        f" torch / optstate {ratio:.2f} ({low:.2f} to {high:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", default="16M", help="of the model; M: 2^20")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--endpoint", default="embedded")
    parser.add_argument("--copies", action="store_true", help="parameters are no views")
    parser.add_argument("--overlap", action="store_true", help="gradients are pushed in backward")
    arguments = parser.parse_args()
    arguments.elements = int(arguments.elements.removesuffix("M")) << 20
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for dtype in (torch.float32, torch.bfloat16):
        for max_norm in (None, 1.0):
            print(measure(dtype, max_norm, arguments), flush=True)


if __name__ == "__main__":
    main()
