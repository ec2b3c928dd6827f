"""Parameters of records that stay on a device come to a rank on the device without host memory.

The daemon's device and the rank's are emulated: what the daemon shares is a file, which is mapped.
"""

from __future__ import annotations

import os
import signal

import optstate
import pytest
import torch
from daemon import Daemon
from emulated_device import emulated
from optstate._torch.device import daemon_memory
from test_devices import same
from training import loss_of, train

STEPS = 6
DEVICE = "emulated-0"


@pytest.fixture(scope="module")
def device_daemon():
    running = Daemon("--devices", "emulated:1")
    yield running
    running.stop()


def model_of(dtype=torch.float32):
    """A model with parameters of one tile, of parts of one, and of many."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 600), torch.nn.Tanh(), torch.nn.Linear(600, 600), torch.nn.Linear(600, 4)
    )
    return model.to(dtype)


def kept(model, daemon, job, kind=optstate.AdamW, **options):
    """An optimizer whose records stay on the daemon's device."""
    return kind(
        model.parameters(),
        lr=0.01,
        job=job,
        model=model,
        **{
            "endpoint": daemon.shm,
            "offload_fraction": 0.0,
            "device_budget": "256MiB",
            "share_device_memory": True,
            **options,
        },
    )


def trained_on_host(daemon, job, dtype, steps=STEPS):
    model = model_of(dtype)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=daemon.shm)
    train(model, optimizer, range(steps))
    optimizer.close()
    return model


def shared_bytes(daemon, job):
    uses = daemon.optctl("describe", "job", job)["device_updates"]["uses"]
    return sum(int(use["shared_bytes"]) for use in uses)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_host_memory(seed, device_daemon, job, dtype, overlap):
    expected = trained_on_host(device_daemon, f"{job}-host", dtype)
    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of(dtype)
        optimizer = kept(model, device_daemon, job, overlap=overlap)
        train(model, optimizer, range(1))
        first = device.copies["on_device"]
        train(model, optimizer, range(1, STEPS))
        device.catch_up()
        assert shared_bytes(device_daemon, job) > 0
        # Each parameter of each step is one copy, and none comes from the host.
        count = len(list(model.parameters()))
        assert first <= count
        assert device.copies["on_device"] - first == count * (STEPS - 1)
        assert device.imports == 1
        optimizer.close()
        assert same(model, expected)
        assert not device.imported and not device.under_way and not device.registered


def test_a_job_that_updates_by_the_cpu_shares_nothing(seed, device_daemon, job, caplog):
    expected = trained_on_host(device_daemon, f"{job}-host", torch.float32)
    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of()
        optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=device_daemon.shm)
        train(model, optimizer, range(STEPS))
        optimizer.close()
        assert same(model, expected)
        assert device.imports == 0 and device.copies["on_device"] == 0
    assert not any("host memory" in each.message for each in caplog.records)


def test_records_that_stay_from_some_step_on(seed, device_daemon, job, monkeypatch):
    """An operator has them stay while the script trains, and the daemon is asked again."""
    monkeypatch.setattr(daemon_memory, "LOOKS", 4)
    expected = trained_on_host(device_daemon, f"{job}-host", torch.float32, 3 * STEPS)
    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of()
        optimizer = kept(model, device_daemon, job, offload_fraction=0.5)
        train(model, optimizer, range(STEPS))
        assert device.imports == 0  # parts between tiles of the CPU are too small
        device_daemon.run_optctl("set", "job", job, "offload_fraction=0")
        train(model, optimizer, range(STEPS, 3 * STEPS))
        assert device.imports == 1 and device.copies["on_device"] > 0
        optimizer.close()
        assert same(model, expected)


def test_what_was_asked_for_in_vain_is_said(seed, device_daemon, job, caplog):
    with pytest.warns(UserWarning, match="share_device_memory=True has no meaning"):
        kept(model_of(), device_daemon, f"{job}-host").close()
    with emulated(seed) as device:
        device.name = DEVICE
        for name, options, why in (
            ("fraction", {"offload_fraction": 0.25}, "the CPU updates 0.25 of the elements"),
            ("budget", {"device_budget": None}, "it has no device_budget"),
            ("whole", {"kind": optstate.LAMB}, "lamb need whole parameters"),
            ("wire", {"endpoint": device_daemon.grpc_unix}, "over grpc parameters are copied"),
        ):
            model = model_of()
            options = {"endpoint": device_daemon.shm, **options}
            optimizer = kept(model, device_daemon, f"{job}-{name}", **options)
            train(model, optimizer, range(2))
            optimizer.close()
            said = [each.message for each in caplog.records if why in each.message]
            assert len(said) == 1 and "host memory" in said[0], caplog.text
            caplog.clear()


