"""Times functions that take turns, so that all see the same machine."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping

# A sample lasts at least so long; shorter calls are made several times.
SAMPLE_S = 0.005
# Threads that have worked look for more work for some milliseconds before they
# sleep (OpenMP's do); the next side shall not share a core with them.
PAUSE_S = 0.01
ROUNDS_MIN, ROUNDS_MAX = 5, 31


@dataclasses.dataclass
class Times:
    """Seconds of a call by side, one for each round."""

    seconds: dict[str, list[float]]

    def median_s(self, side: str) -> float:
        return statistics.median(self.seconds[side])

    def middle(self, side: str) -> tuple[float, float, float]:
        """Median and quartiles of a side."""
        low, middle, high = statistics.quantiles(self.seconds[side], n=4)
        return middle, low, high

    def ratio(self, over: str, under: str) -> tuple[float, float, float]:
        """Median and quartiles of the rounds' `over` / `under`."""
        pairs = zip(self.seconds[over], self.seconds[under])
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        return middle, low, high


def sample(function: Callable[[], object], calls: int, clock=time.perf_counter) -> float:
    time.sleep(PAUSE_S)
    # Wakes its threads and the cores, brings its data back into the cache.
    for _ in range(calls // 2):
        function()
    begin = clock()
    for _ in range(calls):
        function()
    return (clock() - begin) / calls


def interleave(sides: Mapping[str, Callable[[], object]], threads: int, budget_s: float) -> Times:
    """Rounds for about `budget_s`; each begins with another side.

    What one thread does alone is timed by its own clock, from which other programs take nothing.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    calls = {}
    for name, function in sides.items():
        function()  # touches its pages
        seconds = sample(function, 1, clock)
        if seconds < SAMPLE_S:  # how long it takes once it is awake
            seconds = sample(function, 20, clock)
        calls[name] = int(SAMPLE_S / seconds) + 1
    timed = {
        name: functools.partial(sample, function, calls[name], clock)
        for name, function in sides.items()
    }
    return take_turns(timed, budget_s)


def take_turns(timed: Mapping[str, Callable[[], float]], budget_s: float) -> Times:
    """Times sides in turns that return themselves how many seconds they took."""
    names = list(timed)
    times = Times({name: [] for name in names})
    begin = time.perf_counter()
    for turn in range(ROUNDS_MAX):
        if turn >= ROUNDS_MIN and time.perf_counter() - begin > budget_s:
            break
        for index in range(len(names)):
            name = names[(index + turn) % len(names)]
            times.seconds[name].append(timed[name]())
    return times
