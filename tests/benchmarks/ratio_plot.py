"""Draws the ratios that peers_benchmark.py prints."""

from __future__ import annotations

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class Row:
    """One ratio: another side's time / optstate's, median and quartiles."""

    title: str
    what: str
    size: str
    threads: int
    ratio: float
    low: float
    high: float
    goal: float | None


def plot(rows: list[Row], path: pathlib.Path) -> None:
    """A panel for each table, a line of points for each row of it and number of threads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Equal numbers give an equal and small file.
    matplotlib.rcParams.update({"svg.hashsalt": "optstate", "svg.fonttype": "none"})
    titles = list(dict.fromkeys(row.title for row in rows))
    figure, grid = pyplot.subplots(
        len(titles), 1, figsize=(11, 3.4 * len(titles)), squeeze=False, layout="constrained"
    )
    for axes, title in zip(grid[:, 0], titles):
        of_title = [row for row in rows if row.title == title]
        sizes = list(dict.fromkeys(row.size for row in of_title))
        names = list(dict.fromkeys((row.what, row.threads) for row in of_title))
        colors = {
            what: f"C{index % 10}" for index, what in enumerate(dict.fromkeys(n for n, _ in names))
        }
        spread, middle = 0.6 / max(len(names), 1), (len(names) - 1) / 2
        for index, (what, threads) in enumerate(names):
            line = [row for row in of_title if (row.what, row.threads) == (what, threads)]
            places = [sizes.index(row.size) + (index - middle) * spread for row in line]
            axes.errorbar(
                places,
                [row.ratio for row in line],
                yerr=[
                    [row.ratio - row.low for row in line],
                    [row.high - row.ratio for row in line],
                ],
                fmt="o" if threads == 1 else "s",
                markerfacecolor=colors[what] if threads == 1 else "none",
                color=colors[what],
                markersize=4,
                elinewidth=0.8,
                label=f"{what}, {threads} thread{'' if threads == 1 else 's'}",
            )
            for place, row in zip(places, line):
                if row.goal is not None:
                    axes.plot([place - spread / 2, place + spread / 2], [row.goal] * 2, "k-", lw=1)
        axes.set_title(title, fontsize=9)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%.2g"))
        axes.axhline(1, color="gray", lw=0.5)
        axes.set_xticks(range(len(sizes)), sizes)
        axes.set_ylabel("other / optstate")
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, metadata={"Date": None})
