"""The programs of the demo share their arguments, the progress they show, and their end."""

from __future__ import annotations

import argparse
import pathlib
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Callable

import report
from processes import Daemon
from screen import Screen, interrupt_once, parse_count

JOB = "demo"


class Demo:
    """Two runs, one after the other, each of which has the machine to itself."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen) -> None:
        self.steps: int = arguments.steps
        self.output: pathlib.Path = arguments.output
        self.screen = screen
        self.text = self.output / "bible.txt"
        self.common = ["--steps", str(self.steps), "--params", str(arguments.params)]
        self.common += ["--text", str(self.text)]

    def with_optstate(self, daemon: Daemon) -> list[str]:
        """The trainers' arguments for the demo's job."""
        job = ["--optimizer", "optstate", "--job", JOB, "--endpoint", daemon.endpoint]
        return [*job, *self.common]

    def follow(self, events: Iterator[dict], run: report.Run, until: int | None = None) -> None:
        """Shows progress, up to a step or the end."""
        for event in events:
            run.add(event)
            if event["event"] == "step":
                done = event["step"] + 1
                self.screen.progress(done, self.steps, event["loss"])
                # The trainers say more after the last step.
                if until is not None and until <= done < self.steps:
                    return

    def show_equal(self, ours: report.Run, others: report.Run, names: tuple[str, str]) -> None:
        """Shows both curves; RuntimeError when they differ in a bit."""
        say = self.screen.say
        self.screen.heading("Result")
        say(report.table(ours, others, self.steps, names=names))
        losses = others.losses
        differences = [step + 1 for step in losses if losses[step] != ours.losses[step]]
        if differences:
            raise RuntimeError(f"the losses differ from step {min(differences)} on")
        say()
        say(f"all {self.steps} losses are equal, bit for bit", "good")

    def show_job(self, described: str) -> None:
        self.screen.heading("optctl describe job " + JOB)
        self.screen.say(described.rstrip())

    def run(self) -> None:
        raise NotImplementedError


def main(
    demo: type[Demo],
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Runs a demo with the arguments of the command line. Exits with 1 when it fails."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--params", type=parse_count, required=True, help="such as 6M")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder, replaced")
    add_arguments(parser)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.output, ignore_errors=True)
    arguments.output.mkdir(parents=True)
    screen = Screen()
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, interrupt_once)
    try:
        demo(arguments, screen).run()
    except KeyboardInterrupt:
        screen.say("stopped; everything it started has ended", "bad")
        sys.exit(130)
    except (RuntimeError, OSError) as error:
        screen.say(str(error), "bad")
        sys.exit(1)
