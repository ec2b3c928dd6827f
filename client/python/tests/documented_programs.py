"""The programs that a reader's commands name, whatever else is installed."""

from __future__ import annotations

import pathlib
import shlex
import socket
import sys

from daemon import program


def commands(folder: pathlib.Path) -> pathlib.Path:
    """Makes a folder with the programs, for $PATH."""
    folder.mkdir()
    starts = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "optctl": [program("optctl")],
        "optstated": [program("optstated")],
    }
    for name, words in starts.items():
        add_command(folder, name, f'exec {shlex.join(words)} "$@"')
    return folder


def add_command(folder: pathlib.Path, name: str, script: str) -> None:
    """Adds a program to a folder: lines of sh."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
