"""Another user floods the daemon while a trainer steps and its operator asks how things are."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import optstate
import pytest
from daemon import Daemon
from training import largest_difference, loss_of, small_model, train

PROGRAM = pathlib.Path(__file__).with_name("hostile.py")
STRANGER = 4711
# The flood is counted, so that a slow machine sees as much of it as a fast one.
ATTACKS = 40
STEPS_BETWEEN_QUESTIONS = 100
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
    """Runs a flood until the block ends, as another user, who may be unable to read this file."""
    tcp = daemon.grpc_tcp.removeprefix("grpc:")
    python = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
    with PROGRAM.open() as source:
        flood = subprocess.Popen(
            [python, "-I", "-", str(daemon.socket), tcp, str(seed), str(ATTACKS)],
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

    def take_steps(count: int) -> None:
        nonlocal steps
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(model, steps).backward()
            optimizer.step()
            steps += 1

    take_steps(1)
    answered = 0
    with flood_of(flooded, seed) as flood:
        ended = False
        while not ended:
            ended = flood.poll() is not None  # one more round after the end
            take_steps(STEPS_BETWEEN_QUESTIONS)
            # Root's, in a process and a connection of its own.
            status = flooded.optctl("status")
            assert int(status["pid"]) == flooded.process.pid
            answered += 1
            jobs = flooded.optctl("get", "jobs")["jobs"]
            assert sum(int(each["uid"]) == STRANGER for each in jobs) <= JOBS_MAX
        did, errors = flood.communicate()
        assert flood.returncode == 0, errors
    print(f"seed {seed}: {steps} steps and {answered} status calls during {json.loads(did)}")
    # Other users are not shut out either: this process starts its next job over both sockets.
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