@pytest.mark.parametrize("why", ["it refuses", "another device"])
def test_a_refusal_is_said_once_and_why(seed, device_daemon, job, caplog, why):
    with emulated(seed) as device:
        device.name = DEVICE if why == "it refuses" else "another-device"
        device.refuses_import = f"{why}: {job}"
        for number in range(2):
            model = model_of()
            optimizer = kept(model, device_daemon, f"{job}-{number}")
            train(model, optimizer, range(STEPS))
            optimizer.close()
            assert same(
                model, trained_on_host(device_daemon, f"{job}-{number}-host", torch.float32)
            )
        assert device.copies["on_device"] == 0 and not device.imported
    text = device.refuses_import if why == "it refuses" else "another-device"
    said = [each.message for each in caplog.records if text in each.message]
    assert said and all("through host memory" in each for each in said)
    if why == "it refuses":
        assert len(said) == 1
    else:  # the daemon names the job
        assert len(said) == 2


def test_an_engine_that_is_killed(seed, device_daemon, job):
    expected = trained_on_host(device_daemon, f"{job}-host", torch.bfloat16, 2 * STEPS)
    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of(torch.bfloat16)
        optimizer = kept(model, device_daemon, job)
        train(model, optimizer, range(STEPS))
        engine = int(device_daemon.optctl("describe", "job", job)["engine_pid"])
        os.kill(engine, signal.SIGKILL)
        train(model, optimizer, range(STEPS, STEPS + 2))
        before = device.copies["on_device"]
        train(model, optimizer, range(STEPS + 2, 2 * STEPS))
        assert device.copies["on_device"] > before
        assert device.imports == 2 and len(device.imported) == 1
        optimizer.close()
        assert same(model, expected)


def test_to_ask_may_take_another_connection(seed, device_daemon, job, monkeypatch):
    """An engine that gives the memory up may be about to end: who asks it for more gets the next
    engine, and what was registered are pages of the former one's parameters."""
    expected = trained_on_host(device_daemon, f"{job}-host", torch.float32)
    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of()
        optimizer = kept(model, device_daemon, job)
        train(model, optimizer, range(2))
        engines = [int(device_daemon.optctl("describe", "job", job)["engine_pid"])]
        is_over = daemon_memory.DaemonMemory.is_over

        def is_over_and_so_is_its_engine(self):
            if not engines:
                return is_over(self)
            os.kill(engines.pop(), signal.SIGKILL)
            return True

        monkeypatch.setattr(daemon_memory.DaemonMemory, "is_over", is_over_and_so_is_its_engine)
        before = device.registrations
        train(model, optimizer, range(2, 3))
        assert not engines
        assert device.registrations > before  # in this very step
        train(model, optimizer, range(3, STEPS))
        optimizer.close()
        assert same(model, expected)
        assert not device.imported and not device.registered


def test_an_operator_takes_the_memory_and_gives_it_back(seed, device_daemon, job):
    expected = trained_on_host(device_daemon, f"{job}-host", torch.float32, 3 * STEPS)
    with emulated(seed) as device:
        device.name = DEVICE
        model = model_of()
        optimizer = kept(model, device_daemon, job)
        train(model, optimizer, range(STEPS))
        device_daemon.run_optctl("set", "job", job, "device_budget=1MiB")
        train(model, optimizer, range(STEPS, 2 * STEPS))
        assert device.imports == 2 and len(device.imported) == 1
        device_daemon.run_optctl("set", "job", job, "device_budget=0")
        train(model, optimizer, range(2 * STEPS, 3 * STEPS))
        assert not device.imported
        optimizer.close()
        assert same(model, expected)


def test_a_load_is_not_overwritten_by_what_the_device_has(seed, device_daemon, job):
    """Weights that the script loads after a step are the job's: the device has older ones."""
    models, optimizers = [], []
    with emulated(seed) as device:
        for options in ({"offload_fraction": 1.0, "device_budget": None}, {}):
            device.name = DEVICE
            model = model_of()
            optimizer = kept(model, device_daemon, f"{job}-{len(models)}", **options)
            train(model, optimizer, range(2))
            torch.manual_seed(5)
            fresh = {name: torch.randn_like(each) for name, each in model.state_dict().items()}
            model.load_state_dict(fresh)
            train(model, optimizer, range(2, 5))
            models.append(model)
            optimizers.append(optimizer)
        for optimizer in optimizers:
            optimizer.close()
        assert same(*models)


def test_a_missing_gradient_keeps_what_the_device_has(seed, device_daemon, job):
    def with_gaps(model, optimizer):
        for step in range(STEPS):
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
        optimizer.close()
        assert device.copies["on_device"] > 0
        assert same(model, plain)
