"""offload_fraction="auto": the fastest fraction, found from times that the test makes."""

from __future__ import annotations

import logging
import random

import optstate
import pytest
import torch
from daemon import Daemon
from optstate._torch import offload
from optstate._torch.fraction_search import (
    MEASURED_STEPS,
    SETTLING_STEPS,
    TRIED_MAX,
    FractionSearch,
)
from optstate._torch.tensors import equal_bits
from test_devices import model_of, same, updates
from training import train

STEPS_MAX = TRIED_MAX * (SETTLING_STEPS + MEASURED_STEPS)


def shared(cpu, devices, overhead=0.0):
    """The time of an update by fraction, when the CPU and devices alone take these."""

    def seconds(fraction):
        both = max(fraction * cpu, (1 - fraction) * devices)
        return both + (overhead if fraction < 1 else 0)

    return seconds


def searched(seconds):
    """Returns the search when it is over, and the number of steps that it took."""
    search, steps = FractionSearch(), 0
    while not search.is_over:
        search.note(seconds(search.fraction))
        steps += 1
        assert steps <= STEPS_MAX
    return search, steps


@pytest.mark.parametrize("devices", [0.01, 0.1, 0.5, 1.0, 2.0, 9.0, 100.0])
@pytest.mark.parametrize("overhead", [0.0, 0.05, 0.3])
def test_the_fastest_fraction_is_found(devices, overhead):
    seconds = shared(1.0, devices, overhead)
    search, _ = searched(seconds)
    best = min(range(1001), key=lambda n: seconds(n / 1000)) / 1000
    found = search.fraction
    assert abs(found - best) <= 0.03 or seconds(found) <= 1.02 * seconds(best)
    assert found == search.best


def test_without_overhead_the_balance_is_met_at_once():
    search, _ = searched(shared(1.0, 3.0))
    assert list(search.times)[:3] == [1.0, 0.0, 0.75]
    assert search.fraction == 0.75


def test_the_cpu_alone_stays_where_devices_only_cost():
    search, _ = searched(shared(1.0, 9.0, overhead=0.5))
    assert search.fraction == 1.0
    search, _ = searched(lambda _: 1.0)  # nothing differs
    assert search.fraction == 1.0


def test_a_second_minimum_beside_the_balance_is_found():
    # The memory that both use makes the CPU slower while devices copy.
    search, _ = searched(lambda f: max(f * 1.0 * (1.5 if f < 1 else 1), (1 - f) * 1.0))
    assert search.fraction == pytest.approx(0.4, abs=0.03)


def test_steps_that_were_disturbed_do_not_count(seed):
    noise = random.Random(seed)
    seconds = shared(1.0, 1.0)
    taken = 0

    def disturbed(fraction):
        nonlocal taken
        taken += 1
        # The first step with a fraction, and now and then another one, take much longer.
        if taken % (SETTLING_STEPS + MEASURED_STEPS) in (1, 2):
            return 50 + noise.random()
        return seconds(fraction)

    search, steps = searched(disturbed)
    assert search.fraction == pytest.approx(0.5, abs=0.03)
    assert steps == len(search.times) * (SETTLING_STEPS + MEASURED_STEPS)


def test_the_end_is_kept():
    search, _ = searched(shared(1.0, 1.0))
    for _ in range(10):
        search.note(100.0)
    assert search.is_over and search.fraction == 0.5


@pytest.fixture(scope="module")
def device_daemon():
    running = Daemon("--devices", "emulated:1")
    yield running
    running.stop()


def fraction_in_force(daemon, job):
    shares = updates(daemon, job)
    return 1.0 if shares is None else float(shares["offload_fraction"])


