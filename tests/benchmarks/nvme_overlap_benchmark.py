"""A step over AdamW state on disk: does it overlap I/O with the update, at every size?

bfloat16 parameters and gradients with float32 masters: 12 bytes of state an element, of which a
budget holds a share. At each size the sides take turns in one process and on one disk. Printed for
each, as medians: the step; its time an element; its time beside the larger of the two that it
overlaps (raw reads and writes of as many bytes, and the step of a job in memory); the CPU time of
the engine for each GB that it moved. What else used the machine shows in the quartiles of the step
and of the raw speed. --plot draws the time an element over the size, with these quartiles.

Behind the table come the figures beside their goals, and a JSON object a line for programs: one for
each row ("row"), and one with these figures ("figures").

    nvme_overlap_benchmark.py [--dir DIR] [--sizes 64,256] [--shares 8,2] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
from interleave import Times, take_turns
from raw_disk import BLOCK_BYTES, RawDisk
from served import Daemon, available_bytes, optstate, running_daemon

MiB = 1 << 20
ROOT = pathlib.Path(__file__).resolve().parents[2]
STATE_BYTES = 12  # of an element: master, exp_avg, exp_avg_sq
# Parameters and gradients of an element, in the trainer and in shared memory.
MEMORY_BYTES = 4 * 2
RESERVE_BYTES = 3 << 30
WARM_UP = 3
PARAMETER_ELEMENTS = 2 * MiB
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Goals: a step beside the larger of what it overlaps, and the time an element of the largest state
# beside that of the smallest one of a GiB or more.
OVERLAP_MAX = 1.1
FLAT_MAX = 1.1
FLAT_FROM_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to keep the state; `share`: one part of so many is in memory, 0: all is."""

    what: str
    share: int
    durability: str = "none"


@dataclasses.dataclass(frozen=True)
class Counts:
    """The disk bytes and CPU time of a process since it began."""

    disk_bytes: int
    cpu_s: float

    @classmethod
    def of(cls, process: int) -> Counts:
        lines = pathlib.Path(f"/proc/{process}/io").read_text().splitlines()
        found = dict(line.split(": ") for line in lines)
        moved = int(found["read_bytes"]) + int(found["write_bytes"])
        ticks = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
        return cls(moved, sum(map(int, ticks)) / TICKS_PER_S)


class Served:
    """A job of one kind, with an optimizer that steps it."""

    def __init__(self, kind: Kind, elements: int, gradients, daemon: Daemon) -> None:
        self.kind, self.elements = kind, elements
        self._parameters = [torch.nn.Parameter(gradient.clone()) for gradient in gradients]
        self._gradients = gradients
        job = f"share-{kind.share}-{kind.durability}"
        options = {}
        if kind.share:
            budget = elements * STATE_BYTES // kind.share
            options = {"placement": "nvme", "host_budget": budget, "durability": kind.durability}
        self.optimizer = optstate.AdamW(
            self._parameters, lr=1e-4, job=job, endpoint=daemon.shm, **options
        )
        self._engine = int(daemon.optctl("describe", "job", job)["engine_pid"])
        self.moved_bytes: list[int] = []
        self.cpu_s: list[float] = []

    def step(self) -> float:
        for parameter, gradient in zip(self._parameters, self._gradients):
            parameter.grad = gradient
        before = Counts.of(self._engine)
        begin = time.perf_counter()
        self.optimizer.step()
        seconds = time.perf_counter() - begin
        after = Counts.of(self._engine)
        self.moved_bytes.append(after.disk_bytes - before.disk_bytes)
        self.cpu_s.append(after.cpu_s - before.cpu_s)
        return seconds


@dataclasses.dataclass(frozen=True)
class Row:
    elements: int
    kind: Kind
    step_s: tuple[float, float, float]  # the median and the quartiles
    raw_gb_per_s: tuple[float, float, float]  # of raw reads and writes in the same rounds
    overlap: float | None  # step / the larger of I/O and update
    io_over_update: float | None
    cpu_s_per_gb: float | None

    @property
    def what(self) -> str:
        return self.kind.what

    @property
    def state_bytes(self) -> int:
        return self.elements * STATE_BYTES

    @property
    def ns_per_element(self) -> float:
        return self.step_s[0] * 1e9 / self.elements


def raw_step(raw: RawDisk) -> Callable[[], float]:
    def step() -> float:
        begin = time.perf_counter()
        raw.step()
        return time.perf_counter() - begin

    return step


