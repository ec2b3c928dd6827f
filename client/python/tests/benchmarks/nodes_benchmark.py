"""Compares a step on 1, 2 and 4 nodes: one rank a node, daemons on this machine, gloo.

All sizes take turns in one run, each with equal gradients on all ranks, so that nothing is
averaged. Prints the median times of optimizer.step(), and their ratios to one node.

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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import optstate
import ranks
import torch
from daemon import Daemon

NODES = (1, 2, 4)
WARM_UP = 3


def train(connection, rank: int, endpoints: list[str], numel: int, rounds: int) -> None:
    """Takes a step for each message, and says how long it took."""
    os.environ["OPTSTATE_NODE"] = f"node{rank}"
    parameter = torch.nn.Parameter(torch.zeros(numel))
    optimizer = optstate.AdamW(
        [("weight", parameter)],
        lr=0.001,
        job=f"benchmark-{len(endpoints)}",
        endpoint=endpoints[rank],
        across_nodes="replicated",
    )
    parameter.grad = torch.ones(numel)
    for _ in range(rounds):
        connection.recv()
        torch.distributed.barrier()
        start = time.perf_counter()
        optimizer.step()
        ranks.say(connection, time.perf_counter() - start)
    optimizer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1 << 16)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    daemons = [Daemon() for _ in range(max(NODES))]
    rounds = WARM_UP + arguments.rounds
    sides = {}
    try:
        for count in NODES:
            endpoints = [each.shm for each in daemons[:count]]
            sides[count] = ranks.Ranks(train, count, endpoints, arguments.numel, rounds)
        times: dict[int, list[float]] = {count: [] for count in NODES}
        for _ in range(rounds):
            for count, side in sides.items():
                for connection in side.connections:
                    connection.send("step")
                times[count].append(max(side.hear(rank) for rank in range(count)))
        medians = {count: statistics.median(times[count][WARM_UP:]) for count in NODES}
        for count, median in medians.items():
            ratio = median / medians[1]
            print(f"{arguments.numel} elements, nodes: {count}: {median * 1e3:.3f} ms, {ratio:.2f}")
    finally:
        for side in sides.values():
            side.close()
        for each in daemons:
            each.stop()


if __name__ == "__main__":
    main()
