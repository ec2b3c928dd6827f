"""deploy/demo after its setup: both runs, the kill, the report."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Iterator

import report
from processes import Daemon, Trainers
from text import write_text

JOB = "demo"


class Screen:
    """Headings and progress: in colour and in place on a terminal, plain elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._line_open = False

    def say(self, text: str = "", style: str = "") -> None:
        if self._line_open:
            print()
            self._line_open = False
        codes = {"heading": "\033[1m", "good": "\033[32m", "bad": "\033[31m", "dim": "\033[2m"}
        if self._terminal and style:
            text = f"{codes[style]}{text}\033[0m"
        print(text, flush=True)

    def heading(self, text: str) -> None:
        self.say(f"== {text} ==", "heading")

    def progress(self, step: int, steps: int, loss: float) -> None:
        text = f"step {step:4d}/{steps}  loss {loss:.4f}"
        if self._terminal:
            bar = "█" * (30 * step // steps)
            print(f"\r{bar:<30} {text}", end="", flush=True)
            self._line_open = True
        elif step == steps or step % max(1, steps // 10) == 0:
            print(text, flush=True)


def parse_count(text: str) -> float:
    """6M, 500k or a plain number."""
    factor = {"k": 1e3, "m": 1e6}.get(text[-1].lower())
    return float(text[:-1]) * factor if factor else float(text)


class Demo:
    """Both runs, one after the other: each has the machine to itself."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen) -> None:
        self._steps: int = arguments.steps
        self._output: pathlib.Path = arguments.output
        self._screen = screen
        self._common = ["--steps", str(self._steps), "--params", str(arguments.params)]
        self._common += ["--text", str(self._output / "bible.txt")]

    def _follow(self, events: Iterator[dict], run: report.Run, until: int) -> None:
        """Shows progress, up to a step or the end."""
        for event in events:
            run.add(event)
            if event["event"] == "step":
                done = event["step"] + 1
                self._screen.progress(done, self._steps, event["loss"])
                if done >= until and until < self._steps:
                    return

    def train_with_torch(self) -> report.Run:
        run = report.Run()
        with contextlib.closing(
            Trainers(self._output, "torch", ["--optimizer", "torch", *self._common])
        ) as trainers:
            self._follow(trainers.events(), run, self._steps)
        return run

    def train_with_optstate(self, daemon: Daemon) -> tuple[report.Run, float]:
        """The run, and seconds from its second start to its first step after it."""
        arguments = ["--optimizer", "optstate", "--job", JOB, "--endpoint", daemon.endpoint]
        arguments += self._common
        run = report.Run()
        with contextlib.closing(Trainers(self._output, "optstate", arguments)) as trainers:
            self._follow(trainers.events(), run, self._steps // 2)
            pids = ", ".join(map(str, trainers.kill()))
        self._screen.say(
            f"SIGKILL to both trainers (pids {pids}) after step {max(run.losses) + 1}", "bad"
        )
        begin = time.monotonic()
        with contextlib.closing(Trainers(self._output, "optstate", arguments)) as trainers:
            events = trainers.events()
            self._follow(events, run, self._steps // 2 + 1)
            restart_s = time.monotonic() - begin
            self._screen.say(
                f"started again: they went on from committed step {run.starts[-1]['step']},"
                " with nothing read from disk",
                "good",
            )
            self._follow(events, run, self._steps)
        return run, restart_s

    def run(self) -> None:
        say, heading = self._screen.say, self._screen.heading
        write_text(self._output / "bible.txt")
        with contextlib.closing(Daemon(self._output / "optstated.log")) as daemon:
            heading("GPT with optstate.AdamW, two ranks")
            ours, restart_s = self.train_with_optstate(daemon)
            described = daemon.optctl("describe", "job", JOB)
        heading("The same with torch.optim.AdamW, two ranks")
        torchs = self.train_with_torch()
        heading("Result")
        say(report.table(ours, torchs, self._steps))
        say()
        say(report.summary(ours, torchs))
        say()
        say(report.memory_table(ours, torchs))
        say()
        again = ours.starts[-1]
        say(
            f"re-attached in {1e3 * again['attach_s']:.0f} ms with {again['parameters']:,}"
            f" parameters; from the restart to the next step {restart_s:.1f} s, most of it"
            " importing torch"
        )
        heading("optctl describe job " + JOB)
        say(described.rstrip())
        heading("Text generated by the model")
        say(ours.sample)
        plot = self._output / "loss.png"
        report.plot(ours, torchs, again["step"], plot)
        heading("Plot")
        say(str(plot))


def interrupt_once(*_: object) -> None:
    """What cleans up after an interrupt is not interrupted."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--params", type=parse_count, required=True, help="such as 6M")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder, replaced")
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
