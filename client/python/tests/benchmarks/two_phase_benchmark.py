"""Compares a step of two phases with one of one phase: one rank, one daemon, no network.

Both take turns in one run. Prints the median times of a step, their ratio (goal: at most 1.05 at
16 Mi elements), and the calls of the daemon that a step makes: the second phase is one more.
"""

from __future__ import annotations

import argparse
import array
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

from optstate import _native
from optstate._torch.nodes.resolution import Verdict
from optstate._torch.optimizer_info import infos
from optstate.session import Session
from optstate.session_spec import ParameterSpec, SessionSpec

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch
from daemon import Daemon

_FLOAT32 = 1
_ADAMW = (1e-3, 0.9, 0.999, 1e-8, 0.01)


def open_session(endpoint: str, name: str, numel: int, *, two_phase: bool) -> Session:
    parameter = ParameterSpec("weight", (numel,), numel, _FLOAT32, _FLOAT32, 0)
    session = Session.open(
        SessionSpec(
            job=f"{name}-{os.getpid()}",
            optimizer=infos()["adam"].kind,
            group_options=[0],
            parameters=[parameter],
            endpoint=endpoint,
            two_phase=two_phase,
        )
    )
    values = torch.randn(numel)
    session.begin_load()
    session.load(_native.MASTER, 0, _FLOAT32, values.data_ptr())
    session.finish_load()
    return session


def stepper(session: Session, gradient: torch.Tensor) -> Callable[[], None]:
    groups = _native.array_of(_native.Hyperparams, 1)
    groups[0].value[: len(_ADAMW)] = _ADAMW
    parameters = array.array("I", [0])
    gradients = array.array("Q", [gradient.data_ptr()])

    def step() -> None:
        number = session.committed_step + 1
        session.push_gradients(number, 0, parameters, gradients)
        outcome = session.commit(number, groups)
        if outcome.prepared:
            session.decide(number, outcome.digest, Verdict.COMMIT)
        assert session.committed_step == number

    return step


def count_calls(step: Callable[[], None]) -> int:
    """Takes a step; returns how many calls of the C API it makes, each a round trip or less."""
    call = Session._call
    calls = 0

    def counted(self: Session, function: Callable[..., int], *arguments: object) -> None:
        nonlocal calls
        calls += 1
        call(self, function, *arguments)

    Session._call = counted  # type: ignore[method-assign]
    try:
        step()
    finally:
        Session._call = call  # type: ignore[method-assign]
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    gradient = torch.randn(arguments.numel)
    daemon = Daemon()
    try:
        sides = {
            name: stepper(
                open_session(daemon.shm, name, arguments.numel, two_phase=name == "two"), gradient
            )
            for name in ("one", "two")
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, step in sides.items():
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
        calls = {name: count_calls(step) for name, step in sides.items()}
        one, two = (statistics.median(times[name][3:]) for name in ("one", "two"))
        print(f"{arguments.numel} float32 elements")
        print("| phases | median step | beside one phase | calls of the daemon |")
        print("|---|---|---|---|")
        for name, median in (("one", one), ("two", two)):
            ratio = median / one
            print(f"| {name} | {median * 1e3:.2f} ms | {ratio:.3f} | {calls[name]} |")
    finally:
        daemon.stop()


if __name__ == "__main__":
    main()
