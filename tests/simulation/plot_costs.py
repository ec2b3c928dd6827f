#!/usr/bin/env python3
"""Draws what a node costs over the number of nodes, from files that simulation --csv has written.

    for nodes in 100 300 1000; do
      bazel run -c opt //tests/simulation -- --nodes $nodes --csv /tmp/$nodes.csv
    done
    tests/simulation/plot_costs.py /tmp/costs.svg /tmp/*.csv

Where attach times, memory and log lines of a node are bounded, the lines are level. The program
itself draws the distributions of one run (--plot).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import pathlib
import sys
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Panel:
    """One diagram: columns of the table over the number of nodes, each over a divisor."""

    title: str
    columns: dict[str, str]  # and how each is named
    divisor: float = 1


PANELS = (
    Panel("simulated ms until attached", {"attach_p50_ms": "p50", "attach_p99_ms": "p99"}),
    Panel("CPU ms of a node", {"cpu_ms_per_node": ""}),
    Panel(
        "KiB of a node",
        {"heap_bytes_per_node": "heap", "file_bytes_per_node": "files"},
        divisor=1024,
    ),
    Panel("log lines of a node", {"log_lines_mean": "mean", "log_lines_max": "most"}),
)
_MARKERS = ("o", "s")


class TableError(Exception):
    """A file is not a table of the simulation; the text says which, and what it lacks."""


def read(paths: Sequence[pathlib.Path]) -> list[dict[str, str]]:
    """Returns the rows of all files. TableError, OSError."""
    needed = {"scenario", "nodes", "ranks"}.union(*(panel.columns for panel in PANELS))
    rows = []
    for path in paths:
        with path.open(newline="") as file:
            table = csv.DictReader(file)
            lacking = sorted(needed.difference(table.fieldnames or ()))
            if lacking:
                raise TableError(
                    f"{path} has no column {', '.join(lacking)}: give files that"
                    " `bazel run //tests/simulation -- --csv FILE` has written"
                )
            rows.extend(table)
    if not rows:
        raise TableError("the files have no row: every simulation has ended with an error")
    return rows


def plot(rows: Sequence[dict[str, str]], path: pathlib.Path) -> None:
    """Writes a panel for each cost, with a line for each scenario and number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Equal numbers give an equal and small file.
    matplotlib.rcParams.update({"svg.hashsalt": "optstate", "svg.fonttype": "none"})
    figure, grid = pyplot.subplots(2, 2, figsize=(11, 7), squeeze=False, layout="constrained")
    names = sorted({(row["scenario"], int(row["ranks"])) for row in rows})
    for axes, panel in zip(grid.flat, PANELS):
        for index, (scenario, ranks) in enumerate(names):
            of_name = sorted(
                (row for row in rows if (row["scenario"], int(row["ranks"])) == (scenario, ranks)),
                key=lambda row: int(row["nodes"]),
            )
            for marker, (column, label) in zip(_MARKERS, panel.columns.items()):
                axes.plot(
                    [int(row["nodes"]) for row in of_name],
                    [float(row[column]) / panel.divisor for row in of_name],
                    marker=marker,
                    markersize=4,
                    linewidth=1,
                    color=f"C{index % 10}",
                    markerfacecolor=f"C{index % 10}" if marker == "o" else "none",
                    label=f"{scenario}, {ranks} ranks{', ' if label else ''}{label}",
                )
        axes.set_title(panel.title, fontsize=9)
        axes.set_xscale("log")
        axes.set_xlabel("nodes", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description="draws what a node costs over the number of nodes")
    parser.add_argument("plot", type=pathlib.Path, help="the file to write: .svg, .png")
    parser.add_argument("tables", type=pathlib.Path, nargs="+", help="written by simulation --csv")
    arguments = parser.parse_args()
    try:
        plot(read(arguments.tables), arguments.plot)
    except (TableError, OSError) as error:
        print(f"plot_costs: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
