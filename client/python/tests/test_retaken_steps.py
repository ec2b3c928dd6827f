"""Steps and loads that fail, or are interrupted, and are taken again: nothing is lost."""

from __future__ import annotations

import copy
import os
import signal

import optstate
import pytest
import ranks
import torch
from training import largest_difference, loss_of, small_model, train


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaled_step_is_unscaled_once(unscale, own_daemon, job):
    """torch's GradScaler multiplies by the scale that a failed step() left behind."""
    endpoint = own_daemon.shm

    def run(optimizer_class, fails, **options):
        model = small_model()
        optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if fails and step == 1:
                own_daemon.stop_gently()
                with pytest.raises(optstate.UnavailableError):
                    scaler.step(optimizer)
                own_daemon.start()
            scaler.step(optimizer)
            scaler.update()
        return model

    ours = run(optstate.SGD, True, job=job, endpoint=endpoint, connect_timeout=1.0)
    assert largest_difference(ours, run(torch.optim.SGD, False)) < 1e-6


def _refuses_grad_scaler(connection, rank, endpoint):
    model = small_model()
    optimizer = optstate.SGD(model.parameters(), lr=0.1, endpoint=endpoint, reduction="daemon")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(model, rank)).backward()
    with pytest.raises(RuntimeError, match="LossScaler"):
        scaler.step(optimizer)
    optimizer.step()
    return optimizer.committed_step


