"""deploy/demo --tier nvme: state on disk, a loss of power, and the same curve as in memory."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import time

import demo
import report
from demo import JOB
from processes import Daemon, Trainers
from screen import Screen
from text import write_text


class Demo(demo.Demo):
    """A run in memory, then one on disk that loses power halfway."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen) -> None:
        super().__init__(arguments, screen)
        self._storage = ["--placement", "nvme", "--durability", "step"]
        self._storage += ["--host-budget", arguments.host_budget]
        self._storage += ["--sub-group-size", str(arguments.sub_group_size)]

    def _train(self, name: str, arguments: list[str], run: report.Run, until: int) -> None:
        with contextlib.closing(Trainers(self.output, name, arguments)) as trainers:
            self.follow(trainers.events(), run, until)
            if until < self.steps:
                trainers.kill()

    def in_memory(self) -> report.Run:
        run = report.Run()
        with contextlib.closing(Daemon(self.output / "memory.log")) as daemon:
            self._train("memory", self.with_optstate(daemon), run, self.steps)
        return run

    def on_disk(self, disk: pathlib.Path) -> tuple[report.Run, str]:
        say = self.screen.say
        run = report.Run()
        with contextlib.closing(Daemon(self.output / "disk.log", disk)) as daemon:
            arguments = [*self.with_optstate(daemon), *self._storage]
            self._train("disk", arguments, run, self.steps // 2)
            last = max(run.losses) + 1
            begin = time.monotonic()
            daemon.lose_power(JOB)
            say(
                f"SIGKILL to the trainers, the daemon and its engine after step {last}, and all"
                " that they had in memory is removed",
                "bad",
            )
            self._train("disk", arguments, run, self.steps)
            again = run.starts[-1]["step"]
            say(f"started again: the job was on disk at step {again}", "good")
            if again < last:
                raise RuntimeError(f"step {last} was answered as durable, but is lost")
            say(f"from the loss of power to the end of the run {time.monotonic() - begin:.1f} s")
            return run, daemon.optctl("describe", "job", JOB)

    def run(self) -> None:
        write_text(self.text)
        self.screen.heading("GPT with optstate.AdamW, state in memory")
        memory = self.in_memory()
        self.screen.heading("The same with state on disk, durable at every step")
        swapped, described = self.on_disk(self.output / "nvme")
        self.show_equal(swapped, memory, ("on disk", "in memory"))
        self.show_job(described)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host-budget", default="64MiB")
    parser.add_argument("--sub-group-size", type=int, default=65536)


if __name__ == "__main__":
    demo.main(Demo, __doc__, add_arguments)
