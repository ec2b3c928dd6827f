"""deploy/demo --device KIND: a part of the updates by devices, and the same curve as by the CPU."""

from __future__ import annotations

import argparse
import contextlib

import demo
import report
from demo import JOB
from processes import Daemon, Trainers
from screen import Screen
from text import write_text


class Demo(demo.Demo):
    """A run by the CPU, then one with devices, whose part changes and whose engine is killed."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen) -> None:
        super().__init__(arguments, screen)
        self._device: str = arguments.device
        self._fraction: float = arguments.offload_fraction

    def by_the_cpu(self) -> report.Run:
        run = report.Run()
        with (
            contextlib.closing(Daemon(self.output / "cpu.log")) as daemon,
            contextlib.closing(
                Trainers(self.output, "cpu", self.with_optstate(daemon))
            ) as trainers,
        ):
            self.follow(trainers.events(), run)
        return run

    def with_devices(self) -> tuple[report.Run, str]:
        say = self.screen.say
        run = report.Run()
        with contextlib.closing(
            Daemon(self.output / "devices.log", devices=self._device)
        ) as daemon:
            arguments = [*self.with_optstate(daemon), "--offload-fraction", str(self._fraction)]
            with contextlib.closing(Trainers(self.output, "devices", arguments)) as trainers:
                events = trainers.events()
                self.follow(events, run, self.steps // 2)
                other = 1 - self._fraction
                say(daemon.optctl("set", "job", JOB, f"offload_fraction={other:g}").rstrip())
                daemon.kill_engine(JOB)
                say(f"SIGKILL to the job's engine at step {max(run.losses) + 1}", "bad")
                self.follow(events, run)
            return run, daemon.optctl("describe", "job", JOB)

    def run(self) -> None:
        write_text(self.text)
        self.screen.heading("GPT with optstate.AdamW, updated by the CPU")
        cpu = self.by_the_cpu()
        self.screen.heading(
            f"The same with devices ({self._device}); the CPU's part is {self._fraction:g}"
        )
        shared, described = self.with_devices()
        self.show_equal(shared, cpu, ("devices", "CPU"))
        self.show_job(described)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", required=True, help="as optstated --devices: emulated:2, cuda")
    parser.add_argument("--offload-fraction", type=float, default=0.5)


if __name__ == "__main__":
    demo.main(Demo, __doc__, add_arguments)
