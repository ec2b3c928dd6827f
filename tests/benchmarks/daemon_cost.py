"""Measures the cost of an element's step through the daemon as jobs grow: it should not change.

float32 AdamW of the client in one process: gradients are copied in, parameters read back.
"""

from __future__ import annotations

import concurrent.futures
import contextlib

from interleave import interleave
from served import adamw, parameters_of, running_daemon, why_not
from table import FlatTable, count

Mi = 1 << 20
SIZES = (Mi, 16 * Mi, 64 * Mi, 256 * Mi, 1024 * Mi)
PARAMETERS = (10, 100, 1_000, 10_000, 100_000)
JOBS = (1, 2, 4, 8, 16, 32)
ELEMENTS = 16_000_000  # what 100,000 parameters share evenly
WALL = 2  # the wall clock: what waits for a daemon has no time of its own


def sizes(benchmark) -> None:
    table = FlatTable("9: one job, more elements, 1 Mi in a parameter", "elements")
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(running_daemon())
        rows, sides = {}, {}
        for elements in SIZES:
            reason = why_not(elements)
            if elements > benchmark.most_served:
                reason = "more than --most; with --large memory is the limit"
            if reason:
                print(f"| {count(elements)} | skipped: {reason} | | | | |", flush=True)
                continue
            optimizer = adamw(parameters_of([Mi] * (elements // Mi)), daemon.shm)
            sides[count(elements)] = stack.enter_context(optimizer).step
            rows[count(elements)] = elements
        table.add(rows, interleave(sides, WALL, benchmark.arguments.budget * len(rows)))


def parameters(benchmark) -> None:
    table = FlatTable("9: 16 million elements in more parameters", "parameters")
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(running_daemon())
        sides = {}
        for number in PARAMETERS:
            optimizer = adamw(parameters_of([ELEMENTS // number] * number), daemon.shm)
            sides[f"{number:,}"] = stack.enter_context(optimizer).step
        times = interleave(sides, WALL, benchmark.arguments.budget * len(sides))
        table.add(dict.fromkeys(sides, ELEMENTS), times)


def jobs(benchmark) -> None:
    table = FlatTable("9: 16 Mi elements in more jobs, which step at the same time", "jobs")
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(running_daemon())
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(max(JOBS)))
        sides = {}
        for number in JOBS:
            numel = 16 * Mi // number
            optimizers = [
                stack.enter_context(adamw(parameters_of([numel // 4] * 4), daemon.shm))
                for _ in range(number)
            ]
            sides[str(number)] = _all_steps(pool, optimizers)
        times = interleave(sides, WALL, benchmark.arguments.budget * len(sides))
        table.add(dict.fromkeys(sides, 16 * Mi), times)


def _all_steps(pool: concurrent.futures.Executor, optimizers: list):
    def step() -> None:
        for done in [pool.submit(optimizer.step) for optimizer in optimizers]:
            done.result()

    return step
