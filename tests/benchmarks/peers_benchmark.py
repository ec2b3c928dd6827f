"""AdamW of optstate's kernels against the limit of memory, DeepSpeed and torch.

Sides take turns in one process (interleave.py) on the same arrays; a ratio is the median over the
rounds of the other side's time / optstate's, so above 1 optstate is faster. optstate's side is the
daemon's walk over a job, undo included, on the caller's memory (tensors_step.h): no messages, no
norm. Results are compared before any speed is printed.

Usually run by deploy/benchmark.
"""

from __future__ import annotations

import argparse
import os
import pathlib

import daemon_cost
import rank_cost
import torch
from eight_bit_benchmark import state8
from gloo_ranks import MODES, SAMPLE, GlooRanks
from interleave import ROUNDS_MIN, Times, interleave, sample
from native_step import BLOCK, Arrays, Library, Options, Step, Workers
from peers import (
    deepspeed_class,
    deepspeed_mixed,
    deepspeed_optimizer,
    float32_step,
    set_threads,
    torch_mixed,
    torch_optimizer,
)
from peers_check import check
from ratio_plot import plot
from table import Table, count

Ki, Mi = 1 << 10, 1 << 20
OPTIONS = Options()
BUSY = 0.5  # load of the machine
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Benchmark:
    def __init__(self, arguments: argparse.Namespace, library: Library, deepspeed) -> None:
        self.arguments, self.deepspeed = arguments, deepspeed
        self.pools = {threads: Workers(library, threads) for threads in arguments.threads}
        self.sizes = [size for size in (64 * Ki, Mi, 16 * Mi, 64 * Mi) if size <= arguments.most]

    @property
    def most_served(self) -> int:
        """Elements of a job through the daemon: --large has no limit but memory."""
        return 1 << 40 if self.arguments.large else self.arguments.most

    def on_threads(self, threads: int) -> Workers:
        set_threads(threads)
        return self.pools[threads]

    def times(self, sides: dict, threads: int) -> Times:
        return interleave(sides, threads, self.arguments.budget)

    def mixed(self) -> None:
        table = Table("1 to 3: bfloat16 gradient and parameter, float32 master and state")
        for numel in self.sizes:
            arrays = Arrays(numel, torch.bfloat16)
            for threads in self.arguments.threads:
                step = Step(self.on_threads(threads), [arrays], OPTIONS)
                sides = {
                    "optstate": step.update,
                    "additions": step.add_vectors,
                    "blocks": step.add_blocks,
                    "torch": torch_mixed(arrays, OPTIONS, keep_gradient=False),
                    "kept": torch_mixed(arrays, OPTIONS, keep_gradient=True),
                }
                if self.deepspeed is not None:
                    sides["deepspeed"] = deepspeed_mixed(self.deepspeed, arrays, OPTIONS, 1.0)
                times = self.times(sides, threads)
                limit = 0.95 if numel >= 16 * Mi else None
                for side, what, goal in (
                    ("additions", "additions only", limit),
                    ("blocks", "additions only, 64 elements at a time", None),
                    ("deepspeed", "DeepSpeed: copy, mul_, CPUAdam, copy", 1.8),
                    ("torch", "torch: grad.float(), fused, copy_", 1.8),
                    ("kept", "torch: copy_ to a kept gradient, fused, copy_", None),
                ):
                    if side in sides:
                        table.add(what, count(numel), threads, times, side, goal)
                step.close()

    def float32(self) -> None:
        table = Table("4: float32 in and out")
        sizes = [*self.sizes, 256 * Mi] if self.arguments.large else self.sizes
        for numel in sizes:
            arrays = Arrays(numel, torch.float32)
            for threads in self.arguments.threads:
                step = Step(self.on_threads(threads), [arrays], OPTIONS)
                fused = float32_step(torch_optimizer, [arrays], OPTIONS, fused=True)
                sides = {"optstate": step.update, "additions": step.add_vectors, "torch": fused}
                if self.deepspeed is not None:
                    optimizer, _ = deepspeed_optimizer(
                        self.deepspeed, [arrays], arrays.gradients, OPTIONS
                    )
                    sides["deepspeed"] = optimizer.step
                times = self.times(sides, threads)
                peers = [side for side in ("torch", "deepspeed") if side in sides]
                fastest = min(peers, key=times.median_s)
                table.add("additions only", count(numel), threads, times, "additions", None)
                for side in peers:
                    name = {"torch": "torch fused", "deepspeed": "DeepSpeed CPUAdam"}[side]
                    goal = 1.0 if side == fastest else None
                    table.add(name, count(numel), threads, times, side, goal)
                step.close()

    def small(self) -> None:
        table = Table("5: many tensors, float32 (the walk over them, not through the daemon)")
        cases = [(64, 16 * Ki), (10_000, 128)]
        if self.arguments.large:
            cases.append((100_000, 128))
        for number, numel in cases:
            arrays = [Arrays(numel, torch.float32, seed=seed) for seed in range(number)]
            for threads in self.arguments.threads:
                step = Step(self.on_threads(threads), arrays, OPTIONS)
                times = self.times(
                    {
                        "optstate": step.update,
                        "fused": float32_step(torch_optimizer, arrays, OPTIONS, fused=True),
                        "foreach": float32_step(torch_optimizer, arrays, OPTIONS, foreach=True),
                    },
                    threads,
                )
                size = f"{number:,} x {count(numel) if numel >= Ki else numel}"
                for side in ("fused", "foreach"):
                    table.add(f"torch {side}", size, threads, times, side, 2.0)
                step.close()

    def state_formats(self) -> None:
        table = Table("6: formats against float32, bfloat16 gradient and parameter")
        # Gradient read, parameter written (split: both), master and two arrays both.
        moved = {
            ("float32", "float32"): 4 + 8 + 16,
            ("bfloat16", "float32"): 4 + 8 + 8,
            ("dynamic8", "float32"): 12 + 4 + 16 / BLOCK,
            ("float32", "split"): 2 + 8 + 16,
            ("bfloat16", "split"): 2 + 8 + 8,
            ("dynamic8", "split"): 2 + 8 + 4 + 16 / BLOCK,
        }
        full = ("float32", "float32")
        for numel in self.sizes:
            by_state = {
                (state, master): Arrays(numel, torch.bfloat16, state=state, master=master)
                for state, master in moved
            }
            for threads in self.arguments.threads:
                workers = self.on_threads(threads)
                steps = {
                    state: Step(workers, [arrays], OPTIONS) for state, arrays in by_state.items()
                }
                sides = {state: step.update for state, step in steps.items()}
                taken = self.times(sides, threads).seconds
                for each in [each for each in moved if each != full]:
                    times = Times({"optstate": taken[each], "float32": taken[full]})
                    state, master = each
                    what = f"{state} state, {master} master"
                    what += f" ({moved[each]:.4g} of {moved[full]} B an element)"
                    table.add(what, count(numel), threads, times, "float32", None)
                for step in steps.values():
                    step.close()

    def reduction(self) -> None:
        table = Table("7: gradients of several ranks summed in the pass, against additions only")
        numel = min(16 * Mi, self.arguments.most)
        for dtype, name in DTYPE_NAMES.items():
            for ranks in (2, 4, 8):
                arrays = Arrays(numel, dtype, gradients=ranks)
                aligned = Arrays(numel, dtype, gradients=ranks, lead=0)
                for threads in self.arguments.threads:
                    step = Step(self.on_threads(threads), [arrays], OPTIONS)
                    beside = Step(self.on_threads(threads), [aligned], OPTIONS)
                    times = self.times(
                        {
                            "optstate": step.update,
                            "additions": step.add_vectors,
                            "blocks": step.add_blocks,
                            "aligned": beside.update,
                            "aligned additions": beside.add_vectors,
                        },
                        threads,
                    )
                    what = f"{ranks} ranks, {name}"
                    size = count(numel)
                    table.add(f"{what}: additions only", size, threads, times, "additions", 0.9)
                    table.add(
                        f"{what}: additions, 64 elements at a time",
                        size,
                        threads,
                        times,
                        "blocks",
                        None,
                    )
                    for side, title in (
                        ("aligned", "optstate, areas at one offset within a page"),
                        ("aligned additions", "additions only, areas at one offset"),
                    ):
                        table.add(f"{what}: {title}", size, threads, times, side, None)
                    step.close()
                    beside.close()

    def gloo(self) -> None:
        table = Table("7: the same, against all_reduce over gloo and torch fused, a thread a rank")
        numel = min(16 * Mi, self.arguments.most)
        threads = max(self.arguments.threads)
        for dtype, name in DTYPE_NAMES.items():
            for ranks in (2, 4):
                arrays = Arrays(numel, dtype, gradients=ranks)
                arrays.gradients = [
                    Arrays(numel, dtype, seed=rank).gradients[0] for rank in range(ranks)
                ]
                step = Step(self.on_threads(threads), [arrays], OPTIONS)
                with GlooRanks(ranks, numel, dtype, OPTIONS) as peer:
                    _, theirs = peer.step("sharded")
                    step.update()
                    # gloo rounds each partial sum of bfloat16.
                    torch.testing.assert_close(
                        arrays.state[0][: SAMPLE // ranks],
                        theirs[: SAMPLE // ranks],
                        rtol=0.02,
                        atol=5e-5,
                    )
                    self._against(table, peer, step, f"{ranks} ranks, {name}", count(numel))
                step.close()

    def _against(self, table: Table, peer: GlooRanks, step: Step, what: str, size: str) -> None:
        # The ranks time themselves, from a barrier on: waking them is not counted.
        for mode in MODES:
            seconds = {"optstate": [], mode: []}
            for _ in range(ROUNDS_MIN + 2):
                seconds[mode].append(peer.step(mode)[0])
                ours = sample(step.update, 1)
                seconds["optstate"].append(ours)
            goal = 2.0 if mode == "sharded" else None
            threads = max(self.arguments.threads)
            table.add(f"{what}: {mode}", size, threads, Times(seconds), mode, goal)


def pages() -> str:
    """Returns the kind of pages that 64 MiB of a tensor get."""
    tensor = torch.ones(16 * Mi)
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:") and int(line.split()[1]) << 10 > tensor.nbytes // 2:
            return "huge"
    return f"{os.sysconf('SC_PAGE_SIZE')} bytes"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", required=True, help="liboptstate_bench.so")
    parser.add_argument("--only", default="", help="comma-separated: " + ",".join(PARTS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a row group (default 2)")
    parser.add_argument("--most", type=int, default=64 * Mi, help="elements at most")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the tables of ratios: .svg, .png")
    parser.add_argument("--large", action="store_true", help="256 Mi and 100,000 tensors too")
    arguments = parser.parse_args()
    arguments.threads = [int(threads) for threads in arguments.threads.split(",")]
    arguments.only = arguments.only.split(",") if arguments.only else list(PARTS)
    return arguments


PARTS = {
    "mixed": Benchmark.mixed,
    "float32": Benchmark.float32,
    "small": Benchmark.small,
    "formats": Benchmark.state_formats,
    "reduction": Benchmark.reduction,
    "gloo": Benchmark.gloo,
    "state8": state8,
    "sizes": daemon_cost.sizes,
    "parameters": daemon_cost.parameters,
    "jobs": daemon_cost.jobs,
    "ranks": rank_cost.ranks_cost,
    "overlap": rank_cost.overlap,
}


def main() -> None:
    arguments = parsed()
    library = Library(arguments.library)
    load = os.getloadavg()[0]
    print(f"Load of the machine before: {load:.2f}; pages: {pages()}")
    if load > BUSY:
        print(
            "It is busy, and OpenMP suffers more from that: ratios of several threads say little."
        )
    deepspeed, why = deepspeed_class()
    if deepspeed is None:
        print(f"Without DeepSpeed, whose rows are missing: {why}\n")
    benchmark = Benchmark(arguments, library, deepspeed)
    for threads in arguments.threads:
        check(benchmark.on_threads(threads), OPTIONS, deepspeed)
    print("All sides agree.", flush=True)
    for part in arguments.only:
        PARTS[part](benchmark)
    if arguments.plot and Table.rows:
        plot(Table.rows, arguments.plot)
        print(f"\nplot: {arguments.plot}")


if __name__ == "__main__":
    main()
