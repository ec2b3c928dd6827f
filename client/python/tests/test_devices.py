"""Updates that devices share: the same bits, while the share changes and engines are killed."""

from __future__ import annotations

import os
import signal

import optstate
import pytest
import ranks
import torch
from daemon import Daemon
from optstate.errors import (
    FailedPreconditionError,
    UnavailableError,
)
from training import bits, loss_of, train


@pytest.fixture
def device_daemon():
    running = Daemon("--devices", "emulated:2")
    yield running
    running.stop()


def model_of(dtype=torch.float32):
    """A model for training.train, of parameters that have several tiles."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 1200), torch.nn.Tanh(), torch.nn.Linear(1200, 4))
    return model.to(dtype)


def same(ours, others):
    return bits(ours.parameters()) == bits(others.parameters())


def updates(daemon, job):
    return daemon.optctl("describe", "job", job).get("device_updates")


def resident_bytes(daemon, job):
    return sum(int(use["resident_bytes"]) for use in updates(daemon, job)["uses"])


def states(optimizer):
    """Returns the bits of all state, by parameter and name."""
    return [
        {name: bits([torch.as_tensor(value)]) for name, value in entry.items() if value is not None}
        for entry in optimizer.state_dict()["state"].values()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "RMSprop", "LAMB", "Adafactor"])
def test_every_fraction_gives_the_bits_of_the_cpu(device_daemon, name, dtype):
    models = []
    for fraction in (None, 0.0, 0.3, 1.0):
        model = model_of(dtype)
        optimizer = getattr(optstate, name)(
            model.parameters(),
            lr=0.01,
            job=f"f{fraction}",
            model=model,
            endpoint=device_daemon.shm,
            offload_fraction=fraction,
        )
        train(model, optimizer, range(5))
        models.append(model)
        shared = updates(device_daemon, f"f{fraction}")
        if fraction in (None, 1.0):
            assert shared is None
        else:
            assert shared["devices"] and not shared["problem"]
            assert int(shared["device_elements"]) > 0
        optimizer.close()
    assert all(same(model, models[0]) for model in models[1:])


def matrices_of(dtype):
    """A model whose parameters Muon updates."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 60, bias=False), torch.nn.Tanh(), torch.nn.Linear(60, 4, bias=False)
    )
    return model.to(dtype)


def test_matrices_of_muon_have_the_bits_of_the_cpu(device_daemon):
    models = []
    for fraction in (None, 0.0, 0.5):
        model = matrices_of(torch.float32)
        optimizer = optstate.Muon(
            model.parameters(),
            lr=0.01,
            job=f"muon{fraction}",
            model=model,
            endpoint=device_daemon.shm,
            offload_fraction=fraction,
        )
        train(model, optimizer, range(3))
        models.append(model)
        if fraction is not None:
            assert int(updates(device_daemon, f"muon{fraction}")["device_elements"]) > 0
        optimizer.close()
    assert all(same(model, models[0]) for model in models[1:])


def test_the_fraction_changes_while_it_trains_and_engines_are_killed(device_daemon):
    ours, others = model_of(), model_of()
    shared = optstate.AdamW(
        ours.parameters(),
        job="shared",
        model=ours,
        endpoint=device_daemon.shm,
        offload_fraction=0.5,
    )
    plain = optstate.AdamW(
        others.parameters(), job="plain", model=others, endpoint=device_daemon.shm
    )
    for round_, fraction in enumerate((0.0, 0.3, 1.0, 0.7)):
        device_daemon.run_optctl("set", "job", "shared", f"offload_fraction={fraction}")
        first = 3 * round_
        train(ours, shared, range(first, first + 1))
        engine = int(device_daemon.optctl("describe", "job", "shared")["engine_pid"])
        os.kill(engine, signal.SIGKILL)
        train(ours, shared, range(first + 1, first + 3))
        train(others, plain, range(first, first + 3))
        assert same(ours, others)
    text = device_daemon.run_optctl("describe", "job", "shared")
    assert "70% of elements updated by the CPU, 30% by devices" in text


def test_the_script_changes_the_fraction(device_daemon):
    ours, others = model_of(), model_of()
    shared = optstate.AdamW(ours.parameters(), model=ours, endpoint=device_daemon.shm)
    plain = optstate.AdamW(others.parameters(), endpoint=device_daemon.shm)
    for step, fraction in enumerate((0.25, 0, 1, 0.1)):
        shared.set_offload_fraction(fraction)
        train(ours, shared, range(step, step + 1))
        train(others, plain, range(step, step + 1))
        assert same(ours, others)
        text = device_daemon.run_optctl("describe", "job", shared.job)
        assert (f"{fraction:.0%} of elements updated by the CPU" in text) == (fraction < 1)
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="offload_fraction"):
            shared.set_offload_fraction(wrong)
    device_daemon.stop_gently()
    with pytest.raises(UnavailableError):
        shared.set_offload_fraction(0.5)


