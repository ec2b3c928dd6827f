"""The screen of the demo while it runs, and its early end."""

from __future__ import annotations

import os
import signal
import sys


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


def interrupt_once(*_: object) -> None:
    """Interrupts the demo, and ignores later signals: the clean-up is not interrupted."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    raise KeyboardInterrupt
