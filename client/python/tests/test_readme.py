"""Runs the commands and scripts of the READMEs, as a reader would who copies them.

A fenced block's words after the language say what becomes of it:

    ```python NAME.py    is saved as NAME.py; commands of all sections may run it
    ```python            is a script by itself, and is run
    ```sh run            is run by bash
    ```text              after one that was run: what that prints to stdout; "..." is any text

Other blocks are not run. Each section of level 2 runs in a folder of its own, with a daemon of
its own that has a directory for state on disk, and an emulated device.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from daemon import Daemon
from documented_programs import commands

FOLDER = pathlib.Path(__file__).resolve().parents[1]
READMES = {"guide": FOLDER / "README.md", "top": FOLDER.parents[1] / "README.md"}
RUN_TIMEOUT_S = 300

_BLOCK = re.compile(r"^```(\w*)[ \t]*([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^## +(.+)$", re.MULTILINE)


class Block(NamedTuple):
    """One fenced block of a README."""

    line: int
    section: str
    language: str
    words: str
    text: str

    @property
    def is_file(self) -> bool:
        return self.language == "python" and self.words.endswith(".py")

    @property
    def is_run(self) -> bool:
        return (self.language, self.words) in {("python", ""), ("sh", "run")}

    def command(self) -> list[str]:
        if self.language == "python":
            return [sys.executable, "-c", self.text]
        return ["bash", "-euo", "pipefail", "-c", self.text]


def blocks_of(readme: str) -> list[Block]:
    """The fenced blocks, in order, each with the section that it is in."""
    headings = [
        found
        for found in _HEADING.finditer(readme)
        if not any(each.start() < found.start() < each.end() for each in _BLOCK.finditer(readme))
    ]
    blocks = []
    for found in _BLOCK.finditer(readme):
        before = [each.group(1) for each in headings if each.start() < found.start()]
        line = readme.count("\n", 0, found.start()) + 1
        blocks.append(Block(line, before[-1] if before else "", *found.groups()))
    return blocks


def sections() -> Iterator[object]:
    for name, path in READMES.items():
        ran = [block.section for block in blocks_of(path.read_text()) if block.is_run]
        for section in dict.fromkeys(ran):
            yield pytest.param(path, section, id=f"{name}: {section}")


def prints(expected: str, printed: str) -> bool:
    """Returns whether `printed` is `expected`, in which "..." is any text and columns any width."""
    lines = ([" ".join(line.split()) for line in text.splitlines()] for text in (expected, printed))
    expected, printed = ("\n".join(each).strip() for each in lines)
    pattern = ".*".join(re.escape(part) for part in expected.split("..."))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


@pytest.fixture
def disk_daemon(tmp_path: pathlib.Path) -> Iterator[Daemon]:
    (tmp_path / "disk").mkdir(mode=0o700)
    running = Daemon("--nvme-dir", str(tmp_path / "disk"), "--devices", "emulated")
    yield running
    running.stop()


@pytest.mark.parametrize("path, section", list(sections()))
def test_a_section_does_what_it_says(path, section, disk_daemon, tmp_path):
    blocks = blocks_of(path.read_text())
    folder = tmp_path / "reader"
    folder.mkdir()
    for block in blocks:
        if block.is_file:
            assert not (folder / block.words).exists(), f"{block.words} twice in {path}"
            (folder / block.words).write_text(block.text)
    environment = {
        **os.environ,
        "OPTSTATE_ENDPOINT": disk_daemon.shm,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{commands(tmp_path / 'bin')}:{os.environ.get('PATH', '')}",
    }
    for block, after in zip(blocks, [*blocks[1:], None]):
        if block.section != section or not block.is_run:
            continue
        done = subprocess.run(
            block.command(),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        where = f"{path}:{block.line}"
        assert done.returncode == 0, f"{where}: exit status {done.returncode}\n{done.stderr}"
        if after is not None and after.language == "text":
            assert prints(after.text, done.stdout), f"{where} prints\n{done.stdout}{done.stderr}"


def test_blocks_are_found():
    found = blocks_of("# A\n\n```sh run\n## no heading\n```\n\n## B\n\n```python b.py\nb\n```\n")
    assert [(each.line, each.section, each.is_run) for each in found] == [
        (3, "", True),
        (9, "B", False),
    ]
    assert found[1].is_file and found[1].text == "b\n"


@pytest.mark.parametrize(
    "expected, printed, same",
    [
        ("step 1\n", "step 1\n", True),
        ("step 1\n", "step 2\n", False),
        ("step 1\n", "step 1\nmore\n", False),
        ("A ... B\n1 ...\n", "A   C  B\n1     2\n", True),
        ("...\n", "", True),
    ],
)
def test_what_is_printed_is_compared(expected, printed, same):
    assert prints(expected, printed) == same
