"""Compares a step on two nodes of two ranks each with torch's ways to share optimizer state out.

One process group (gloo), two daemons on this machine. In each round every side takes one step in
turn, with gradients that are there already and equal on all ranks:

    replicated    optstate, across_nodes="replicated": each daemon has all state
    shared out    optstate, across_nodes="sharded": each daemon has half of the parameters' state
    sharded       optstate, across_nodes="sharded", of parameters that FSDP2 has sharded
    zero          torch's ZeroRedundancyOptimizer over fused AdamW
    fsdp2         torch's fused AdamW on the parameters that FSDP2 has sharded

"shared out" and "zero" end with every rank having all parameters. "sharded" and "fsdp2" leave that
to the next forward pass, so they are compared with each other alone. Prints the median times of
optimizer.step() of the slowest rank, and ratios: the other side's time / ours.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import optstate
import ranks
import torch
import torch.distributed as dist
from daemon import Daemon

NODES = 2
RANKS_PER_NODE = 2
WARM_UP = 3
LAYERS = 8
# Pairs that are compared: ours, and the other side.
PAIRS = (("replicated", "zero"), ("shared out", "zero"), ("sharded", "fsdp2"))


def make_model(numel: int) -> torch.nn.Module:
    """Layers of equal size, which nodes can share out evenly."""
    width = max(8, int((numel / LAYERS) ** 0.5))
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def sharded_model(numel: int) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model(numel)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_sides(endpoint: str, numel: int) -> dict[str, torch.optim.Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def ours(model: torch.nn.Module, name: str, across: str) -> torch.optim.Optimizer:
        return optstate.AdamW(
            model.named_parameters(), lr=1e-3, job=name, endpoint=endpoint, across_nodes=across
        )

    return {
        "replicated": ours(make_model(numel), "replicated", "replicated"),
        "shared out": ours(make_model(numel), "shared-out", "sharded"),
        "sharded": ours(sharded_model(numel), "sharded", "sharded"),
        "zero": ZeroRedundancyOptimizer(
            make_model(numel).parameters(), torch.optim.AdamW, lr=1e-3, fused=True
        ),
        "fsdp2": torch.optim.AdamW(sharded_model(numel).parameters(), lr=1e-3, fused=True),
    }


def train(connection, rank: int, endpoints: list[str], numel: int, rounds: int) -> None:
    """Takes a step of every side in turn, and says how long each took."""
    node = rank // RANKS_PER_NODE
    os.environ["OPTSTATE_NODE"] = f"node{node}"
    sides = make_sides(endpoints[node], numel)
    steps: dict[str, Callable[[], object]] = {}
    for name, optimizer in sides.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        steps[name] = optimizer.step
    for _ in range(rounds):
        taken = {}
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            taken[name] = time.perf_counter() - start
        ranks.say(connection, taken)
    for optimizer in sides.values():
        close = getattr(optimizer, "close", None)
        if close is not None:
            close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    daemons = [Daemon() for _ in range(NODES)]
    world = NODES * RANKS_PER_NODE
    rounds = WARM_UP + arguments.rounds
    times: dict[str, list[float]] = {}
    endpoints = [each.shm for each in daemons]
    try:
        with ranks.running(train, world, endpoints, arguments.numel, rounds) as running:
            for _ in range(rounds):
                of_ranks = [running.hear(rank) for rank in range(world)]
                for name in of_ranks[0]:
                    times.setdefault(name, []).append(max(each[name] for each in of_ranks))
            running.results()
    finally:
        for each in daemons:
            each.stop()
    medians = {name: statistics.median(all_of[WARM_UP:]) for name, all_of in times.items()}
    print(f"{arguments.numel} float32 elements, {NODES} nodes of {RANKS_PER_NODE} ranks")
    print("| side | median step |\n|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median * 1e3:.2f} ms |")
    print("\n| ours | beside | other / ours |\n|---|---|---|")
    for ours, other in PAIRS:
        print(f"| {ours} | {other} | {medians[other] / medians[ours]:.2f} |")


if __name__ == "__main__":
    main()
