"""The figures of nvme_swapper_benchmark.py: as a table of Markdown, as JSON and as a plot."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import ratio_plot
from interleave import Times

MiB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Figures:
    """One side of a run. Triples are a median and the quartiles."""

    what: str
    memory_bytes: int  # through which its state passes
    step_s: tuple[float, float, float]
    over_optstate: tuple[float, float, float]  # of the rounds' step / optstate's in the same round
    read_bytes: float  # a step
    written_bytes: float


@dataclasses.dataclass(frozen=True)
class Missing:
    """A side that could not be measured."""

    what: str
    why: str


@dataclasses.dataclass(frozen=True)
class Run:
    """Sides that took turns in one process and on one file system; optstate is the first."""

    settings: Mapping[str, object]
    figures: Sequence[Figures]
    missing: Sequence[Missing]
    seconds: Mapping[str, Sequence[float]]  # by side, a step of each round

    @property
    def over_raw(self) -> float | None:
        """A step of optstate / raw reads and writes of as many bytes; None: there were none."""
        ours, raw = self.figures[0], self.figures[-1]
        moved = [each.read_bytes + each.written_bytes for each in (ours, raw)]
        if not all(moved):
            return None
        return ours.step_s[0] / (raw.step_s[0] * moved[0] / moved[1])


def figures_of(
    what: str, memory_bytes: int, times: Times, first: str, read_bytes: float, written_bytes: float
) -> Figures:
    """first: name of optstate's side."""
    ratio = (1.0, 1.0, 1.0) if what == first else times.ratio(what, first)
    return Figures(what, memory_bytes, times.middle(what), ratio, read_bytes, written_bytes)


def table(run: Run) -> str:
    lines = [
        "| what | memory, MiB | step, ms | / optstate | quartiles | read, MiB | written, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for side in run.figures:
        middle, low, high = side.over_optstate
        is_first = side is run.figures[0]
        ratio = "1 | " if is_first else f"{middle:.2f} | {low:.2f} to {high:.2f}"
        lines.append(
            f"| {side.what} | {side.memory_bytes / MiB:.0f} | {side.step_s[0] * 1e3:.0f} | {ratio}"
            f" | {side.read_bytes / MiB:.0f} | {side.written_bytes / MiB:.0f} |"
        )
    lines += [f"\n{each.what} is left out: {each.why}" for each in run.missing]
    if run.over_raw is not None:
        lines.append(
            f"\nA step of optstate / raw reads and writes of as many bytes: {run.over_raw:.2f}"
        )
    return "\n".join(lines)


def write_json(run: Run, path: pathlib.Path) -> None:
    """Writes one object, with the seconds of every round."""
    fields = {"benchmark": "nvme_swapper", **dataclasses.asdict(run), "over_raw": run.over_raw}
    path.write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


def plot(run: Run, path: pathlib.Path) -> None:
    """Draws each side's time / optstate's, with quartiles; .svg or .png."""
    its = run.settings
    elements, state = its["elements"] // MiB, its["state_bytes"] // MiB
    title = f"A step over {state} MiB of AdamW state on disk ({elements} Mi elements)"
    title += f", {its['file_system']}"
    rows = [
        ratio_plot.Row(
            title,
            f"{its['dtype']} parameters",
            side.what.replace(": ", ":\n"),  # its place on the axis
            its["threads"],
            *side.over_optstate,
            None,
        )
        for side in run.figures[1:]
    ]
    ratio_plot.plot(rows, path)
