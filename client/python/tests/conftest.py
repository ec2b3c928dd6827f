"""Fixtures: a daemon for the session, a job name for each test, printed seeds."""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch
from daemon import Daemon, program, start_daemon_with_disks
from emulated_device import EmulatedBackend, emulated
from optstate._torch.gradients import views as gradient_views
from runbook import Operator, programs
from sleeping import is_in_memory

_numbers = itertools.count()
# Tensors are small; OpenMP's barriers cost far more than they gain on a busy machine.
torch.set_num_threads(1)
# Gives small models gradients that are views.
gradient_views.BYTES_MIN = 1


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The daemon that most tests share, each with jobs of its own, which it keeps."""
    config = tmp_path_factory.mktemp("daemon") / "optstated.yaml"
    config.write_text("limits:\n  jobs_max: 4096\n  user_jobs_max: 4096\n")
    running = Daemon("--config", str(config))
    yield running
    running.stop()


@pytest.fixture
def sleep_daemon(tmp_path: pathlib.Path) -> Iterator[Daemon]:
    """A daemon whose jobs can sleep."""
    if is_in_memory(tmp_path):
        pytest.skip(f"{tmp_path} is in memory, where no job sleeps: set --basetemp to a disk")
    running = start_daemon_with_disks(tmp_path, "disk")
    yield running
    running.stop()


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    """A daemon to be killed or drained."""
    running = Daemon()
    yield running
    running.stop()


@pytest.fixture
def job() -> str:
    return f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(autouse=True)
def node_without_daemon(monkeypatch: pytest.MonkeyPatch, daemon: Daemon) -> None:
    """Unless a test says otherwise, optimizers attach to the shared daemon."""
    monkeypatch.setenv("OPTSTATE_ENDPOINT", daemon.shm)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Each test's own seed, printed when it fails; $OPTSTATE_TEST_SEED replaces it."""
    value = int(os.environ.get("OPTSTATE_TEST_SEED", zlib.crc32(request.node.nodeid.encode())))
    print(f"seed: {value}")
    torch.manual_seed(value)
    return value


@pytest.fixture
def device(seed: int) -> Iterator[EmulatedBackend]:
    """The device that all tensors in host memory are taken for."""
    with emulated(seed) as backend:
        yield backend


@pytest.fixture
def operator() -> Iterator[Operator]:
    """Runs the runbook's commands that the test names with @executes, in a folder in memory."""
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = pathlib.Path(tempfile.mkdtemp(prefix="optstate-test-", dir=shm))
    path = programs(folder / "bin", {name: program(name) for name in ("optstated", "optctl")})
    yield Operator(folder, {**os.environ, "PATH": path, "LC_ALL": "C"})
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start_daemon(operator: Operator) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons with these flags, which the operator's commands reach."""
    started = []

    def start(*arguments: str) -> Daemon:
        started.append(Daemon(*arguments))
        operator.environment["OPTSTATE_ENDPOINT"] = started[-1].shm
        return started[-1]

    yield start
    for each in started:
        each.stop()