def test_ranks_that_the_daemon_reduces_do_not_scale_each_for_itself(daemon):
    assert ranks.run(_refuses_grad_scaler, 2, daemon.shm) == [1, 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_changed_parameter_whose_upload_failed_is_uploaded_later(overlap, own_daemon, job):
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = optstate.SGD(
        [parameter],
        lr=1.0,
        job=job,
        endpoint=own_daemon.shm,
        overlap=overlap,
        connect_timeout=1.0,
    )
    parameter.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        parameter.fill_(10.0)
    parameter.sum().backward()
    own_daemon.stop_gently()
    with pytest.raises(optstate.UnavailableError):
        optimizer.step()
    own_daemon.start()
    optimizer.step()
    assert parameter.tolist() == [9.0] * 4


@pytest.mark.parametrize("what", ["change", "load_state_dict", "upload_parameters"])
@pytest.mark.parametrize("reduction", ["trainer", "daemon"])
def test_a_load_within_a_step_is_refused_and_drops_nothing(reduction, what):
    def run(optimizer_class, **options):
        model = small_model()
        optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
        loss_of(model, 0).backward()
        if options:
            optimizer.accumulate_step()
            with pytest.raises(RuntimeError, match="there are micro-steps pushed"):
                if what == "change":
                    before = [parameter.detach().clone() for parameter in model.parameters()]
                    with torch.no_grad():
                        model[0].weight.mul_(2)
                    optimizer.step()
                elif what == "load_state_dict":
                    optimizer.load_state_dict(optimizer.state_dict())
                else:
                    optimizer.upload_parameters()
            if what == "change":
                with torch.no_grad():
                    for parameter, value in zip(model.parameters(), before):
                        parameter.copy_(value)
        loss_of(model, 1).backward()
        optimizer.step()
        return model

    ours = run(optstate.SGD, accumulate=True, reduction=reduction)
    assert largest_difference(ours, run(torch.optim.SGD)) < 1e-6


@pytest.mark.parametrize("end", ["accumulate_step", "step"])
def test_a_value_that_is_wrong_here_costs_no_micro_step(end):
    def run(optimizer_class, **options):
        model = small_model()
        optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
        for micro_step in range(3):
            loss_of(model, micro_step).backward()
            if not options:
                continue
            take = optimizer.step if micro_step == 2 else optimizer.accumulate_step
            if take.__name__ == end:
                bias = model[0].bias
                gradient, bias.grad_dtype = bias.grad, None
                bias.grad = gradient.double()
                with pytest.raises(TypeError, match="float64"):
                    take()
                bias.grad = gradient
                optimizer.norm_type = 7.0
                if micro_step == 2:
                    with pytest.raises(ValueError, match="norm_type"):
                        take()
                optimizer.norm_type = 2.0
            take()
        if not options:
            optimizer.step()
        return model

    ours = run(optstate.SGD, accumulate=True)
    assert largest_difference(ours, run(torch.optim.SGD)) < 1e-6


def _interrupt_once(monkeypatch, session, name, at=0):
    """A signal within the call of that name, before it does anything."""
    call, calls = getattr(session, name), []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        call(*arguments)

    monkeypatch.setattr(session, name, interrupted)


@pytest.mark.parametrize("what", ["change", "load_state_dict"])
def test_a_load_that_was_interrupted_at_its_end_is_repeated_whole(what, monkeypatch):
    def run(optimizer_class, interrupts):
        model = small_model()
        optimizer = optimizer_class(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())  # torch's lives on
        train(model, optimizer, range(2, 4))
        with torch.no_grad():
            model[0].weight.mul_(2)
        if interrupts:
            _interrupt_once(monkeypatch, optimizer._served.attachment.session, "finish_load")
            with pytest.raises(KeyboardInterrupt):
                if what == "change":
                    train(model, optimizer, range(4, 5))
                else:
                    optimizer.load_state_dict(saved)
        if what == "load_state_dict":
            if interrupts:
                for refused in (optimizer.step, optimizer.upload_parameters):
                    with pytest.raises(RuntimeError, match="load_state_dict"):
                        refused()
            optimizer.load_state_dict(saved)
        train(model, optimizer, range(4, 6))
        return model

    ours = run(optstate.SGD, True)
    assert largest_difference(ours, run(torch.optim.SGD, False)) < 1e-6


def test_a_change_that_is_sent_again_leaves_other_masters_alone(monkeypatch):
    """Masters of 16-bit parameters have bits that the parameters lack."""

    def run(interrupts):
        model = small_model().to(torch.bfloat16)
        optimizer = optstate.SGD(model.parameters(), lr=0.01, momentum=0.9)
        train(model, optimizer, range(4))
        with torch.no_grad():
            model[0].weight.mul_(2)
        if interrupts:
            _interrupt_once(monkeypatch, optimizer._served.attachment.session, "finish_load")
            with pytest.raises(KeyboardInterrupt):
                train(model, optimizer, range(4, 5))
        train(model, optimizer, range(4, 6))
        entries = optimizer.state_dict()["state"].values()
        return [entry["master_param"] for entry in entries]

    assert all(map(torch.equal, run(True), run(False)))


def test_micro_steps_are_unscaled_together():
    model = small_model()
    optimizer = optstate.SGD(model.parameters(), lr=0.1, accumulate=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(model, 0)).backward()
    optimizer.accumulate_step()
    scaler.scale(loss_of(model, 1)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="last micro-step alone"):
        scaler.step(optimizer)


def _interrupted(connection, rank, endpoint, job, overlap):
    """Rank 0 is interrupted, moves its parameter, and goes on."""
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = optstate.SGD(
        [parameter], lr=1.0, endpoint=endpoint, job=job, reduction="daemon", overlap=overlap
    )
    parameter.sum().backward()
    ranks.say(connection, "attached")
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        ranks.say(connection, "interrupted")
        connection.recv()
        before = parameter.data  # might be somebody else's memory soon
        parameter.data = parameter.data.clone()
        optimizer.state_dict()
        assert parameter.tolist() == [-1.0] * 1000
        assert before.tolist() == [0.0] * 1000
    else:
        connection.recv()
        optimizer.step()
    optimizer.step()  # with the gradients that are there still
    assert optimizer.last_outcome.gradient_norm == pytest.approx(1000**0.5)
    return parameter[0].item()


@pytest.mark.parametrize("overlap", [False, True])
def test_after_an_interrupt_tensors_and_gradients_are_looked_at_anew(overlap, daemon, job):
    with ranks.running(_interrupted, 2, daemon.shm, job, overlap) as running:
        assert [running.hear(rank) for rank in range(2)] == ["attached"] * 2
        while "step 1: rank 1 has not" not in daemon.run_optctl("describe", "job", job):
            pass
        os.kill(running.processes[0].pid, signal.SIGINT)
        assert running.hear(0) == "interrupted"
        for connection in running.connections:
            connection.send("go")
        assert running.results() == [-2.0, -2.0]
