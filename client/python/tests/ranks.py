"""Runs a function in several processes that form a gloo group.

Processes fork from a server that has imported torch, so that they start in
milliseconds. They talk to the test through pipes; nothing sleeps.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

RECEIVE_TIMEOUT_S = 120

_context = multiprocessing.get_context("forkserver")
# torch imports torch._dynamo, which takes seconds, when the first optimizer is made.
_context.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "optstate.optimizers"])


class RankFailed(AssertionError):
    """A rank raised; the text is its traceback."""


def _main(
    function: Callable,
    connection: Connection,
    rank: int,
    world_size: int,
    meeting: str,
    args: tuple,
) -> None:
    import torch
    import torch.distributed as dist

    # Handles SIGINT as in a terminal: a process started in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from optstate._torch.gradients import views as gradient_views

    torch.set_num_threads(1)
    gradient_views.BYTES_MIN = 1  # as in conftest.py
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    try:
        if meeting:
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
            )
        connection.send(("result", function(connection, rank, *args)))
    except BaseException:
        connection.send(("error", traceback.format_exc()))


class Ranks:
    """`function(connection, rank, *args)` in world_size processes.

    What the function returns is its result; what it sends before, as
    ("said", value) through say(), is heard.
    """

    def __init__(
        self, function: Callable, world_size: int, *args: Any, grouped: bool = True
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="optstate-test-")
        meeting = os.path.join(self._directory.name, "meeting") if grouped else ""
        self.processes = []
        self.connections: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_main, args=(function, theirs, rank, world_size, meeting, args), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def _receive(self, rank: int, kind: str) -> Any:
        connection = self.connections[rank]
        if not connection.poll(RECEIVE_TIMEOUT_S):
            raise RankFailed(f"rank {rank} says nothing")
        try:
            said, value = connection.recv()
        except EOFError:
            self.processes[rank].join(RECEIVE_TIMEOUT_S)
            raise RankFailed(f"rank {rank} died: {self.processes[rank].exitcode}") from None
        if said == "error":
            raise RankFailed(f"rank {rank}: {value}")
        assert said == kind, (said, value)
        return value

    def hear(self, rank: int) -> Any:
        """The next value that a rank says."""
        return self._receive(rank, "said")

    def results(self) -> list[Any]:
        """Returns the result of each rank."""
        return [self._receive(rank, "result") for rank in range(len(self.processes))]

    def kill(self, *ranks: int) -> None:
        """SIGKILL."""
        for rank in ranks:
            self.processes[rank].kill()
        for rank in ranks:
            self.processes[rank].join()

    def close(self) -> None:
        for process, connection in zip(self.processes, self.connections):
            process.kill()
            process.join()
            connection.close()
        self._directory.cleanup()


def say(connection: Connection, value: Any) -> None:
    connection.send(("said", value))


@contextlib.contextmanager
def running(
    function: Callable, world_size: int, *args: Any, grouped: bool = True
) -> Iterator[Ranks]:
    ranks = Ranks(function, world_size, *args, grouped=grouped)
    try:
        yield ranks
    finally:
        ranks.close()


def run(function: Callable, world_size: int, *args: Any) -> list[Any]:
    """Runs to the end; returns the results by rank."""
    with running(function, world_size, *args) as ranks:
        return ranks.results()
