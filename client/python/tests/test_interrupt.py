"""Ctrl-C while step() waits for a rank that does not come."""

from __future__ import annotations

import os
import signal

import optstate
import pytest
import ranks
import torch
from training import largest_difference, loss_of, small_model, train


def _begin(rank, endpoint, job):
    """Returns a rank's model and optimizer after one step of both ranks."""
    model = small_model()
    optimizer = optstate.AdamW(model.named_parameters(), lr=0.01, endpoint=endpoint, job=job)
    train(model, optimizer, range(1))
    return model, optimizer


def _wait_alone(model, optimizer):
    """Step 2, for which the other rank does not come, until Ctrl-C ends it."""
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()


def _late(connection, model, optimizer, steps):
    """The rank that comes when it is told to."""
    ranks.say(connection, "attached")
    connection.recv()
    train(model, optimizer, steps)


def _goes_on(connection, rank, endpoint, job):
    model, optimizer = _begin(rank, endpoint, job)
    if rank == 1:
        _late(connection, model, optimizer, range(1, 4))
    else:
        _wait_alone(model, optimizer)
        # The first use afterwards waits for the same rank, and ends the same way.
        with pytest.raises(KeyboardInterrupt):
            ranks.say(connection, "interrupted")
            optimizer.state_dict()
        ranks.say(connection, "interrupted")
        connection.recv()
        assert optimizer.committed_step == 2  # waits, as every use does
        assert optimizer.last_outcome.step == 2
        assert optimizer.state_dict()["state"][0]["step"] == 2
        train(model, optimizer, range(2, 4))
    assert optimizer.committed_step == 4
    optimizer.close()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def _steps_again(connection, rank, endpoint, job):
    model, optimizer = _begin(rank, endpoint, job)
    if rank == 1:
        _late(connection, model, optimizer, range(1, 3))
    else:
        _wait_alone(model, optimizer)
        ranks.say(connection, "interrupted")
        connection.recv()
        train(model, optimizer, range(1, 2))  # finishes step 2, takes step 3
    assert optimizer.committed_step == 3
    optimizer.close()


def _closes(connection, rank, endpoint, job):
    model, optimizer = _begin(rank, endpoint, job)
    if rank == 1:
        _late(connection, model, optimizer, range(0))
    else:
        _wait_alone(model, optimizer)
        ranks.say(connection, "interrupted")
        connection.recv()
    optimizer.close()


def _handler_closes(connection, rank, endpoint, job):
    model, optimizer = _begin(rank, endpoint, job)
    if rank == 1:
        _late(connection, model, optimizer, range(0))
        optimizer.close()
        return

    def handler(*_):
        with pytest.raises(optstate.FailedPreconditionError, match="signal handler"):
            optimizer.upload_parameters()
        optimizer.close()
        raise SystemExit(7)

    signal.signal(signal.SIGINT, handler)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    with pytest.raises(SystemExit):
        optimizer.step()
    ranks.say(connection, "interrupted")
    connection.recv()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()


def _interrupt(running, daemon, job):
    # Until then rank 0 has not committed; now it waits.
    while "step 2: rank 1 has not" not in daemon.run_optctl("describe", "job", job):
        pass
    os.kill(running.processes[0].pid, signal.SIGINT)
    assert running.hear(0) == "interrupted"


def _go(running):
    for connection in running.connections:
        connection.send("go")
    return running.results()


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_the_step_goes_on(wire, daemon, job):
    with ranks.running(_goes_on, 2, getattr(daemon, wire), job) as running:
        assert running.hear(1) == "attached"
        _interrupt(running, daemon, job)
        _interrupt(running, daemon, job)
        results = _go(running)
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(4))
    for result in results:
        for found, expected in zip(result, whole.parameters()):
            assert torch.equal(torch.from_numpy(found), expected)


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_the_next_step_finishes_it_first(wire, daemon, job):
    with ranks.running(_steps_again, 2, getattr(daemon, wire), job) as running:
        assert running.hear(1) == "attached"
        _interrupt(running, daemon, job)
        _go(running)


@pytest.mark.parametrize("function", [_closes, _handler_closes])
@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_closing_gives_it_up(wire, function, daemon, job):
    with ranks.running(function, 2, getattr(daemon, wire), job) as running:
        assert running.hear(1) == "attached"
        _interrupt(running, daemon, job)
        _go(running)
    assert int(daemon.optctl("describe", "job", job)["committed_step"]) == 1


def test_a_handler_that_does_not_raise_ends_nothing(daemon, job):
    """One rank alone: signals before, during and after its steps."""
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        model = small_model()
        optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
        for step in range(5):
            os.kill(os.getpid(), signal.SIGINT)
            train(model, optimizer, range(step, step + 1))
        optimizer.close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) == 5
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(5))
    assert largest_difference(model, whole) == 0


def _keeps_values(connection, rank, endpoint, job):
    model, optimizer = _begin(rank, endpoint, job)
    if rank == 1:
        _late(connection, model, optimizer, range(1, 2))
        ranks.say(connection, "stepped")
    else:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        _wait_alone(model, optimizer)
        ranks.say(connection, "interrupted")
        connection.recv()  # the other rank has taken the step
        assert all(map(torch.equal, model.parameters(), before))
        assert optimizer.committed_step == 2
        assert not any(map(torch.equal, model.parameters(), before))
    optimizer.close()
    return [parameter.detach().numpy() for parameter in model.parameters()]


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_an_interrupted_script_has_parameters_of_one_step(wire, daemon, job):
    """Though the daemon takes the step meanwhile."""
    with ranks.running(_keeps_values, 2, getattr(daemon, wire), job) as running:
        assert running.hear(1) == "attached"
        _interrupt(running, daemon, job)
        running.connections[1].send(None)
        assert running.hear(1) == "stepped"
        running.connections[0].send(None)
        first, second = running.results()
        for one, other in zip(first, second):
            assert (one == other).all()
