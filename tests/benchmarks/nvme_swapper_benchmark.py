"""A step over AdamW state on disk: optstate beside DeepSpeed's NVMe swappers and raw I/O.

bfloat16 parameters and gradients with three float32 arrays on disk (master, exp_avg, exp_avg_sq),
in sub-groups of one size. Sides take turns in one process and on one disk, all with O_DIRECT.
Printed are medians, and the median of the rounds' other time / optstate's. Timed are
optimizer.step() and engine.step() without backward(). All masters are compared before anything is
timed, and afterwards.

With --dtype float32 DeepSpeed has the same three arrays on disk, but optstate has two: its float32
parameter is its master, and lies in memory.

    nvme_swapper_benchmark.py [--dir DIR] [--elements 64] [--sub-group 2] [--budget-share 8]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from deepspeed_swapper import DEFAULTS, PIPELINED, SwappedEngine, one_process
from interleave import Times, take_turns
from peers import deepspeed_class, set_threads
from raw_disk import RawDisk
from served import Daemon, optstate, running_daemon

MiB = 1 << 20
ROOT = pathlib.Path(__file__).resolve().parents[2]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ARRAYS = 3  # of float32: master, exp_avg, exp_avg_sq
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# The gradients of a step are the first ones times a power of two, which no dtype rounds.
FACTORS = (1.0, -0.5, 0.25, 2.0)
# The first steps make the files of DeepSpeed's state and bring optstate's records to disk.
WARM_UP = 3
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# A side's threads look for more work for a moment (OpenMP's do), which shall not hit the next.
PAUSE_S = 0.1
JOB = "nvme-swapper"


@dataclasses.dataclass(frozen=True)
class Side:
    what: str
    step: Callable[[float], float]  # seconds of a step with gradients times a factor
    masters: Callable[[], Iterator[torch.Tensor]] | None  # None: has no state
    memory_bytes: int
    process: int  # that does its I/O


class Served:
    """optstate.AdamW of a job on disk."""

    def __init__(self, arguments: argparse.Namespace, daemon: Daemon, values, gradients) -> None:
        self._parameters = [torch.nn.Parameter(value.clone()) for value in values]
        self._gradients = gradients
        self.optimizer = optstate.AdamW(
            self._parameters,
            **OPTIONS,
            job=JOB,
            endpoint=daemon.shm,
            placement="nvme",
            host_budget=arguments.memory_bytes,
            sub_group_size=arguments.sub_group,
            durability="none",
        )

    def step(self, factor: float) -> float:
        for parameter, gradient in zip(self._parameters, self._gradients):
            parameter.grad = gradient * factor
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin

    def masters(self) -> Iterator[torch.Tensor]:
        state = self.optimizer.state_dict()["state"]
        for index, parameter in enumerate(self._parameters):
            yield state[index].get("master_param", parameter.detach())


class DiskBytes:
    """The bytes that each side's processes have read from and written to the disk, by step."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._read = {side.what: [] for side in sides}
        self._written = {side.what: [] for side in sides}

    @staticmethod
    def _now(process: int) -> dict[str, int]:
        lines = pathlib.Path(f"/proc/{process}/io").read_text().splitlines()
        return {name: int(value) for name, value in (line.split(": ") for line in lines)}

    @contextlib.contextmanager
    def counting(self, side: Side) -> Iterator[None]:
        before = self._now(side.process)
        yield
        after = self._now(side.process)
        self._read[side.what].append(after["read_bytes"] - before["read_bytes"])
        self._written[side.what].append(after["write_bytes"] - before["write_bytes"])

    def mean_mib(self, side: Side) -> tuple[float, float]:
        counts = self._read[side.what], self._written[side.what]
        return tuple(sum(found) / len(found) / MiB for found in counts)


