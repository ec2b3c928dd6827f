"""Training within less memory than the parameters have, as the kernel asserts it."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from daemon import Daemon
from memory_group import MemoryGroup

HERE = pathlib.Path(__file__).parent
EXAMPLE = HERE.parent.parent / "examples" / "train_layer_by_layer.py"
LAYERS, WIDTH = 48, 1024
PARAMETER_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
# The program may take this much beside its imports: less than a third of its parameters.
LIMIT_BYTES = 64 << 20
NETWORK = ("--layers", str(LAYERS), "--width", str(WIDTH), "--steps", "2")


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        made = MemoryGroup()
    except OSError as error:
        pytest.skip(f"no memory group can be made here: {error}")
    yield made
    made.close()


@pytest.fixture
def disk_daemon(tmp_path: pathlib.Path) -> Iterator[Daemon]:
    (tmp_path / "disk").mkdir(mode=0o700)
    running = Daemon("--nvme-dir", str(tmp_path / "disk"))
    yield running
    running.stop()


def run_limited(group: MemoryGroup, *arguments: str) -> tuple[int, str]:
    """Runs the example in the group, limited beside what its imports take; returns its status
    and output."""
    program = subprocess.Popen(
        [sys.executable, str(HERE / "limited_trainer.py"), str(EXAMPLE), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=group.enter,
    )
    assert program.stdout.readline() == "imported\n"
    limit = group.usage + LIMIT_BYTES
    group.limit(limit)
    output, _ = program.communicate("go on\n", timeout=600)
    assert group.max_usage <= limit
    return program.returncode, output


def last_line(output: str) -> str:
    return output.splitlines()[-1]


def test_training_takes_less_memory_than_the_parameters_have(group, disk_daemon, job):
    assert LIMIT_BYTES < PARAMETER_BYTES / 3
    status, output = run_limited(
        group,
        *("--endpoint", disk_daemon.grpc_unix, "--job", job, *NETWORK),
        *("--host-budget", "48MiB", "--max-in-cpu", "16MiB"),
    )
    assert status == 0, output
    in_memory = subprocess.run(
        [sys.executable, str(HERE / "limited_trainer.py"), str(EXAMPLE)]
        + ["--endpoint", disk_daemon.grpc_unix, "--placement", "host", *NETWORK],
        input="go on\n",
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert last_line(output).startswith("parameters ")
    assert last_line(output) == last_line(in_memory.stdout)  # the same bits


def test_the_same_network_in_memory_does_not_fit(group):
    status, output = run_limited(group, "--in-memory", *NETWORK)
    assert status != 0, output
    assert "parameters" not in output
