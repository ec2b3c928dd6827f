"""tests/simulation/plot_costs.py draws the tables that the simulation writes."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/simulation"))

import plot_costs

# The header is that of simulation_test's CsvTest.
_NAMES = (
    "scenario,seed,nodes,ranks,attach_p50_ms,attach_p99_ms,attach_max_ms,"
    "again_p99_ms,cpu_ms_per_node,heap_bytes_per_node,file_bytes_per_node,"
    "log_lines_mean,log_lines_max,steps,rounds_per_step\n"
)


def _table(directory: pathlib.Path, nodes: int, heap: int = 2048) -> pathlib.Path:
    path = directory / f"{nodes}.csv"
    path.write_text(
        f"{_NAMES}node_loss,7,{nodes},4,0.5,2.25,2.25,3,1.5,{heap},400,4.5,5,14,1\n"
        f"rolling_upgrade,7,{nodes},4,0.5,2.25,2.25,,1.5,{heap},400,4.5,5,14,1\n"
    )
    return path


def test_each_cost_has_its_lines(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows = plot_costs.read([_table(tmp_path, 10), _table(tmp_path, 20)])
    assert [row["nodes"] for row in rows] == ["10", "10", "20", "20"]
    first, again, other = (tmp_path / f"{name}.svg" for name in ("first", "again", "other"))
    plot_costs.plot(rows, first)
    plot_costs.plot(rows, again)
    drawn = first.read_text()
    assert drawn == again.read_text()
    for panel in plot_costs.PANELS:
        assert panel.title in drawn
    assert "node_loss, 4 ranks, p99" in drawn and "rolling_upgrade, 4 ranks, heap" in drawn
    rows = plot_costs.read([_table(tmp_path, 10), _table(tmp_path, 20, heap=4096)])
    plot_costs.plot(rows, other)
    assert other.read_text() != drawn


def test_other_files_are_named(tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("scenario,nodes\nnode_loss,10\n")
    with pytest.raises(plot_costs.TableError, match=r"other\.csv has no column attach_p50_ms"):
        plot_costs.read([_table(tmp_path, 10), other])
    empty = tmp_path / "empty.csv"
    empty.write_text(_NAMES)
    with pytest.raises(plot_costs.TableError, match="no row"):
        plot_costs.read([empty])
    with pytest.raises(OSError):
        plot_costs.read([tmp_path / "none.csv"])