class Turns:
    """One step of each side at a time, all with the same gradients in the same round."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self.bytes = DiskBytes(sides)
        self._taken = dict.fromkeys((side.what for side in sides), 0)

    def step(self, side: Side) -> float:
        time.sleep(PAUSE_S)
        taken = self._taken[side.what]
        self._taken[side.what] = taken + 1
        with self.bytes.counting(side):
            return side.step(FACTORS[taken % len(FACTORS)])


def compare(sides: Sequence[Side], values: Sequence[torch.Tensor]) -> None:
    """Raises unless all masters agree, and are no longer what they began with."""
    first, *others = (side for side in sides if side.masters is not None)
    expected = list(first.masters())
    for master, value in zip(expected, values):
        assert (master - value).abs().max() > OPTIONS["lr"] / 2, "the parameters have not moved"
    for side in others:
        for index, (ours, theirs) in enumerate(zip(expected, side.masters())):
            what = f"{side.what}: parameter {index}"
            torch.testing.assert_close(
                theirs, ours, **CLOSE, msg=lambda text, what=what: f"{what}\n{text}"
            )


def print_table(sides: Sequence[Side], times: Times, counted: DiskBytes) -> None:
    ours = sides[0].what
    print("| what | memory, MiB | step, ms | / optstate | quartiles | read, MiB | written, MiB |")
    print("|---|---|---|---|---|---|---|")
    for side in sides:
        ms, memory = times.median_s(side.what) * 1e3, side.memory_bytes / MiB
        middle, low, high = times.ratio(side.what, ours)
        ratio = "1 | " if side.what == ours else f"{middle:.2f} | {low:.2f} to {high:.2f}"
        read, written = counted.mean_mib(side)
        print(f"| {side.what} | {memory:.0f} | {ms:.0f} | {ratio} | {read:.0f} | {written:.0f} |")


def file_system_of(folder: pathlib.Path) -> str:
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[2] == wanted:
            return line.split(" - ")[1].split()[0]
    return "an unknown file system"


def tensors(arguments: argparse.Namespace, scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(int(1 / scale))
    count = arguments.elements // arguments.sub_group
    found = (torch.randn(arguments.sub_group, generator=generator) for _ in range(count))
    return [(each * scale).to(DTYPES[arguments.dtype]) for each in found]


def make_sides(
    arguments: argparse.Namespace,
    folder: pathlib.Path,
    stack: contextlib.ExitStack,
    values: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> list[Side]:
    places = {name: folder / name for name in ("optstate", "defaults", "pipelined")}
    for place in places.values():
        place.mkdir(mode=0o700)
    daemon = stack.enter_context(running_daemon("--nvme-dir", str(places["optstate"])))
    served = Served(arguments, daemon, values, gradients)
    stack.enter_context(served.optimizer)
    engine = int(daemon.optctl("describe", "job", JOB)["engine_pid"])
    budget = arguments.memory_bytes
    sides = [Side("optstate", served.step, served.masters, budget, engine)]
    for name, settings in (("defaults", DEFAULTS), ("pipelined", PIPELINED)):
        theirs = SwappedEngine(settings, places[name], values, gradients, OPTIONS)
        what = f"DeepSpeed, {name}: {theirs.swapper}"
        sides.append(Side(what, theirs.step, theirs.masters, theirs.memory_bytes, os.getpid()))
    raw = stack.enter_context(RawDisk(folder / "raw", arguments.state_bytes))

    def raw_step(_: float) -> float:
        begin = time.perf_counter()
        raw.step()
        return time.perf_counter() - begin

    sides.append(Side("raw reads and writes", raw_step, None, raw.memory_bytes, os.getpid()))
    return sides


def measure(arguments: argparse.Namespace, folder: pathlib.Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_process())
        values, gradients = tensors(arguments, 1.0), tensors(arguments, 1e-2)
        sides = make_sides(arguments, folder, stack, values, gradients)
        set_threads(arguments.threads)
        turns = Turns(sides)
        for _ in range(WARM_UP):
            for side in sides:
                turns.step(side)
        compare(sides, values)
        turns.bytes = DiskBytes(sides)
        before = os.getloadavg()[0]
        timed = {side.what: lambda side=side: turns.step(side) for side in sides}
        times = take_turns(timed, arguments.seconds)
        after = os.getloadavg()[0]
        compare(sides, values)
        print_table(sides, times, turns.bytes)
    rounds = len(times.seconds["optstate"])
    print(
        f"\n{arguments.elements >> 20} Mi elements, {arguments.dtype}; "
        f"{arguments.state_bytes // MiB} MiB of state in sub-groups of "
        f"{arguments.sub_group >> 20} Mi elements; "
        f"{arguments.threads} threads; {rounds} rounds; {file_system_of(folder)}; "
        f"load {before:.1f} before and {after:.1f} after."
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=pathlib.Path, default=ROOT, help="on the disk; not tmpfs")
    parser.add_argument("--elements", type=int, default=64, help="in Mi")
    parser.add_argument("--sub-group", type=int, default=2, help="in Mi")
    parser.add_argument("--budget-share", type=int, default=8, help="memory is state / this")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of parameters")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=120, help="of the rounds, about")
    arguments = parser.parse_args()
    arguments.elements <<= 20
    arguments.sub_group <<= 20
    if arguments.elements % arguments.sub_group:
        parser.error("--elements is a multiple of --sub-group")
    arguments.state_bytes = arguments.elements * ARRAYS * 4
    arguments.memory_bytes = arguments.state_bytes // arguments.budget_share
    if arguments.memory_bytes < ARRAYS * 4 * arguments.sub_group * 3:
        parser.error("the budget has no room for three sub-groups: take smaller ones")
    if file_system_of(arguments.dir) in ("tmpfs", "ramfs"):
        parser.error(f"{arguments.dir} is in memory")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    kind, why = deepspeed_class()
    if kind is None:
        sys.exit(f"DeepSpeed cannot be measured: {why}")
    with tempfile.TemporaryDirectory(prefix="nvme-swapper-", dir=arguments.dir) as folder:
        measure(arguments, pathlib.Path(folder))


if __name__ == "__main__":
    main()
