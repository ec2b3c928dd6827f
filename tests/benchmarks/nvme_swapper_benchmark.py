"""A step over AdamW state on disk: optstate beside DeepSpeed's NVMe swappers and raw I/O.

bfloat16 parameters and gradients with three float32 arrays on disk (master, exp_avg, exp_avg_sq),
in sub-groups of one size. The sides are optstate, DeepSpeed's default and its pipelined swapper,
and raw reads and writes of the state. They take turns in one process and in one folder, all with
O_DIRECT. Printed are medians, and the median of the rounds' other time / optstate's; --json writes
them with the seconds of every round, and --plot draws the ratios. Timed are optimizer.step() and
engine.step() without backward(). All masters are compared before anything is timed, and afterwards.
Where DeepSpeed is not installed or does not start, its rows are left out, with the reason:
deploy/setup-frameworks installs it.

With --dtype float32 DeepSpeed has the same three arrays on disk, but optstate has two: its float32
parameter is its master, and lies in memory.

    nvme_swapper_benchmark.py [--dir DIR] [--elements 64] [--sub-group 2] [--budget-share 8]
                              [--json FILE] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import swapper_report
import torch
from deepspeed_swapper import DEFAULTS, PIPELINED, SwappedEngine, one_process
from interleave import take_turns
from peers import deepspeed_class, set_threads
from raw_disk import RawDisk
from served import Daemon, optstate, running_daemon
from swapper_report import Missing, Run

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
SWAPPERS = {"defaults": DEFAULTS, "pipelined": PIPELINED}


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

    def mean(self, side: Side) -> tuple[float, float]:
        """Bytes read and bytes written."""
        counts = self._read[side.what], self._written[side.what]
        return tuple(sum(found) / len(found) for found in counts)


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


def make_swappers(
    folder: pathlib.Path, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> tuple[list[Side], list[Missing]]:
    """DeepSpeed's sides, and those that could not be made."""
    sides, missing = [], []
    for name, settings in SWAPPERS.items():
        place = folder / name
        place.mkdir(mode=0o700)
        try:
            theirs = SwappedEngine(settings, place, values, gradients, OPTIONS)
        except Exception as error:  # whatever keeps a peer from starting
            missing.append(Missing(f"DeepSpeed, {name}", f"{type(error).__name__}: {error}"))
            continue
        what = f"DeepSpeed, {name}: {theirs.swapper}"
        sides.append(Side(what, theirs.step, theirs.masters, theirs.memory_bytes, os.getpid()))
    return sides, missing


def make_sides(
    arguments: argparse.Namespace,
    folder: pathlib.Path,
    stack: contextlib.ExitStack,
    values: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> tuple[list[Side], list[Missing]]:
    """optstate's side first and the raw one last, and those that could not be made."""
    kind, why = deepspeed_class()
    if kind is not None:
        stack.enter_context(one_process())
    place = folder / "optstate"
    place.mkdir(mode=0o700)
    daemon = stack.enter_context(running_daemon("--nvme-dir", str(place)))
    served = Served(arguments, daemon, values, gradients)
    stack.enter_context(served.optimizer)
    engine = int(daemon.optctl("describe", "job", JOB)["engine_pid"])
    ours = Side("optstate", served.step, served.masters, arguments.memory_bytes, engine)
    if kind is None:
        why += " (deploy/setup-frameworks installs it into .venv-frameworks)"
        swappers, missing = [], [Missing(f"DeepSpeed, {name}", why) for name in SWAPPERS]
    else:
        swappers, missing = make_swappers(folder, values, gradients)
    raw = stack.enter_context(RawDisk(folder / "raw", arguments.state_bytes))

    def raw_step(_: float) -> float:
        begin = time.perf_counter()
        raw.step()
        return time.perf_counter() - begin

    disk = Side("raw reads and writes", raw_step, None, raw.memory_bytes, os.getpid())
    return [ours, *swappers, disk], missing


def measure(arguments: argparse.Namespace, folder: pathlib.Path) -> Run:
    with contextlib.ExitStack() as stack:
        values, gradients = tensors(arguments, 1.0), tensors(arguments, 1e-2)
        sides, missing = make_sides(arguments, folder, stack, values, gradients)
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
    settings = {
        "dtype": arguments.dtype,
        "elements": arguments.elements,
        "sub_group": arguments.sub_group,
        "state_bytes": arguments.state_bytes,
        "threads": arguments.threads,
        "rounds": len(times.seconds[sides[0].what]),
        "file_system": file_system_of(folder),
        "load_before": before,
        "load_after": after,
    }
    figures = [
        swapper_report.figures_of(
            side.what, side.memory_bytes, times, sides[0].what, *turns.bytes.mean(side)
        )
        for side in sides
    ]
    return Run(settings, figures, missing, times.seconds)


def print_run(run: Run) -> None:
    its = run.settings
    print(swapper_report.table(run))
    print(
        f"\n{its['elements'] >> 20} Mi elements, {its['dtype']}; "
        f"{its['state_bytes'] // MiB} MiB of state in sub-groups of "
        f"{its['sub_group'] >> 20} Mi elements; "
        f"{its['threads']} threads; {its['rounds']} rounds; {its['file_system']}; "
        f"load {its['load_before']:.1f} before and {its['load_after']:.1f} after."
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
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help=".svg or .png")
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
    with tempfile.TemporaryDirectory(prefix="nvme-swapper-", dir=arguments.dir) as folder:
        run = measure(arguments, pathlib.Path(folder))
    print_run(run)
    if arguments.json:
        swapper_report.write_json(run, arguments.json)
    if arguments.plot:
        swapper_report.plot(run, arguments.plot)


if __name__ == "__main__":
    main()
