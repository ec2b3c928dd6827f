"""deploy/demo --device KIND: a part of the updates by devices, and the same curve as by the CPU."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import shutil
import signal
import sys
from collections.abc import Iterator

import report
from processes import Daemon, Trainers
from screen import Screen, interrupt_once, parse_count
from text import write_text

JOB = "demo"


class Demo:
    """A run by the CPU, then one with devices, whose part changes and whose engine is killed."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen) -> None:
        self._steps: int = arguments.steps
        self._output: pathlib.Path = arguments.output
        self._screen = screen
        self._common = ["--optimizer", "optstate", "--job", JOB]
        self._common += ["--steps", str(self._steps), "--params", str(arguments.params)]
        self._common += ["--text", str(self._output / "bible.txt")]
        self._device: str = arguments.device
        self._fraction: float = arguments.offload_fraction

    def _follow(self, events: Iterator[dict], run: report.Run, until: int) -> None:
        """Shows progress, up to a step or the end."""
        for event in events:
            run.add(event)
            if event["event"] == "step":
                done = event["step"] + 1
                self._screen.progress(done, self._steps, event["loss"])
                if done >= until and until < self._steps:
                    return

    def by_the_cpu(self) -> report.Run:
        run = report.Run()
        with (
            contextlib.closing(Daemon(self._output / "cpu.log")) as daemon,
            contextlib.closing(
                Trainers(self._output, "cpu", [*self._common, "--endpoint", daemon.endpoint])
            ) as trainers,
        ):
            self._follow(trainers.events(), run, self._steps)
        return run

    def with_devices(self) -> tuple[report.Run, str]:
        say = self._screen.say
        run = report.Run()
        with contextlib.closing(
            Daemon(self._output / "devices.log", devices=self._device)
        ) as daemon:
            arguments = [*self._common, "--endpoint", daemon.endpoint]
            arguments += ["--offload-fraction", str(self._fraction)]
            with contextlib.closing(Trainers(self._output, "devices", arguments)) as trainers:
                self._follow(trainers.events(), run, self._steps // 2)
                other = 1 - self._fraction
                say(daemon.optctl("set", "job", JOB, f"offload_fraction={other:g}").rstrip())
                daemon.kill_engine(JOB)
                say(f"SIGKILL to the job's engine at step {max(run.losses) + 1}", "bad")
                self._follow(trainers.events(), run, self._steps)
            return run, daemon.optctl("describe", "job", JOB)

    def run(self) -> None:
        say, heading = self._screen.say, self._screen.heading
        write_text(self._output / "bible.txt")
        heading("GPT with optstate.AdamW, updated by the CPU")
        cpu = self.by_the_cpu()
        heading(f"The same with devices ({self._device}), the CPU's part is {self._fraction:g}")
        shared, described = self.with_devices()
        heading("Result")
        say(report.table(shared, cpu, self._steps, names=("devices", "CPU")))
        differences = [step + 1 for step in cpu.losses if cpu.losses[step] != shared.losses[step]]
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
    parser.add_argument("--device", required=True, help="as optstated --devices: emulated:2, cuda")
    parser.add_argument("--offload-fraction", type=float, default=0.5)
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