@pytest.mark.parametrize("name", ["AdamW", "Lion", "LAMB", "Adafactor", "Muon"])
def test_records_stay_on_devices(device_daemon, name):
    new_model = matrices_of if name == "Muon" else model_of
    ours, others = new_model(torch.bfloat16), new_model(torch.bfloat16)
    kept = getattr(optstate, name)(
        ours.parameters(),
        lr=0.01,
        job="kept",
        model=ours,
        endpoint=device_daemon.shm,
        offload_fraction=0.0,
        device_budget="64MiB",
    )
    plain = getattr(optstate, name)(
        others.parameters(), lr=0.01, job="plain", model=others, endpoint=device_daemon.shm
    )

    def train_both(first, last):
        train(ours, kept, range(first, last))
        train(others, plain, range(first, last))
        assert same(ours, others)

    train_both(0, 3)
    assert resident_bytes(device_daemon, "kept") > 0
    assert "resident" in device_daemon.run_optctl("describe", "job", "kept")
    assert "resident" in device_daemon.run_optctl("describe", "device")
    assert states(kept) == states(plain)
    train_both(3, 9)
    engine = int(device_daemon.optctl("describe", "job", "kept")["engine_pid"])
    os.kill(engine, signal.SIGKILL)
    train_both(9, 12)
    assert states(kept) == states(plain)
    device_daemon.run_optctl("set", "job", "kept", "device_budget=0")
    assert resident_bytes(device_daemon, "kept") == 0
    train_both(12, 14)
    device_daemon.run_optctl("set", "job", "kept", "device_budget=32MiB")
    train_both(14, 20)
    assert resident_bytes(device_daemon, "kept") > 0
    assert not updates(device_daemon, "kept")["problem"]
    assert states(kept) == states(plain)
    kept.close()
    # A script goes on asking for what it began with, or leaves it out.
    for asked in ("64MiB", 32 << 20, None):
        again = new_model(torch.bfloat16)
        attached = getattr(optstate, name)(
            again.parameters(),
            lr=0.01,
            job="kept",
            model=again,
            endpoint=device_daemon.shm,
            device_budget=asked,
        )
        assert same(again, others)
        attached.close()


def _sum_on_devices(connection, rank, endpoint, dtype):
    def optimizer_of(model, job, **options):
        return optstate.AdamW(
            model.parameters(),
            lr=0.01,
            job=job,
            model=model,
            endpoint=endpoint,
            reduction="daemon",
            **options,
        )

    ours, others = model_of(dtype), model_of(dtype)
    kept = optimizer_of(ours, "kept", offload_fraction=0.0, device_budget="64MiB")
    plain = optimizer_of(others, "plain")

    def train_both(first, last):
        # Other batches on each rank, and one step without a gradient on the second.
        for step in range(first, last):
            for model, optimizer in ((ours, kept), (others, plain)):
                optimizer.zero_grad()
                loss_of(model, 1000 * rank + step).backward()
                if rank == 1 and step % 3 == 2:
                    model[0].bias.grad = None
                optimizer.step()
        assert same(ours, others)

    train_both(0, 4)
    ranks.say(connection, "kill the engine")
    connection.recv()
    train_both(4, 9)
    assert states(kept) == states(plain)
    kept.close()
    plain.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_the_daemon_sums_are_updated_where_records_stay(device_daemon, dtype):
    with ranks.running(_sum_on_devices, 2, device_daemon.shm, dtype) as running:
        for rank in range(2):
            assert running.hear(rank) == "kill the engine"
        assert resident_bytes(device_daemon, "kept") > 0
        os.kill(int(device_daemon.optctl("describe", "job", "kept")["engine_pid"]), signal.SIGKILL)
        for connection in running.connections:
            connection.send("go on")
        running.results()
    assert resident_bytes(device_daemon, "kept") > 0
    assert not updates(device_daemon, "kept")["problem"]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"device_budget": "64 MB"}, "device_budget"),
        ({"device_budget": 0}, "device_budget"),
        ({"device_budget": "64MiB"}, "offload_fraction below 1"),
        ({"device_budget": "64MiB", "offload_fraction": 1.0}, "offload_fraction below 1"),
    ],
)
def test_a_device_budget_that_cannot_be_is_refused(device_daemon, options, text):
    with pytest.raises(ValueError, match=text):
        optstate.AdamW(model_of(torch.bfloat16).parameters(), endpoint=device_daemon.shm, **options)


def test_what_cannot_be_is_refused(device_daemon):
    model = model_of()
    with pytest.raises(ValueError, match="offload_fraction"):
        optstate.AdamW(model.parameters(), endpoint=device_daemon.shm, offload_fraction=1.5)


def test_a_daemon_without_devices_says_what_to_do():
    running = Daemon("--devices", "none")
    try:
        with pytest.raises(FailedPreconditionError, match="--devices"):
            optstate.AdamW(
                model_of().parameters(), endpoint=running.shm, job="a", offload_fraction=0.5
            )
        optimizer = optstate.AdamW(model_of().parameters(), endpoint=running.shm)
        with pytest.raises(FailedPreconditionError, match="--devices"):
            optimizer.set_offload_fraction(0.5)
    finally:
        running.stop()
