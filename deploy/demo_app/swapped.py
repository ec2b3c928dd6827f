"""deploy/demo --tier nvme: state on disk, a loss of power, and the same curve as in memory."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Iterator

import report
from processes import Daemon, Trainers
from screen import Screen, interrupt_once, parse_count
from text import write_text

JOB = "demo"


class Demo:
    """A run in memory, then one on disk that loses power halfway."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen) -> None:
        self._steps: int = arguments.steps
        self._output: pathlib.Path = arguments.output
        self._screen = screen
        self._common = ["--optimizer", "optstate", "--job", JOB]
        self._common += ["--steps", str(self._steps), "--params", str(arguments.params)]
        self._common += ["--text", str(self._output / "bible.txt")]
        self._storage = ["--placement", "nvme", "--durability", "step"]
        self._storage += ["--host-budget", arguments.host_budget]
        self._storage += ["--sub-group-size", str(arguments.sub_group_size)]

    def _follow(self, events: Iterator[dict], run: report.Run, until: int) -> None:
        """Shows progress, up to a step or the end."""
        for event in events:
            run.add(event)
            if event["event"] == "step":
                done = event["step"] + 1
                self._screen.progress(done, self._steps, event["loss"])
                if done >= until and until < self._steps:
                    return

    def _train(self, name: str, arguments: list[str], run: report.Run, until: int) -> None:
        with contextlib.closing(Trainers(self._output, name, arguments)) as trainers:
            self._follow(trainers.events(), run, until)
            if until < self._steps:
                trainers.kill()

    def in_memory(self) -> report.Run:
        run = report.Run()
        with contextlib.closing(Daemon(self._output / "memory.log")) as daemon:
            arguments = [*self._common, "--endpoint", daemon.endpoint]
            self._train("memory", arguments, run, self._steps)
        return run

    def on_disk(self, disk: pathlib.Path) -> tuple[report.Run, str]:
        say = self._screen.say
        run = report.Run()
        with contextlib.closing(Daemon(self._output / "disk.log", disk)) as daemon:
            arguments = [*self._common, *self._storage, "--endpoint", daemon.endpoint]
            self._train("disk", arguments, run, self._steps // 2)
            last = max(run.losses) + 1
            begin = time.monotonic()
            daemon.lose_power(JOB)
            say(
                f"SIGKILL to the trainers, the daemon and its engine after step {last}, and all"
                " that they had in memory is removed",
                "bad",
            )
            self._train("disk", arguments, run, self._steps)
            again = run.starts[-1]["step"]
            say(f"started again: the job was on disk at step {again}", "good")
            if again < last:
                raise RuntimeError(f"step {last} was answered as durable, but is lost")
            say(f"from the loss of power to the end of the run {time.monotonic() - begin:.1f} s")
            return run, daemon.optctl("describe", "job", JOB)

    def run(self) -> None:
        say, heading = self._screen.say, self._screen.heading
        write_text(self._output / "bible.txt")
        heading("GPT with optstate.AdamW, state in memory")
        memory = self.in_memory()
        heading("The same with state on disk, durable at every step")
        disk = self._output / "nvme"
        swapped, described = self.on_disk(disk)
        heading("Result")
        say(report.table(swapped, memory, self._steps, names=("on disk", "in memory")))
        differences = [
            step + 1 for step in memory.losses if memory.losses[step] != swapped.losses[step]
        ]
        if differences:
            raise RuntimeError(f"the losses differ from step {min(differences)} on")
        say()
        say(f"all {self._steps} losses are equal, bit for bit", "good")
        heading("optctl describe job " + JOB)
        say(described.rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--params", type=parse_count, required=True, help="such as 6M")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder, replaced")
    parser.add_argument("--host-budget", default="64MiB")
    parser.add_argument("--sub-group-size", type=int, default=65536)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.output, ignore_errors=True)
    arguments.output.mkdir(parents=True)
    screen = Screen()
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, interrupt_once)
    try:
        Demo(arguments, screen).run()
    except KeyboardInterrupt:
        screen.say("stopped; everything it started has ended", "bad")
        sys.exit(130)
    except (RuntimeError, OSError) as error:
        screen.say(str(error), "bad")
        sys.exit(1)


if __name__ == "__main__":
    main()
