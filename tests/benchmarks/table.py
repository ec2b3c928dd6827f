"""The rows that peers_benchmark.py prints, as a table of Markdown."""

from __future__ import annotations

from interleave import Times

HEADER = (
    "| what | elements | threads | optstate ms | other ms | ratio | quartiles | goal |",
    "|---|---|---|---|---|---|---|---|",
)


def count(number: int) -> str:
    for unit, name in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if number % unit == 0:
            return f"{number // unit} {name}"
    return f"{number:,}"


class Table:
    def __init__(self, title: str) -> None:
        print(f"\n### {title}\n")
        for line in HEADER:
            print(line, flush=True)

    def add(
        self, what: str, size: str, threads: int, times: Times, other: str, goal: float | None
    ) -> None:
        """`other` against the side "optstate": its time / optstate's."""
        middle, low, high = times.ratio(other, "optstate")
        said = "" if goal is None else f"{goal}: {'met' if middle >= goal else '**missed**'}"
        ours, theirs = (f"{times.median_s(side) * 1e3:.3f}" for side in ("optstate", other))
        print(
            f"| {what} | {size} | {threads} | {ours} | {theirs} | {middle:.2f} "
            f"| {low:.2f} to {high:.2f} | {said} |",
            flush=True,
        )
