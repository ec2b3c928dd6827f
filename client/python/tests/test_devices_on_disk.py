"""Records that stay on devices while their job is on disk, durable, or both: no bit differs."""

from __future__ import annotations

import os
import signal

import optstate
import pytest
import torch
from daemon import start_daemon_with_disks
from test_nvme import SWAPPED, lose_power, model_of, same, train

KEPT = {"offload_fraction": 0.0, "device_budget": "64MiB"}


@pytest.fixture
def daemon(tmp_path):
    running = start_daemon_with_disks(tmp_path, "disk", devices="emulated:2")
    yield running
    running.stop()


def resident_bytes(daemon, job):
    uses = daemon.optctl("describe", "job", job)["device_updates"]["uses"]
    return sum(int(use["resident_bytes"]) for use in uses)


def bytes_read(daemon, job):
    return int(daemon.optctl("describe", "job", job)["disk"]["bytes_read"])


def test_most_steps_read_none_of_them(daemon, job):
    models = [model_of(torch.bfloat16) for _ in range(2)]
    names = [f"{job}-{number}" for number in range(2)]
    optimizers = [
        optstate.AdamW(model.parameters(), job=name, endpoint=daemon.shm, **SWAPPED, **kept)
        for model, name, kept in zip(models, names, ({}, KEPT))
    ]

    def train_both(first, last):
        for model, optimizer in zip(models, optimizers):
            train(model, optimizer, range(first, last))
        assert same(*models)

    # They are copied to their places in the first one.
    train_both(0, 1)
    before = [bytes_read(daemon, name) for name in names]
    train_both(1, 9)
    plain, kept = (bytes_read(daemon, name) - old for name, old in zip(names, before))
    assert resident_bytes(daemon, names[1]) > 0
    assert plain > 0
    # Once in four steps; frames that are left over spare the job without a budget some as well.
    assert kept <= plain / 2
    os.kill(int(daemon.optctl("describe", "job", names[1])["engine_pid"]), signal.SIGKILL)
    train_both(9, 14)
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.parametrize("durability", ["step", "every 3"])
@pytest.mark.parametrize("where", [SWAPPED, {"sub_group_size": 4096}], ids=["nvme", "host"])
@pytest.mark.parametrize(
    "dtype, master",
    [(torch.float32, "float32"), (torch.bfloat16, "float32"), (torch.bfloat16, "split")],
    ids=str,
)
def test_a_loss_of_power_leaves_the_durable_step(dtype, master, where, durability, daemon, job):
    expected = model_of(dtype)
    with optstate.AdamW(
        expected.parameters(), endpoint=daemon.shm, master=master, offload_fraction=1.0
    ) as optimizer:
        train(expected, optimizer, range(12))
    options = {**where, **KEPT, "durability": durability, "master": master, "job": job}
    for end in (5, 8):
        model = model_of(dtype)
        optimizer = optstate.AdamW(model.named_parameters(), endpoint=daemon.shm, **options)
        train(model, optimizer, range(optimizer.committed_step, end))
        assert resident_bytes(daemon, job) > 0
        lose_power(daemon, job)
        # The optimizer's own process would attach again: it loses power too.
        optimizer._served.attachment.session.close()
    model = model_of(dtype)
    with optstate.AdamW(model.named_parameters(), endpoint=daemon.shm, **options) as optimizer:
        assert optimizer.committed_step >= (8 if durability == "step" else 3)
        train(model, optimizer, range(optimizer.committed_step, 12))
        assert same(model, expected)
