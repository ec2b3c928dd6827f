"""tests/benchmarks/swapper_report.py says and draws what nvme_swapper_benchmark.py has measured."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/benchmarks"))

import swapper_report
from interleave import Times

MiB = swapper_report.MiB
OURS, SWAPPER, RAW = "optstate", "DeepSpeed, pipelined: PipelinedOptimizerSwapper", "raw"
SETTINGS = {
    "dtype": "bfloat16",
    "elements": 64 * MiB,
    "state_bytes": 768 * MiB,
    "threads": 2,
    "file_system": "ext4",
}


@pytest.fixture
def run() -> swapper_report.Run:
    """Five rounds, in the last of which the disk was slow for all."""
    times = Times(
        {
            OURS: [0.4, 0.4, 0.4, 0.4, 4.0],
            SWAPPER: [0.8, 0.8, 0.8, 0.8, 8.0],
            RAW: [0.5, 0.5, 0.5, 0.5, 5.0],
        }
    )
    moved = {OURS: (600, 680), SWAPPER: (1024, 1024), RAW: (768, 768)}
    figures = [
        swapper_report.figures_of(what, 96 * MiB, times, OURS, read * MiB, written * MiB)
        for what, (read, written) in moved.items()
    ]
    missing = [swapper_report.Missing("DeepSpeed, defaults", "libaio is not there")]
    return swapper_report.Run(SETTINGS, figures, missing, times.seconds)


def test_the_table_has_a_line_a_side_and_why_one_is_missing(run):
    lines = swapper_report.table(run).splitlines()
    assert "| optstate | 96 | 400 | 1 |  | 600 | 680 |" in lines
    assert f"| {SWAPPER} | 96 | 800 | 2.00 | 2.00 to 2.00 | 1024 | 1024 |" in lines
    assert "DeepSpeed, defaults is left out: libaio is not there" in lines


def test_raw_reads_and_writes_are_those_of_as_many_bytes(run):
    # 1,280 MiB of raw reads and writes take 0.5 s * 1280 / 1536.
    assert run.over_raw == pytest.approx(0.4 / (0.5 * 1280 / 1536))
    first, *others = run.figures
    unmoved = dataclasses.replace(first, read_bytes=0, written_bytes=0)
    assert dataclasses.replace(run, figures=[unmoved, *others]).over_raw is None


def test_programs_read_the_figures_and_each_round(run, tmp_path):
    swapper_report.write_json(run, tmp_path / "run.json")
    read = json.loads((tmp_path / "run.json").read_text())
    assert read["benchmark"] == "nvme_swapper"
    assert [each["over_optstate"][0] for each in read["figures"]] == [1, 2, 1.25]
    assert read["seconds"][SWAPPER] == [0.8, 0.8, 0.8, 0.8, 8.0]
    assert read["missing"] == [{"what": "DeepSpeed, defaults", "why": "libaio is not there"}]
    assert read["over_raw"] == pytest.approx(0.96)


def test_the_ratios_are_drawn(run, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    first, again = tmp_path / "first.svg", tmp_path / "again.svg"
    swapper_report.plot(run, first)
    swapper_report.plot(run, again)
    drawn = first.read_text()
    assert drawn == again.read_text()
    assert "A step over 768 MiB of AdamW state on disk (64 Mi elements), ext4" in drawn
    assert "PipelinedOptimizerSwapper" in drawn and f">{RAW}<" in drawn
    assert f">{OURS}<" not in drawn
