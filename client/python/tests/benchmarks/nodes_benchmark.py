"""Compares a step on 1, 2 and 4 nodes: one rank a node, daemons on this machine, gloo.

All sizes take turns in one run of one process group, of which each job has the first ranks, with
equal gradients on all ranks, so that nothing is averaged. Prints the median times of
optimizer.step() of the slowest rank, their ratios to one node, and how many collectives and calls
of the daemon a step makes.

Nodes share this machine's cores here: the time of the update grows with their number. The smaller
--numel is, the more of the ratio is the overhead of deciding together.
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
from optstate._torch.ranks import Ranks
from optstate.session import Session

NODES = (1, 2, 4)
WARM_UP = 3
COLLECTIVES = ("gather", "gather_numbers", "object_from", "any", "add_up", "replicate")


class Calls:
    """Counts the calls of some methods from now on. Those of a rank that is alone are none."""

    def __init__(self, of: type, names: tuple[str, ...]) -> None:
        self.count = 0
        for name in names:
            setattr(of, name, self._counted(getattr(of, name)))

    def _counted(self, method: Callable) -> Callable:
        def counted(of, *arguments, **options):
            self.count += getattr(of, "world_size", 2) > 1
            return method(of, *arguments, **options)

        return counted


def train(connection, rank: int, endpoints: list[str], numel: int, rounds: int) -> None:
    """Takes a step of each job in turn, and says how long it took and what it called."""
    os.environ["OPTSTATE_NODE"] = f"node{rank}"
    groups = {count: dist.new_group(list(range(count))) for count in NODES}  # on every rank
    optimizers = {}
    for count, group in groups.items():
        if rank >= count:
            continue
        parameter = torch.nn.Parameter(torch.zeros(numel))
        optimizers[count] = optstate.AdamW(
            [("weight", parameter)],
            lr=0.001,
            job=f"benchmark-{count}",
            endpoint=endpoints[rank],
            process_group=group,
            across_nodes="replicated",
        )
        parameter.grad = torch.ones(numel)
    collectives = Calls(Ranks, COLLECTIVES)
    calls = Calls(Session, ("_call",))
    for _ in range(rounds):
        taken = {}
        for count in NODES:
            dist.barrier()
            if count not in optimizers:
                continue
            before = collectives.count, calls.count
            start = time.perf_counter()
            optimizers[count].step()
            taken[count] = (
                time.perf_counter() - start,
                collectives.count - before[0],
                calls.count - before[1],
            )
        ranks.say(connection, taken)
    dist.barrier()
    for optimizer in optimizers.values():
        optimizer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1 << 16)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    daemons = [Daemon() for _ in range(max(NODES))]
    rounds = WARM_UP + arguments.rounds
    times: dict[int, list[float]] = {count: [] for count in NODES}
    counts: dict[int, tuple[int, int]] = {}
    endpoints = [each.shm for each in daemons]
    try:
        with ranks.running(train, max(NODES), endpoints, arguments.numel, rounds) as running:
            for _ in range(rounds):
                of_ranks = [running.hear(rank) for rank in range(max(NODES))]
                for count in NODES:
                    times[count].append(max(each[count][0] for each in of_ranks[:count]))
                    counts[count] = of_ranks[0][count][1:]
            running.results()
    finally:
        for each in daemons:
            each.stop()
    medians = {count: statistics.median(times[count][WARM_UP:]) for count in NODES}
    print(f"{arguments.numel} float32 elements")
    print("| nodes | median step | beside one node | collectives | calls of the daemon |")
    print("|---|---|---|---|---|")
    for count, median in medians.items():
        collectives, calls = counts[count]
        ratio = median / medians[1]
        print(f"| {count} | {median * 1e3:.3f} ms | {ratio:.2f} | {collectives} | {calls} |")


if __name__ == "__main__":
    main()
