"""The rows that peers_benchmark.py prints, as tables of Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from interleave import Times
from ratio_plot import Row

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
    rows: list[Row] = []  # of all tables, for the plot

    def __init__(self, title: str) -> None:
        self._title = title
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
        Table.rows.append(Row(self._title, what, size, threads, middle, low, high, goal))


class FlatTable:
    """Time of an element's step as something grows that should not change it."""

    GOAL = 1.1

    def __init__(self, title: str, what: str) -> None:
        print(f"\n### {title}\n")
        print(f"| {what} | ms a step | ns an element | / first row | quartiles | goal |")
        print("|---|---|---|---|---|---|", flush=True)

    def add(self, rows: Mapping[str, int], times: Times, goal: bool = True) -> None:
        """`rows`: elements by side; the first is what the others are measured against."""
        first = next(iter(rows))
        for side, elements in rows.items():
            seconds = times.median_s(side)
            share = rows[first] / elements
            middle, low, high = (ratio * share for ratio in times.ratio(side, first))
            said = "" if side == first or not goal else self._said(middle)
            print(
                f"| {side} | {seconds * 1e3:.2f} | {seconds / elements * 1e9:.2f} | {middle:.2f} "
                f"| {low:.2f} to {high:.2f} | {said} |",
                flush=True,
            )

    def _said(self, ratio: float) -> str:
        return f"{self.GOAL}: {'met' if ratio <= self.GOAL else '**missed**'}"
