"""Faults while a job gets parameters: deaths, Ctrl-C and refusals leave a whole job."""

from __future__ import annotations

import os
import signal

import optstate
import pytest
import ranks
import torch
from optstate._torch.job import opening
from optstate.session import Session
from training import largest_difference, loss_of, small_model, train

NEW = "3.bias"
OPTIONS = {"lr": 0.01}


def groups_of(model, *, all_of_it: bool):
    named = list(model.named_parameters())
    groups = [{"params": [each for each in named if each[0] != NEW]}]
    if all_of_it:
        groups.append({"params": [each for each in named if each[0] == NEW]})
    return groups


def extend(how, model, optimizer):
    if how == "add_param_group":
        optimizer.add_param_group(groups_of(model, all_of_it=True)[1])
    else:
        parameter = dict(model.named_parameters())[NEW]
        parameter.requires_grad_(True)
        loss_of(model, 2).backward()
        optimizer.step()


def begun(how, seed=0, **options):
    """A model and its optimizer, which has not got the last parameter yet."""
    model = small_model(seed=seed)
    if how == "thaw":
        dict(model.named_parameters())[NEW].requires_grad_(False)
        groups = [{"params": list(model.named_parameters())}]
    else:
        groups = groups_of(model, all_of_it=False)
    return model, optstate.AdamW(groups, **OPTIONS, **options)


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_while_extending(connection, rank, how, job, endpoint, call):
    model, optimizer = begun(how, job=job, endpoint=endpoint)
    train(model, optimizer, range(2))
    ranks.say(connection, [each.detach().tolist() for each in model.parameters()])
    setattr(Session, call, die)
    extend(how, model, optimizer)


@pytest.mark.parametrize("how", ["add_param_group", "thaw"])
@pytest.mark.parametrize("call", ["begin_load", "finish_load"])
def test_a_trainer_that_dies_leaves_a_job_to_go_on_with(call, how, job, daemon):
    with ranks.running(
        _dies_while_extending, 1, how, job, daemon.shm, call, grouped=False
    ) as running:
        before = running.hear(0)
        running.processes[0].join()
    model = small_model(seed=3)
    new = dict(model.named_parameters())[NEW]
    value = new.detach().clone()
    with pytest.warns(UserWarning, match=f'was being extended by "{NEW}" at step 2'):
        optimizer = optstate.AdamW(
            groups_of(model, all_of_it=True), **OPTIONS, job=job, endpoint=daemon.shm
        )
    assert optimizer.committed_step == 2
    assert torch.equal(new, value) and optimizer.fetch_state(new) == {}
    for (name, parameter), values in zip(model.named_parameters(), before):
        if name != NEW:
            assert parameter.detach().tolist() == values
            assert int(optimizer.fetch_state(parameter)["step"]) == 2
    train(model, optimizer, range(2, 4))
    optimizer.close()
    # The job is now like any other.
    with optstate.AdamW(
        groups_of(model, all_of_it=True), **OPTIONS, job=job, endpoint=daemon.shm
    ) as again:
        assert again.committed_step == 4


@pytest.mark.parametrize("how", ["add_param_group", "thaw"])
@pytest.mark.parametrize("private", [True, False])
def test_a_refused_extension_leaves_the_optimizer_as_it_was(private, how, job, monkeypatch):
    name = None if private else job
    model, optimizer = begun(how, job=name)
    other_model, other = begun(how)
    train(model, optimizer, range(2))
    train(other_model, other, range(2))
    opened = opening._open

    def refuse(spec, take_over):
        if any(each.name == NEW for each in spec.parameters):
            raise optstate.ResourceExhaustedError("no room")
        return opened(spec, take_over)

    with monkeypatch.context() as patched:
        patched.setattr(opening, "_open", refuse)
        with pytest.raises(optstate.ResourceExhaustedError, match="no room"):
            extend(how, model, optimizer)
    assert optimizer.committed_step == 2
    if how == "thaw":
        dict(model.named_parameters())[NEW].requires_grad_(False)
    assert len(optimizer.param_groups) == 1
    for each_model, each in ((model, optimizer), (other_model, other)):
        each_model.zero_grad()
        train(each_model, each, range(2, 4))
    assert largest_difference(model, other_model) == 0
    assert optimizer.committed_step == 4


@pytest.mark.parametrize("how", ["add_param_group", "thaw"])
@pytest.mark.parametrize("private", [True, False])
def test_after_ctrl_c_the_optimizer_attaches_again(private, how, job, monkeypatch):
    name = None if private else job
    model, optimizer = begun(how, job=name)
    train(model, optimizer, range(2))
    with monkeypatch.context() as patched:

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        patched.setattr(Session, "finish_load", interrupt)
        with pytest.raises(KeyboardInterrupt):
            extend(how, model, optimizer)
    with pytest.raises(RuntimeError, match=r"attach\(\) goes on"):
        optimizer.step()
    if private:
        optimizer.attach()
    else:
        with pytest.warns(UserWarning, match="was being extended"):
            optimizer.attach(job)
    assert optimizer.committed_step == 2
    parameter = next(model.parameters())
    assert int(optimizer.fetch_state(parameter)["step"]) == 2
    train(model, optimizer, range(2, 3))
    assert optimizer.committed_step == 3


def _one_thaws(connection, rank, job, endpoint):
    model = small_model()
    thawing = dict(model.named_parameters())[NEW].requires_grad_(False)
    optimizer = optstate.AdamW(
        model.named_parameters(), **OPTIONS, job=job, endpoint=endpoint, step_timeout=600
    )
    train(model, optimizer, range(2))
    if rank == 0:
        thawing.requires_grad_(True)
    loss_of(model, 2).backward()
    try:
        optimizer.step()
    except Exception as error:  # of torch.distributed, when the other one has gone
        return type(error).__name__, str(error)
    return None


def test_one_rank_alone_thaws(job, daemon):
    first, second = ranks.run(_one_thaws, 2, job, daemon.shm)
    assert second[0] == "FailedPreconditionError"
    assert "rank 0 has begun a load" in second[1]
    assert first is not None
