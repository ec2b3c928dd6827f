"""deploy/demo --tier nvme with a tiny model: all in memory is lost, and no bit differs.

The ranks are those of ranks.py in place of torchrun's, whose processes import torch for seconds
each. deploy/nightly runs the demo itself.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import types
from collections.abc import Iterator

import pytest
import ranks
from documented_programs import commands

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "deploy/demo_app"))

import processes  # noqa: E402
import screen  # noqa: E402
import swapped  # noqa: E402

STEPS = 8


def _rank(connection, rank, words, last_step) -> None:
    """One rank, whose events are said instead of written; after last_step it waits to be killed."""
    import train

    def write(**fields) -> None:
        if rank == 0:
            ranks.say(connection, fields)
            if fields["event"] == "step" and fields["step"] == last_step:
                connection.recv()

    train.train(train.parse_arguments(words), types.SimpleNamespace(write=write))
    write(event="end")


class Trainers:
    """Stands for processes.Trainers, without torchrun.

    The first run on disk waits to be killed: that of a tiny model would end before.
    """

    def __init__(self, output: pathlib.Path, name: str, arguments: list[str]) -> None:
        words = [*map(str, arguments), "--events", str(output / name), "--pids", str(output)]
        self._was_killed = output / f"{name}.killed"
        is_cut_short = name == "disk" and not self._was_killed.exists()
        last_step = STEPS // 2 - 1 if is_cut_short else None
        self._ranks = ranks.Ranks(_rank, 2, words, last_step)
        self.close = self._ranks.close

    def kill(self) -> None:
        self._ranks.kill(0, 1)
        self._was_killed.touch()

    def events(self) -> Iterator[dict]:
        return iter(lambda: self._ranks.hear(0), {"event": "end"})


@pytest.fixture
def demo(tmp_path, monkeypatch) -> swapped.Demo:
    """The demo, with the smallest budget: three of the state's records, of some 25."""
    text = "And God said, Let there be light: and there was light.\n" * 9
    monkeypatch.setattr(processes, "BIN", commands(tmp_path / "bin"))
    monkeypatch.setattr(swapped, "Trainers", Trainers)
    monkeypatch.setattr(swapped, "write_text", lambda path: path.write_text(text))
    output = tmp_path / "demo"
    output.mkdir()
    arguments = argparse.Namespace(
        steps=STEPS, params=50e3, output=output, host_budget="144KiB", sub_group_size=4096
    )
    return swapped.Demo(arguments, screen.Screen())


def test_a_loss_of_power_changes_no_bit(demo, capsys):
    demo.run()
    said = capsys.readouterr().out
    assert f"all {STEPS} losses are equal, bit for bit" in said
    assert f"the job was on disk at step {STEPS // 2}\n" in said
    assert "nvme" in said


def test_a_lost_step_fails_the_demo(demo):
    """The demo goes on from the disk alone: nothing in memory helps it."""
    demo._storage[demo._storage.index("step")] = "none"
    swapped.write_text(demo.text)
    with pytest.raises(RuntimeError, match="was answered as durable, but is lost"):
        demo.on_disk(demo.output / "nvme")
