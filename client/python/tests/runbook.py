"""The commands of the runbook in deploy/README.md: finds them, and runs them for a test.

A command is a line of a block of shell, or a span of code in the text that has several words, or is
a flag or a script of deploy/. A test names those that it runs with @executes, and runs each through
its Operator, which takes the text from the README and replaces the words that stand for others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import shlex
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from typing import NamedTuple

import optstate
import torch

README = pathlib.Path(__file__).resolve().parents[3] / "deploy" / "README.md"
RUN_TIMEOUT_S = 60

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
# A setting of the configuration, of systemd or of a log line: `huge_pages: mount`, `X="a b"`.
_SETTING = re.compile(r"[\w.]+(:|=)")
# A variable for a command that follows: `OPTSTATE_TOKEN=x optctl ...`.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=")
_COMMENT = re.compile(r"\s+# .*$")
_NO_COMMANDS = {"open step"}


class Command(NamedTuple):
    """One command of the README, as it has it; a function is one command with its body."""

    line: int
    text: str

    def is_named(self, name: str) -> bool:
        """Returns whether `name` is its text, or with "..." at the end how that begins."""
        if name.endswith("..."):
            return self.text.startswith(name[:-3])
        return self.text == name


class Block(NamedTuple):
    """A fenced block without its indentation."""

    line: int
    language: str
    text: str


def runbook_of(readme: str) -> tuple[int, str]:
    """Returns the line before the half for operators, and its text."""
    start, end = readme.index("\n# Runbook\n"), readme.index("\n# Contributing\n")
    return readme.count("\n", 0, start) + 1, readme[start + 1 : end]


def blocks_of(text: str) -> list[Block]:
    return [
        Block(text.count("\n", 0, found.start()) + 1, found[2], textwrap.dedent(found[3]))
        for found in _FENCE.finditer(text)
    ]


def _lines_of(block: Block) -> Iterator[Command]:
    """The commands of a block of shell: continued lines are joined, comments left out."""
    text = block.text.replace("\\\n", " ")
    body: list[str] = []
    for line in text.splitlines():
        line = line if body else " ".join(_COMMENT.sub("", line).split())
        if body or line.endswith("{") or "() {" in line:
            body.append(line)
            if line != "}":
                continue
            line, body = "\n".join(body), []
        if line and not line.startswith("#"):
            yield Command(block.line, line)


def _is_command(span: str) -> bool:
    if span in _NO_COMMANDS or (_SETTING.match(span) and not _VARIABLE.match(span)):
        return False
    return " " in span or span.startswith(("--", "deploy/"))


def commands_of(text: str) -> list[Command]:
    """All commands of a text, each once."""
    found = [
        each for block in blocks_of(text) if block.language == "sh" for each in _lines_of(block)
    ]
    # As many lines as before, so that the others keep their numbers.
    prose = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for span in _SPAN.finditer(prose):
        if _is_command(span[1]):
            found.append(Command(prose.count("\n", 0, span.start()) + 1, span[1]))
    once: dict[str, Command] = {}
    for each in found:
        once.setdefault(each.text, each)
    return list(once.values())


def read_commands() -> list[Command]:
    """The runbook's commands, with the README's lines."""
    before, text = runbook_of(README.read_text())
    return [each._replace(line=each.line + before) for each in commands_of(text)]


def read_yaml(heading: str) -> str:
    """The runbook's block of YAML that begins like this."""
    _, text = runbook_of(README.read_text())
    (found,) = [
        block.text
        for block in blocks_of(text)
        if block.language == "yaml" and block.text.startswith(heading)
    ]
    return found


EXECUTED: list[str] = []


def executes(*names: str) -> Callable[[Callable], Callable]:
    """Says which commands a test runs through its Operator; one that does not fails."""
    EXECUTED.extend(names)

    def checked(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*, operator: Operator, **fixtures: object) -> None:
            test(operator=operator, **fixtures)
            operator.check_ran(names)

        return run

    return checked


class Operator:
    """Runs commands of the runbook in a folder, with the wheel's programs on the path."""

    def __init__(self, folder: pathlib.Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self._known = read_commands()
        self._ran: set[str] = set()

    def _take(self, name: str) -> str:
        (command,) = [each for each in self._known if each.is_named(name)]
        self._ran.add(name)
        return command.text

    def _text(self, names: tuple[str, ...], replaced: dict[str, str] | None) -> str:
        text = "\n".join(map(self._take, names))
        for old, new in (replaced or {}).items():
            assert old in text, f"the README has no {old} in {text}"
            text = text.replace(old, new)
        return text

    def words(self, name: str, replaced: dict[str, str] | None = None) -> list[str]:
        """Returns the words of a command or flag, for the caller to use."""
        return shlex.split(self._text((name,), replaced))

    def run(
        self,
        *names: str,
        replaced: dict[str, str] | None = None,
        then: str = "",
        exit_status: int = 0,
    ) -> str:
        """Runs commands in one shell, the last with `then` behind it; returns what they print."""
        command = self._text(names, replaced) + then
        done = self.execute(["bash", "-euo", "pipefail", "-c", command])
        said = f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == exit_status, said
        return done.stdout + done.stderr

    def execute(self, command: list[str], **options: object) -> subprocess.CompletedProcess:
        """Runs a program as the commands are run."""
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            **{"cwd": self.folder, "env": self.environment, **options},
        )

    @contextlib.contextmanager
    def started(self, command: list[str], **options: object) -> Iterator[subprocess.Popen]:
        """Runs a daemon until it answers `optctl status`; then stops it, which has to succeed."""
        with open(self.folder / "log", "w") as log:
            process = subprocess.Popen(
                command,
                stderr=log,
                **{"cwd": self.folder, "env": self.environment, **options},
            )
        try:
            self._await_answer(process, options)
            yield process
            process.terminate()
            assert process.wait(timeout=RUN_TIMEOUT_S) == 0
        finally:
            # A kill alone would leave its engines behind.
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=RUN_TIMEOUT_S)
            process.kill()
            process.wait()

    def _await_answer(self, process: subprocess.Popen, options: dict[str, object]) -> None:
        while self.execute(["optctl", "status"], **options).returncode != 0:
            try:  # also the pause between two attempts
                status = process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"optstated ended with {status}: {self.log}")

    @property
    def log(self) -> str:
        """The lines that the daemon started here has written."""
        return (self.folder / "log").read_text(errors="replace")

    def check_ran(self, names: tuple[str, ...]) -> None:
        assert self._ran == set(names), f"@executes says {sorted(set(names) ^ self._ran)} besides"


def attach(endpoint: str, **options: object) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small trainer of the job gpt."""
    model = torch.nn.Linear(64, 64)
    optimizer = optstate.AdamW(
        model.parameters(), lr=1e-3, job="gpt", model=model, endpoint=endpoint, **options
    )
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()


def programs(folder: pathlib.Path, paths: dict[str, str]) -> str:
    """Returns a PATH on which these programs are first."""
    folder.mkdir()
    for name, path in paths.items():
        (folder / name).symlink_to(path)
    return f"{folder}:{os.environ.get('PATH', '')}"
