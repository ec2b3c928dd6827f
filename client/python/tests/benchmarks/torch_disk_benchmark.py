"""Measures a step with state on disk: placements, budgets and durabilities beside memory.

One job of each kind, with equal parameters and gradients in one process; they take turns step by
step. Printed is the median time of each, and the median of the ratios kind / memory of neighbours.
The state takes 8 bytes an element, on disk twice that for durable jobs.

    torch_disk_benchmark.py --folder DIR [--elements 64] [--rounds 7]
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import sys

import optstate
import torch
from torch_step_benchmark import make_parameters, timed

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from daemon import Daemon

KINDS = {
    "memory": {},
    "all records in frames": {"placement": "nvme", "host_budget": "1TiB"},
    "an eighth in frames": {"placement": "nvme", "host_budget": 1},
    'the same, durability="step"': {"placement": "nvme", "host_budget": 1, "durability": "step"},
    'memory, durability="step"': {"durability": "step"},
}


def measure(endpoint: str, elements: int, rounds: int) -> None:
    with contextlib.ExitStack() as stack:
        steps = {}
        for kind, options in KINDS.items():
            if options.get("host_budget") == 1:
                options = {**options, "host_budget": elements}  # bytes: an eighth of the state
            optimizer = optstate.AdamW(make_parameters(elements, 1), endpoint=endpoint, **options)
            steps[kind] = stack.enter_context(optimizer).step
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds + 1):
            for kind, step in steps.items():
                seconds = timed(step)
                if number:  # the first brings records to frames and disk
                    times[kind].append(seconds)
    for kind, found in times.items():
        ratio = statistics.median(one / base for one, base in zip(found, times["memory"]))
        print(f"{kind:28s} {1e3 * statistics.median(found):8.0f} ms {ratio:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="on the disk, new")
    parser.add_argument("--elements", type=int, default=64, help="in Mi")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    arguments.folder.mkdir()
    torch.set_num_threads(2)
    running = Daemon("--nvme-dir", str(arguments.folder.resolve()))
    try:
        measure(running.shm, arguments.elements << 20, arguments.rounds)
    finally:
        running.stop()


if __name__ == "__main__":
    main()
