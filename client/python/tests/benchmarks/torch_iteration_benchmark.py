"""A whole training iteration through the daemon against torch's fused AdamW.

Forward, backward and step. Both sides have equal parameters and batches in one process and take
turns, so that what else the machine does hits both. Printed are the median times and the median
of the ratios torch / optstate of neighbours, with the quartiles: above 1, optstate is faster.
With bfloat16 torch's side is what trainers do: float32 masters that the step is taken with, and
copies to and fro. With several ranks it is DistributedDataParallel with the fused AdamW, beside
ours with reduction="daemon".

    torch_iteration_benchmark.py [--model mlp|gpt] [--elements 16M] [--batch 8] [--ranks 2]
                                 [--rounds 20] [--copies] [--overlap] [--dtypes float32,bfloat16]
                                 [--gradient-views | --no-gradient-views]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time
from typing import Any, Callable

import optstate
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_step_benchmark import torchs_step

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[4] / "deploy" / "demo_app"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import ranks
from daemon import Daemon
from gpt import CONTEXT, GPT, width_for

WIDTH = 1024  # a layer of the MLP has 1 Mi parameters
CHARACTERS = 64


def made_model(arguments: argparse.Namespace, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    if arguments.model == "gpt":
        return GPT(CHARACTERS, width_for(arguments.elements)).to(dtype)
    layers: list[torch.nn.Module] = []
    for _ in range(max(1, arguments.elements // WIDTH**2)):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers).to(dtype)


def made_batch(arguments: argparse.Namespace, dtype: torch.dtype) -> torch.Tensor:
    if arguments.model == "gpt":
        return torch.randint(CHARACTERS, (arguments.batch, CONTEXT))
    return torch.randn(arguments.batch, WIDTH, dtype=dtype)


def iteration(model: torch.nn.Module, batch: torch.Tensor, step: Callable[[], Any]) -> float:
    if dist.is_initialized():
        dist.barrier()
    begin = time.perf_counter()
    for parameter in model.parameters():
        parameter.grad = None
    model(batch).float().square().mean().backward()
    step()
    return time.perf_counter() - begin


def take_turns(
    arguments: argparse.Namespace, dtype: torch.dtype, max_norm: float | None, endpoint: str
) -> list[tuple[float, float, float]]:
    """(ours, torch's, the update of ours), in seconds, by round."""
    ours, theirs = made_model(arguments, dtype), made_model(arguments, dtype)
    batch = made_batch(arguments, dtype)
    parameters = list(theirs.parameters())
    several = dist.is_initialized()
    if several:
        theirs = DistributedDataParallel(theirs)
    with optstate.AdamW(
        ours.parameters(),
        endpoint=endpoint,
        max_norm=max_norm,
        parameters_as_views=not arguments.copies,
        overlap=arguments.overlap,
        gradients_as_views=arguments.gradient_views,
        reduction="daemon" if several else "trainer",
    ) as optimizer:
        step = torchs_step(parameters, max_norm)
        taken = []
        for turn in range(arguments.rounds + 3):
            if turn % 2:
                mine = iteration(ours, batch, optimizer.step)
                other = iteration(theirs, batch, step)
            else:
                other = iteration(theirs, batch, step)
                mine = iteration(ours, batch, optimizer.step)
            taken.append((mine, other, optimizer.last_outcome.update_ns * 1e-9))
    return taken[3:]  # page faults and lazy state


def of_rank(_: Any, rank: int, *what: Any) -> list[tuple[float, float, float]]:
    return take_turns(*what)


def measure(
    arguments: argparse.Namespace, dtype: torch.dtype, max_norm: float | None, endpoint: str
) -> str:
    what = (arguments, dtype, max_norm, endpoint)
    taken = (
        take_turns(*what) if arguments.ranks == 1 else ranks.run(of_rank, arguments.ranks, *what)[0]
    )
    low, ratio, high = statistics.quantiles([other / mine for mine, other, _ in taken], n=4)
    mine, other, update = (1e3 * statistics.median(each) for each in zip(*taken))
    name = str(dtype).removeprefix("torch.") + (", clipped" if max_norm is not None else "")
    return (
        f"{name:18} optstate {mine:7.1f} ms (update {update:5.1f}), torch {other:7.1f} ms,"
        f" torch / optstate {ratio:.2f} ({low:.2f} to {high:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["mlp", "gpt"], default="mlp")
    parser.add_argument("--elements", default="16M", help="of the model; M: 2^20")
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--copies", action="store_true", help="parameters are no views")
    parser.add_argument("--overlap", action="store_true", help="gradients are pushed in backward")
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
    parser.add_argument("--dtypes", default="float32,bfloat16")
    arguments = parser.parse_args()
    arguments.elements = int(arguments.elements.removesuffix("M")) << 20
    threads = torch.get_num_threads() if arguments.ranks == 1 else 1
    print(
        f"{arguments.model}, ranks: {arguments.ranks}, threads of each: {threads},"
        f" cores: {os.cpu_count()}, torch {torch.__version__}"
    )
    daemon = Daemon()
    try:
        for dtype in arguments.dtypes.split(","):
            for max_norm in (None, 1.0):
                print(measure(arguments, getattr(torch, dtype), max_norm, daemon.shm), flush=True)
    finally:
        daemon.stop()


if __name__ == "__main__":
    main()
