"""Gradients are on a rank's device for the daemon's records there, besides the gradient area.

The daemon's device and the rank's are emulated: what the rank shares is a file, which is mapped.
"""

from __future__ import annotations

import os
import signal

import optstate
import pytest
import torch
from daemon import Daemon
from emulated_device import emulated
from optstate._torch.device import gradient_memory
from optstate.device_gradients import SharedGradients
from test_device_memory import DEVICE, STEPS, kept, model_of, trained_on_host
from test_devices import same
from training import loss_of, train

# The steps after which the gradients of all parameters are shared; with overlap one less, as
# parameters are read then before the next step.
FIRST = 3


@pytest.fixture(scope="module")
def device_daemon():
    running = Daemon("--devices", "emulated:1")
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(gradient_memory, "_said", set())


def use_of(daemon, job):
    """(bytes of gradients that the device took from the rank's memory there, elements refused)"""
    (use,) = daemon.optctl("describe", "job", job)["device_updates"]["uses"]
    return int(use.get("gradient_bytes", 0)), int(use.get("refused_elements", 0))


def gradient_bytes(model):
    return sum(each.numel() * each.element_size() for each in model.parameters())


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_device_takes_them_and_bits_are_those_of_the_host(
    seed, device_daemon, job, dtype, overlap
):
    expected = trained_on_host(device_daemon, f"{job}-host", dtype)
    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of(dtype)
        optimizer = kept(model, device_daemon, job, overlap=overlap)
        first = FIRST - int(overlap)
        train(model, optimizer, range(first))
        assert use_of(device_daemon, job) == (0, 0)
        train(model, optimizer, range(first, STEPS))
        assert use_of(device_daemon, job) == ((STEPS - first) * gradient_bytes(model), 0)
        assert device.copies["for_daemon"] >= (STEPS - first) * len(list(model.parameters()))
        assert len(device.exported) == 1
        optimizer.close()
        assert same(model, expected)
        assert not device.exported and not device.under_way and not device.registered


def test_where_the_driver_registers_nothing(seed, device_daemon, job):
    """Gradients that go to the host through a staging buffer are on the device as well."""
    expected = trained_on_host(device_daemon, f"{job}-host", torch.float32)
    with emulated(seed) as device:
        device.name = DEVICE
        device.refuses = "it refuses"
        model = model_of()
        optimizer = kept(model, device_daemon, job)
        train(model, optimizer, range(STEPS))
        assert use_of(device_daemon, job) == ((STEPS - FIRST) * gradient_bytes(model), 0)
        optimizer.close()
        assert same(model, expected)


def test_a_job_that_updates_by_the_cpu_shares_nothing(seed, device_daemon, job, caplog):
    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of()
        optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=device_daemon.shm)
        train(model, optimizer, range(STEPS))
        optimizer.close()
        assert not device.exported and device.copies["for_daemon"] == 0
    assert not any("host memory" in each.message for each in caplog.records)


def test_a_refusal_is_said_once_and_why(seed, device_daemon, job, caplog):
    with emulated(seed) as device:
        device.name = DEVICE
        device.refuses_export = f"it refuses: {job}"
        for number in range(2):
            model = model_of()
            optimizer = kept(model, device_daemon, f"{job}-{number}")
            train(model, optimizer, range(STEPS))
            assert use_of(device_daemon, f"{job}-{number}") == (0, 0)
            optimizer.close()
            host = f"{job}-{number}-host"
            assert same(model, trained_on_host(device_daemon, host, torch.float32))
    said = [each.message for each in caplog.records if device.refuses_export in each.message]
    assert len(said) == 1 and "through host memory" in said[0]


def test_an_engine_that_is_killed(seed, device_daemon, job):
    expected = trained_on_host(device_daemon, f"{job}-host", torch.bfloat16, 3 * STEPS)
    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of(torch.bfloat16)
        optimizer = kept(model, device_daemon, job)
        train(model, optimizer, range(STEPS))
        assert use_of(device_daemon, job)[0] > 0
        engine = int(device_daemon.optctl("describe", "job", job)["engine_pid"])
        os.kill(engine, signal.SIGKILL)
        # The next engine has no memory of the rank's until it is offered anew.
        train(model, optimizer, range(STEPS, 3 * STEPS))
        taken, refused = use_of(device_daemon, job)
        assert taken > 0 and refused == 0
        assert len(device.exported) == 1
        optimizer.close()
        assert same(model, expected)


def test_an_operator_takes_the_records_back(seed, device_daemon, job):
    expected = trained_on_host(device_daemon, f"{job}-host", torch.float32, 2 * STEPS)
    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of()
        optimizer = kept(model, device_daemon, job)
        train(model, optimizer, range(STEPS))
        assert len(device.exported) == 1
        device_daemon.run_optctl("set", "job", job, "device_budget=0")
        train(model, optimizer, range(STEPS, 2 * STEPS))
        assert not device.exported
        optimizer.close()
        assert same(model, expected)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_step_that_ends_before_its_push_is_taken_again(
    seed, device_daemon, job, monkeypatch, where
):
    """The device has gradients of a step that was not pushed: what is taken again counts."""
    expected = trained_on_host(device_daemon, f"{job}-host", torch.float32)
    mark = SharedGradients.mark

    def interrupted(self, step, parameters, offsets):
        if where == "after":
            mark(self, step, parameters, offsets)
        raise Interrupted

    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of()
        optimizer = kept(model, device_daemon, job)
        train(model, optimizer, range(STEPS - 1))
        optimizer.zero_grad()
        (17 * loss_of(model, 0)).backward()  # of another batch
        with monkeypatch.context() as patch:
            patch.setattr(SharedGradients, "mark", interrupted)
            with pytest.raises(Interrupted):
                optimizer.step()
        train(model, optimizer, range(STEPS - 1, STEPS))
        assert use_of(device_daemon, job) == ((STEPS - FIRST) * gradient_bytes(model), 0)
        optimizer.close()
        assert same(model, expected)


def test_a_missing_gradient_leaves_the_last_one_alone(seed, device_daemon, job):
    def with_gaps(model, optimizer):
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step % 2:
                model[2].weight.grad = None
            optimizer.step()

    plain = model_of()
    optimizer = optstate.AdamW(
        plain.parameters(), lr=0.01, job=f"{job}-host", endpoint=device_daemon.shm
    )
    with_gaps(plain, optimizer)
    optimizer.close()
    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of()
        optimizer = kept(model, device_daemon, job)
        with_gaps(model, optimizer)
        taken, refused = use_of(device_daemon, job)
        assert taken > 0 and refused == 0
        optimizer.close()
        assert same(model, plain)
