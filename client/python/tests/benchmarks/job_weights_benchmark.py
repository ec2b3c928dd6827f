"""Measures how two jobs on one disk get on beside each other, by their weights.

Each job is a process that makes steps over a state of which a third is in memory. The weight
counts for cores too, so the daemon's engines have one worker each. Prints the steps of both in
some seconds, and their ratio.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import time

import optstate
import torch
from torch_step_benchmark import make_parameters

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from daemon import Daemon


def train(endpoint: str, job: str, elements: int, seconds: float) -> None:
    """Prints how many steps the job makes once the parent has written a line."""
    torch.set_num_threads(1)
    parameters = make_parameters(elements, 1)
    budget = 8 * elements // 3  # bytes: a third of the records'
    with optstate.AdamW(
        parameters, job=job, endpoint=endpoint, placement="nvme", host_budget=budget
    ) as optimizer:
        for _ in range(2):  # brings records to frames and disk
            optimizer.step()
        print("ready", flush=True)
        sys.stdin.readline()
        steps, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            optimizer.step()
            steps += 1
        print(steps, flush=True)


def measure(folder: pathlib.Path, weight: int, arguments: argparse.Namespace) -> None:
    folder.mkdir()
    config = folder / "optstated.yaml"
    config.write_text(f'engine: {{workers: 1, job_weights: ["first={weight}"]}}\n')
    running = Daemon("--config", str(config), "--nvme-dir", str(folder.resolve()))
    common = ["--elements", str(arguments.elements), "--seconds", str(arguments.seconds)]
    try:
        jobs = [
            subprocess.Popen(
                [sys.executable, __file__, *common, "--train", running.shm, job],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for job in ("first", "second")
        ]
        for job in jobs:
            assert job.stdout.readline() == "ready\n"
        for job in jobs:
            job.stdin.write("\n")
            job.stdin.flush()
        first, second = (int(job.communicate()[0]) for job in jobs)
        print(f"{weight:5d} 100 {first:6d} {second:6d} {first / max(second, 1):8.2f}")
    finally:
        running.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, help="on the disk, new")
    parser.add_argument("--elements", type=int, default=24, help="of each job, in Mi")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(*arguments.train, arguments.elements << 20, arguments.seconds)
        return
    arguments.folder.mkdir()
    for weight in (100, 200, 300):
        measure(arguments.folder / str(weight), weight, arguments)


if __name__ == "__main__":
    main()