@pytest.mark.parametrize("options", [{}, {"device_budget": "64MiB"}], ids=["copied", "resident"])
def test_a_job_gets_the_fastest_and_keeps_its_bits(device_daemon, monkeypatch, caplog, options):
    caplog.set_level(logging.INFO, logger="optstate")
    job = f"auto-{len(options)}"
    in_force, measured = [], []
    set_fraction = offload.set_fraction

    def noting(attachment, fraction):
        set_fraction(attachment, fraction)
        in_force.append(fraction_in_force(device_daemon, job))
        assert in_force[-1] == fraction

    def update_seconds(_):
        # A device twice as fast as the CPU, behind a slow link.
        measured.append(in_force[-1])
        return shared(1.0, 0.5, overhead=0.1)(in_force[-1])

    ours, others = model_of(), model_of()
    tuned = optstate.AdamW(
        ours.parameters(),
        lr=0.01,
        job=job,
        model=ours,
        endpoint=device_daemon.shm,
        offload_fraction="auto",
        **options,
    )
    plain = optstate.AdamW(others.parameters(), lr=0.01, endpoint=device_daemon.shm)
    # The class of the optimizer, which is imported when it is first asked for, has its own.
    monkeypatch.setattr(offload, "set_fraction", noting)
    monkeypatch.setattr(offload, "update_seconds", update_seconds)
    for step in range(STEPS_MAX + 2):
        train(ours, tuned, range(step, step + 1))
        train(others, plain, range(step, step + 1))
        assert same(ours, others)
    assert in_force[-1] == pytest.approx(0.333, abs=0.03)
    assert len(set(in_force)) > 3 and len(measured) <= STEPS_MAX  # it has stopped looking
    (found,) = (each for each in caplog.messages if "is the fastest of" in each)
    assert f'job "{job}"' in found and "the CPU alone takes 1000 ms" in found
    tuned.close()
    plain.close()


def test_the_script_searches_anew_and_ends_a_search(device_daemon, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="optstate")
    model = model_of()
    optimizer = optstate.AdamW(
        model.parameters(), job="anew", model=model, endpoint=device_daemon.shm
    )
    monkeypatch.setattr(offload, "update_seconds", lambda _: 1.0)
    optimizer.set_offload_fraction("auto")
    train(model, optimizer, range(5))
    optimizer.set_offload_fraction(0.25)
    train(model, optimizer, range(5, 5 + STEPS_MAX))
    assert fraction_in_force(device_daemon, "anew") == 0.25
    assert not any("fastest" in each for each in caplog.messages)
    optimizer.set_offload_fraction("auto")
    train(model, optimizer, range(60, 60 + STEPS_MAX + 2))
    assert fraction_in_force(device_daemon, "anew") == 1.0  # nothing differs: the CPU does it
    assert any("fastest" in each for each in caplog.messages)
    optimizer.close()


def test_without_a_device_the_cpu_does_it_all_and_a_warning_says_why(caplog):
    running = Daemon("--devices", "none")
    try:
        model = model_of()
        optimizer = optstate.AdamW(
            model.parameters(), job="a", endpoint=running.shm, offload_fraction="auto"
        )
        train(model, optimizer, range(12))
        assert optimizer.committed_step == 12
        (said,) = (each for each in caplog.messages if "is given up" in each)
        assert "stays 1" in said and "--devices" in said
        optimizer.close()
    finally:
        running.stop()


def test_what_cannot_be_searched_is_refused(device_daemon):
    parameters = list(model_of().parameters())
    with pytest.raises(ValueError, match="speculative"):
        optstate.AdamW(
            parameters,
            endpoint=device_daemon.shm,
            offload_fraction="auto",
            overlap=True,
            speculative=True,
        )
    with pytest.raises(ValueError, match="auto"):
        optstate.AdamW(parameters, endpoint=device_daemon.shm, offload_fraction="automatic")


@pytest.mark.parametrize("name", ["Adafactor", "LAMB", "Muon"])
def test_the_fraction_of_whole_parameters_changes_live(device_daemon, job, name):
    pair = []
    for which in ("host", "device"):
        matrices = [each for each in model_of().parameters() if each.dim() == 2]
        options = {"lr": 0.01, "endpoint": device_daemon.shm, "job": f"{job}-{which}"}
        pair.append((matrices, getattr(optstate, name)(matrices, **options)))
    for fraction in (0.0, 0.5, 1, 0.0):
        pair[1][1].set_offload_fraction(fraction)
        for seed in range(2):
            for matrices, optimizer in pair:
                generator = torch.Generator().manual_seed(seed)
                for each in matrices:
                    each.grad = torch.randn(each.shape, generator=generator)
                optimizer.step()
    updates = device_daemon.optctl("describe", "job", f"{job}-device")["device_updates"]
    assert int(updates["device_elements"]) > 0
    for ours, theirs in zip(pair[1][0], pair[0][0]):
        assert equal_bits(ours, theirs)
    for _, optimizer in pair:
        optimizer.close()


@pytest.mark.parametrize(
    "name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Lion"]
)
def test_every_other_optimizer_can_be_shared(device_daemon, name):
    optimizer = getattr(optstate, name)(model_of().parameters(), endpoint=device_daemon.shm)
    optimizer.set_offload_fraction(0.5)
    assert fraction_in_force(device_daemon, optimizer.job) == 0.5
    optimizer.close()
