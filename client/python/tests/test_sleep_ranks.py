"""offload_states() and reload_states() of several ranks."""

from __future__ import annotations

import optstate
import pytest
import ranks
import torch
from ranks import say
from sleeping import phase
from training import assert_values, loss_of, small_model, train, values_of


def _ranks_sleep(connection, rank, job, endpoint, reduction):
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(), lr=0.01, job=job, endpoint=endpoint, reduction=reduction
    )
    for step in range(4):
        optimizer.zero_grad()
        batch = step if reduction == "trainer" else 2 * step + rank
        loss_of(model, batch).backward()
        optimizer.step()
        if step == 1:
            offloaded = optimizer.offload_states(["optim_states"])
            say(connection, offloaded.memory_bytes)
            connection.recv()
            optimizer.reload_states()
    return values_of(model)


@pytest.mark.parametrize("reduction", ["trainer", "daemon"])
@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_all_ranks_sleep_and_go_on(wire, reduction, sleep_daemon, job):
    endpoint = getattr(sleep_daemon, wire)
    with ranks.running(_ranks_sleep, 2, job, endpoint, reduction) as pair:
        said = {pair.hear(rank) for rank in range(2)}
        assert len(said) == 1 and said.pop() > 0
        assert phase(sleep_daemon, job) == "JOB_PHASE_ASLEEP"
        for connection in pair.connections:
            connection.send("reload")
        found = pair.results()
    expected = ranks.run(_trains, 2, f"{job}-awake", endpoint, reduction)
    model = small_model()
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), expected[0]):
            parameter.copy_(torch.from_numpy(values))
    assert_values(found, model)


def _trains(_, rank, job, endpoint, reduction):
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(), lr=0.01, job=job, endpoint=endpoint, reduction=reduction
    )
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step if reduction == "trainer" else 2 * step + rank).backward()
        optimizer.step()
    return values_of(model)


def _ranks_are_refused(_, rank, job, endpoint):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=endpoint)
    train(model, optimizer, range(2))
    said = None
    try:
        optimizer.offload_states()
    except optstate.FailedPreconditionError as error:
        said = str(error)
    train(model, optimizer, range(2, 4))
    return values_of(model), said


def test_a_refusal_is_raised_on_all_ranks_which_go_on(daemon, job):
    found = ranks.run(_ranks_are_refused, 2, job, daemon.shm)
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(4))
    assert_values([values for values, _ in found], whole)
    assert all(said is not None and "sleep_directory" in said for _, said in found)