def row_of(job: Served, times: Times, raw_bytes: int, update_ns: float | None) -> Row:
    """update_ns: of an element, in memory; None: not known."""
    steps = times.middle(job.kind.what)
    raw_s = times.middle("raw")
    # A raw step reads and writes raw_bytes.
    speed = tuple(2 * raw_bytes / 1e9 / raw_s[i] for i in (0, 2, 1))
    step_s = steps[0]
    moved = sum(job.moved_bytes) / len(job.moved_bytes)
    if not job.kind.share:
        return Row(job.elements, job.kind, steps, speed, None, None, None)
    io_s = raw_s[0] * moved / (2 * raw_bytes)
    update_s = (update_ns or 0) * job.elements / 1e9
    return Row(
        job.elements,
        job.kind,
        steps,
        speed,
        step_s / max(io_s, update_s),
        io_s / update_s if update_s else None,
        sum(job.cpu_s) / (sum(job.moved_bytes) / 1e9),
    )


def measure_size(
    elements: int, kinds: Sequence[Kind], folder: pathlib.Path, seconds: float, update_ns: float
) -> list[Row]:
    generator = torch.Generator().manual_seed(elements)
    gradients = [
        (torch.randn(PARAMETER_ELEMENTS, generator=generator) * 1e-2).bfloat16()
        for _ in range(elements // PARAMETER_ELEMENTS)
    ]
    with contextlib.ExitStack() as stack:
        records, raw_file = folder / "records", folder / "raw"
        records.mkdir(mode=0o700)
        daemon = stack.enter_context(running_daemon("--nvme-dir", str(records)))
        jobs = [Served(kind, elements, gradients, daemon) for kind in kinds]
        for job in jobs:
            stack.enter_context(job.optimizer)
        raw_bytes = min(elements * STATE_BYTES, 1 << 30) // BLOCK_BYTES * BLOCK_BYTES
        raw = stack.enter_context(RawDisk(raw_file, raw_bytes))
        for _ in range(WARM_UP):
            for job in jobs:
                job.step()
        for job in jobs:
            job.moved_bytes.clear()
            job.cpu_s.clear()
        timed = {job.kind.what: job.step for job in jobs}
        times = take_turns({**timed, "raw": raw_step(raw)}, seconds)
        in_memory = [job for job in jobs if not job.kind.share]
        if in_memory:
            update_ns = times.median_s(in_memory[0].kind.what) * 1e9 / elements
        return [row_of(job, times, raw_bytes, update_ns) for job in jobs]


def kinds_at(elements: int, shares: Sequence[int], all_of_them: bool) -> list[Kind]:
    swapped = [Kind(f"1/{share} in memory", share) for share in shares]
    if not all_of_them:
        return swapped[:1]
    durable = Kind(f"1/{shares[0]} in memory, durability step", shares[0], "step")
    return [Kind("memory", 0), *swapped, durable]


def print_table(rows: Sequence[Row]) -> None:
    print("| state, GiB | records | step, ms | raw, GB/s | ns an element | / larger of I/O and"
          " update | I/O / update | engine's CPU s a GB |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        low, high = row.step_s[1:]
        cells = [
            f"{row.state_bytes / 2**30:.1f}",
            row.what,
            f"{row.step_s[0] * 1e3:.0f} ({low * 1e3:.0f} to {high * 1e3:.0f})",
            "{:.2f} ({:.2f} to {:.2f})".format(*row.raw_gb_per_s),
            f"{row.ns_per_element:.2f}",
            *("" if x is None else f"{x:.2f}" for x in (row.overlap, row.io_over_update)),
            "" if row.cpu_s_per_gb is None else f"{row.cpu_s_per_gb:.2f}",
        ]
        print("| " + " | ".join(cells) + " |")


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of the rows beside their goals; None: there are no two rows to compare."""

    overlap: float | None  # of the worst row
    flat: float | None  # time an element, the largest state / the smallest one of a GiB or more
    cpu_s_per_gb: float | None  # of the worst row
    half_over_least: float | None  # the step, half of the state in memory / the smallest share
    durable_over_none: float | None  # the step, durability "step" / "none", the same share

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Figures:
        swapped = [row for row in rows if row.kind.share]
        plain = [row for row in swapped if row.kind.durability == "none"]
        durable = [row for row in swapped if row.kind.durability != "none"]
        overlaps = [row.overlap for row in plain if row.overlap is not None]
        costs = [row.cpu_s_per_gb for row in swapped if row.cpu_s_per_gb is not None]

        def step_of(elements: int, share: int) -> float | None:
            for row in plain:
                if (row.elements, row.kind.share) == (elements, share):
                    return row.step_s[0]
            return None

        def ratio(above: float | None, below: float | None) -> float | None:
            return above / below if above and below else None

        flat = half = durability = None
        if plain:
            # The one share that is measured at every size is the first.
            share = plain[0].kind.share
            of_share = [row for row in plain if row.kind.share == share]
            sizes = [row for row in of_share if row.state_bytes >= FLAT_FROM_BYTES]
            sizes.sort(key=lambda row: row.elements)
            if len(sizes) > 1:
                flat = ratio(sizes[-1].ns_per_element, sizes[0].ns_per_element)
            least = max(row.kind.share for row in plain)
            if least > 2:
                first = plain[0].elements
                half = ratio(step_of(first, 2), step_of(first, least))
        if durable:
            of = durable[0]
            durability = ratio(of.step_s[0], step_of(of.elements, of.kind.share))
        return cls(max(overlaps, default=None), flat, max(costs, default=None), half, durability)


def print_figures(figures: Figures) -> None:
    def line(what: str, value: float | None, goal: float | None = None) -> None:
        if value is None:
            print(f"{what}: not measured")
            return
        verdict = "" if goal is None else f"; goal at most {goal}: "
        if goal is not None:
            verdict += "met" if value <= goal else "missed"
        print(f"{what}: {value:.2f}{verdict}")

    print()
    line("step / larger of I/O and update, the worst", figures.overlap, OVERLAP_MAX)
    line("ns an element, the largest state / that of 1 GiB", figures.flat, FLAT_MAX)
    line("engine's CPU s a GB, the worst", figures.cpu_s_per_gb)
    line("step, half in memory / the smallest share", figures.half_over_least)
    line('step, durability "step" / "none"', figures.durable_over_none)


def print_json(rows: Sequence[Row], figures: Figures) -> None:
    for row in rows:
        fields = dataclasses.asdict(row) | {
            "state_bytes": row.state_bytes,
            "ns_per_element": row.ns_per_element,
        }
        print(json.dumps({"benchmark": "nvme_overlap", "row": fields}))
    print(json.dumps({"benchmark": "nvme_overlap", "figures": dataclasses.asdict(figures)}))


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "optstate", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for what in dict.fromkeys(row.what for row in rows):
        line = [row for row in rows if row.what == what]
        places = [row.state_bytes / 2**30 for row in line]
        ns = [[second * 1e9 / row.elements for second in row.step_s] for row in line]
        axes.errorbar(
            places,
            [middle for middle, _, _ in ns],
            yerr=[
                [middle - low for middle, low, _ in ns],
                [high - middle for middle, _, high in ns],
            ],
            fmt="o-",
            capsize=3,
            label=what,
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("state, GiB")
    axes.set_ylabel("step, ns an element")
    axes.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def why_not(elements: int, folder: pathlib.Path) -> str:
    """Returns why a size cannot be measured here; empty when it can."""
    memory = elements * (MEMORY_BYTES + STATE_BYTES // 8) + RESERVE_BYTES
    if memory > available_bytes():
        return f"needs {memory / 2**30:.0f} GiB of memory"
    disk = elements * STATE_BYTES + RESERVE_BYTES
    room = os.statvfs(folder)
    if disk > room.f_bavail * room.f_frsize:
        return f"needs {disk / 2**30:.0f} GiB of {folder}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=pathlib.Path, default=ROOT, help="on the disk; not tmpfs")
    parser.add_argument("--sizes", default="64,256", help="in Mi elements; the first has all kinds")
    parser.add_argument("--shares", default="8,2,64", help="one part of so many is in memory")
    parser.add_argument("--seconds", type=float, default=40, help="of a size's rounds, about")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--plot", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[Row] = []
    update_ns = 0.0
    before = os.getloadavg()[0]
    for index, size in enumerate(int(text) * MiB for text in arguments.sizes.split(",")):
        why = why_not(size, arguments.dir)
        if why:
            print(f"{size // MiB} Mi elements are left out: {why}")
            continue
        kinds = kinds_at(size, [int(text) for text in arguments.shares.split(",")], index == 0)
        with tempfile.TemporaryDirectory(prefix="nvme-overlap-", dir=arguments.dir) as folder:
            path = pathlib.Path(folder)
            found = measure_size(size, kinds, path, arguments.seconds, update_ns)
        if index == 0:
            update_ns = found[0].ns_per_element
        rows += found
    print_table(rows)
    print(
        f"\n{arguments.threads} threads; load {before:.1f} before, {os.getloadavg()[0]:.1f} after."
    )
    figures = Figures.of(rows)
    print_figures(figures)
    print_json(rows, figures)
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
