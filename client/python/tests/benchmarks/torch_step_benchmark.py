"""One optimizer step through the daemon against torch's fused AdamW.

Both have equal parameters and gradients in one process, and take turns step by
step, so that what else the machine does hits both. Printed is the median time
of each and the median of the ratios torch / optstate of neighbours, with the
quartiles: above 1, optstate is faster. Clipping is part of it with --max-norm. With bfloat16
torch's side steps with float32 masters, and copies to and fro.

    torch_step_benchmark.py [--elements 1M,16M,64M] [--rounds 30] [--endpoint embedded] [--copies]
                            [--gradient-views | --no-gradient-views] [--dtype bfloat16]
                            [--max-norm 1]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import optstate
import torch

MATRIX = 1 << 20  # elements of one parameter


def make_parameters(
    elements: int, seed: int, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [MATRIX] * (elements // MATRIX) or [elements]
    values = [torch.randn(n, generator=generator).to(dtype) for n in shapes]
    parameters = list(map(torch.nn.Parameter, values))
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator) * 1e-3
        parameter.grad = gradient.to(dtype)
    return parameters


def torchs_step(parameters: list[torch.nn.Parameter], max_norm: float | None) -> Callable[[], None]:
    """A step of the fused AdamW, of 16-bit parameters with float32 masters."""
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


def timed(step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def measure(elements: int, arguments: argparse.Namespace) -> str:
    dtype = getattr(torch, arguments.dtype)
    ours, theirs = make_parameters(elements, 1, dtype), make_parameters(elements, 1, dtype)
    with optstate.AdamW(
        ours,
        endpoint=arguments.endpoint,
        max_norm=arguments.max_norm,
        parameters_as_views=not arguments.copies,
        gradients_as_views=arguments.gradient_views,
    ) as optimizer:
        for parameter in ours:  # the same gradients, made by backward()
            gradient, parameter.grad = parameter.grad, None
            (parameter * gradient).sum().backward()
        torch_step = torchs_step(theirs, arguments.max_norm)
        pairs = []
        for turn in range(arguments.rounds + 3):
            if turn % 2:
                ours_s, torch_s = timed(optimizer.step), timed(torch_step)
            else:
                torch_s, ours_s = timed(torch_step), timed(optimizer.step)
            pairs.append((ours_s, torch_s, optimizer.last_outcome.update_ns * 1e-9))
    pairs = pairs[3:]  # page faults and lazy state
    low, ratio, high = statistics.quantiles([theirs / ours for ours, theirs, _ in pairs], n=4)
    ours_ms, torch_ms, update_ms = (1e3 * statistics.median(each) for each in zip(*pairs))
    return (
        f"{elements / 1e6:8.1f} M   {ours_ms:9.2f} ms   {update_ms:9.2f} ms   {torch_ms:9.2f} ms"
        f"   {ratio:5.2f} ({low:.2f}-{high:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", default="1M,16M,64M")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--endpoint", default="embedded")
    parser.add_argument("--copies", action="store_true", help="parameters are no views")
    views = parser.add_mutually_exclusive_group()
    views.add_argument(
        "--gradient-views", action="store_true", default=None, help="gradients are views"
    )
    views.add_argument(
        "--no-gradient-views",
        dest="gradient_views",
        action="store_false",
        default=None,
        help="gradients are copied",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-norm", type=float)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    what = f"{arguments.dtype}, {arguments.endpoint}, {arguments.rounds} rounds"
    print(f"{what}, torch {torch.__version__}")
    print("  elements       optstate   of it update   torch fused   torch / optstate (quartiles)")
    for text in arguments.elements.split(","):
        elements = int(float(text.rstrip("Mm")) * 1e6) if text[-1] in "Mm" else int(text)
        print(measure(elements, arguments), flush=True)


if __name__ == "__main__":
    main()
