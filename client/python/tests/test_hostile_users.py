"""Another user floods the daemon while a trainer steps and its operator asks how things are."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import optstate
import pytest
from daemon import Daemon
from training import largest_difference, loss_of, small_model, train

PROGRAM = pathlib.Path(__file__).with_name("hostile.py")
STRANGER = 4711
FLOOD_S = 6
CALM_STEPS = 200
# Engines of the stranger's are processes: few, so that the test is no test of the machine.
JOBS_MAX = 3
CONFIG = f"limits:\n  user_jobs_max: {JOBS_MAX}\n"


@pytest.fixture
def flooded(tmp_path):
    """A daemon that every user can reach."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    running = Daemon("--config", str(config))
    running.directory.chmod(0o711)
    yield running
    running.stop()


@contextlib.contextmanager
def flood_of(daemon: Daemon, seed: int) -> Iterator[subprocess.Popen]:
    """As another user, who need not be able to read this file; over with the block."""
    tcp = daemon.grpc_tcp.removeprefix("grpc:")
    python = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
    with PROGRAM.open() as source:
        flood = subprocess.Popen(
            [python, "-I", "-", str(daemon.socket), tcp, str(seed), str(FLOOD_S)],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            user=STRANGER,
            group=STRANGER,
            extra_groups=[],
            text=True,
        )
    try:
        yield flood
    finally:
        flood.kill()
        flood.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user for a while")
def test_a_hostile_user_disturbs_nobody(flooded, job, seed):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=flooded.shm)
    steps = 0

    def step() -> float:
        nonlocal steps
        optimizer.zero_grad()
        loss_of(model, steps).backward()
        begin = time.monotonic()
        optimizer.step()
        steps += 1
        return time.monotonic() - begin

    calm = [step() for _ in range(CALM_STEPS)]
    loud = []
    answered = 0
    with flood_of(flooded, seed) as flood:
        while flood.poll() is None:
            loud += [step() for _ in range(100)]
            # Root's, in a process and a connection of its own.
            status = flooded.optctl("status")
            assert int(status["pid"]) == flooded.process.pid
            answered += 1
            jobs = flooded.optctl("get", "jobs")["jobs"]
            assert sum(int(each["uid"]) == STRANGER for each in jobs) <= JOBS_MAX
        did, errors = flood.communicate()
        assert flood.returncode == 0, errors
    print(f"seed {seed}: {json.loads(did)}")
    print(
        f"{answered} status calls answered; a step took {statistics.median(calm) * 1e3:.3f} ms, "
        f"{statistics.median(loud) * 1e3:.3f} ms under the flood "
        f"({statistics.median(loud) / statistics.median(calm):.2f} times; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f})"
    )
    assert answered > 0
    # Nobody else is shut out either: this process's next job, over both sockets.
    for endpoint in (flooded.shm, flooded.grpc_tcp):
        other = small_model()
        with_other = optstate.AdamW(
            other.parameters(), lr=0.01, job=f"{job}-{endpoint[:4]}", endpoint=endpoint
        )
        train(other, with_other, range(2))
        assert with_other.committed_step == 2
        with_other.close()

    calmly = small_model()
    undisturbed = optstate.AdamW(calmly.parameters(), lr=0.01)
    train(calmly, undisturbed, range(steps))
    assert largest_difference(model, calmly) == 0
    assert optimizer.committed_step == steps
    optimizer.close()

    log = flooded.log
    assert not [line for line in log.splitlines() if line.startswith("2026-01-01T00:00:00")]
    assert "(limits.user_jobs_max)" in log
    assert "too many parameters or groups" in log
    assert len(log) < 1 << 20, "the flood fills the disk"
