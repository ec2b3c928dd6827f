"""Measures the cost of finding changes of copied parameters: detect_changes= against "off".

One optimizer of each kind, with equal parameters and gradients in one process; they take turns
step by step, so that what else the machine does hits all. Printed is the median time of each and
the median of the ratios mode / off of neighbours, with the quartiles: 1 costs nothing.

    change_detection_benchmark.py [--elements 16M] [--rounds 30]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import sys

import optstate
import torch
from torch_step_benchmark import make_parameters, timed

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from daemon import Daemon

MODES = ("off", "sample", "exact")


def measure(endpoint: str, elements: int, rounds: int) -> None:
    with contextlib.ExitStack() as stack:
        steps = {
            mode: stack.enter_context(
                optstate.AdamW(
                    make_parameters(elements, 1),
                    endpoint=endpoint,
                    parameters_as_views=False,
                    detect_changes=mode,
                )
            ).step
            for mode in MODES
        }
        taken = []
        for turn in range(rounds + 3):
            order = MODES if turn % 2 else MODES[::-1]
            taken.append({mode: timed(steps[mode]) for mode in order})
    taken = taken[3:]
    for mode in MODES:
        milliseconds = 1e3 * statistics.median(each[mode] for each in taken)
        ratios = [each[mode] / each["off"] for each in taken]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        print(f"  {mode:8}{milliseconds:9.2f} ms   {ratio:5.2f} ({low:.2f}-{high:.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", default="16M")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    elements = int(float(arguments.elements.rstrip("M")) * 2**20)
    print(f"fp32, {arguments.elements} elements, {os.cpu_count()} cores, torch {torch.__version__}")
    daemon = Daemon()
    try:
        for endpoint in (daemon.shm, daemon.grpc_unix):
            print(f"{endpoint.split('/')[0]}   a step      mode / off (quartiles)")
            measure(endpoint, elements, arguments.rounds)
    finally:
        daemon.stop()


if __name__ == "__main__":
    main()
