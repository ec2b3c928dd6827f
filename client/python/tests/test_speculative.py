"""speculative=True: the daemon begins steps while backward() runs, to the same bits."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import time

import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from daemon import program
from training import loss_of, small_model, train

# The equal steps after which the daemon expects another one (ForeseenCommit::kSteps).
_SETTLED = 8
_STEPS = 20
_PATIENCE_S = 60


def _counts(endpoint, job):
    """Returns how many steps were begun early, and how many of them were rolled back."""
    command = [program("optctl"), "--endpoint", endpoint, "-o", "json", "describe", "job", job]
    described = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    counts = described["speculation"]
    return int(counts.get("steps_begun", 0)), int(counts.get("steps_rolled_back", 0))


def _await_begun(endpoint, job, steps):
    """Waits until so many steps were begun early. The daemon begins by itself what it begins."""
    end = time.monotonic() + _PATIENCE_S
    while _counts(endpoint, job)[0] < steps:
        assert time.monotonic() < end, f"{_counts(endpoint, job)} steps begun, not {steps}"


def _train(change=None, dtype=torch.float32, begun=(), where=None, **options):
    """Returns the parameters after each step; change() is called before each.

    begun: the steps that the daemon of where = (endpoint, job) begins in backward().
    """
    model = small_model(dtype=dtype)
    if where is not None:
        options.update(endpoint=where[0], job=where[1])
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, overlap=True, **options)
    seen = []
    expected = itertools.count(1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step in begun:
            _await_begun(*where, next(expected))
        if change is not None:
            change(model, optimizer, step)
        optimizer.step()
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    return seen


def _assert_same(change, where, begun, taken_back, **options):
    """Trains with and without speculation, and compares bits and what the daemon counted."""
    plain = _train(change, **options)
    early = _train(change, speculative=True, begun=begun, where=where, **options)
    for step, (expected, got) in enumerate(zip(plain, early)):
        assert all(map(torch.equal, expected, got)), step
    assert _counts(*where) == (len(begun), taken_back)


def _new_rate(model, optimizer, step):
    if step % 10 == 9:
        optimizer.param_groups[0]["lr"] *= 0.5


def _new_gradients(model, optimizer, step):
    """Pushed again, after the daemon has used the first ones."""
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


@torch.no_grad()
def _written_with_equal_values(model, optimizer, step):
    """Clamps weights as a script may: torch counts that as a change, and nothing differs."""
    for parameter in model.parameters():
        parameter.clamp_(-1e4, 1e4)


_AFTER_A_READ = [_SETTLED, 2 * _SETTLED]  # nothing is begun in the seven steps between


@pytest.mark.parametrize(
    ("change", "begun", "taken_back"),
    [
        pytest.param(None, range(_SETTLED, _STEPS), 0, id="plain"),
        pytest.param(_new_rate, [8, 9, 17, 18, 19], 2, id="new rates"),
        pytest.param(_new_gradients, range(_SETTLED, _STEPS), _STEPS - _SETTLED, id="new grads"),
        pytest.param(_written_with_equal_values, _AFTER_A_READ, 2, id="equal values"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_that_were_begun_have_the_same_bits(change, begun, taken_back, dtype, daemon, job):
    _assert_same(change, (daemon.shm, job), list(begun), taken_back, dtype=dtype)


@pytest.mark.parametrize("change", [None, _new_rate, _new_gradients, _written_with_equal_values])
def test_clipped_steps_are_not_begun(change, daemon, job):
    _assert_same(change, (daemon.shm, job), [], 0, max_norm=1e-3)


def test_over_grpc_one_rank_begins_nothing(daemon, job):
    where = daemon.grpc_unix, job
    _assert_same(_written_with_equal_values, where, [], 0, dtype=torch.bfloat16)


def test_between_backward_and_step_the_script_has_the_last_steps_parameters(daemon, job):
    """The script evaluates, averages and writes these: parameters are copies, never views."""
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, overlap=True, speculative=True)
    for step in range(_SETTLED + 2):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        loss_of(model, step).backward()
        if step >= _SETTLED:
            _await_begun(daemon.shm, job, step - _SETTLED + 1)
        assert all(map(torch.equal, before, model.parameters())), step
        optimizer.step()
        optimizer.zero_grad()
        assert not any(map(torch.equal, before, model.parameters())), step


def test_what_is_written_between_backward_and_step_is_in_the_step(daemon, job):
    """The step is then taken anew, from the values that were written."""

    @torch.no_grad()
    def halve(model, optimizer, step):
        if step == _SETTLED + 1:
            next(model.parameters()).data.mul_(0.5)

    begun = [_SETTLED, _SETTLED + 1]
    plain = _train(halve, detect_changes="exact")
    where = daemon.shm, job
    with pytest.warns(UserWarning, match="without a trace"):
        early = _train(halve, speculative=True, begun=begun, where=where, detect_changes="exact")
    for step, (expected, got) in enumerate(zip(plain, early)):
        assert all(map(torch.equal, expected, got)), step


def test_a_model_that_goes_on_with_the_job_gets_parameters_of_one_step(daemon, job):
    """load_state_dict(resume="job") reads them, within a step that was begun early."""
    options = {"lr": 0.01, "job": job, "overlap": True, "speculative": True, "resume": "job"}
    first = small_model()
    optimizer = optstate.AdamW(first.parameters(), **options)
    train(first, optimizer, [0])
    checkpoint = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    train(first, optimizer, range(1, _SETTLED))
    optimizer.close()
    second = small_model()
    optimizer = optstate.AdamW(second.parameters(), **options)
    before = _counts(daemon.shm, job)[0]
    loss_of(second, _SETTLED).backward()
    _await_begun(daemon.shm, job, before + 1)
    second.load_state_dict(checkpoint[0])
    with pytest.warns(UserWarning):
        optimizer.load_state_dict(checkpoint[1])
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    optimizer.step()


def _two_ranks(connection, rank, endpoint, job, waits, writers, options):
    """Trains on both ranks; those of `writers` write equal values into parameters.

    waits: the step that is written into has been begun by then.
    """
    model = small_model(dtype=torch.bfloat16)
    optimizer = optstate.AdamW(
        model.parameters(), lr=0.01, endpoint=endpoint, job=job, overlap=True, **options
    )
    for step in range(_STEPS):
        # Commits of one rank begin steps too, in former ones.
        before = _counts(endpoint, job)[0] if waits and step == _SETTLED else 0
        dist.barrier()
        optimizer.zero_grad()
        loss_of(model, 2 * step + rank).backward()
        if waits and step == _SETTLED:
            _await_begun(endpoint, job, before + 1)
            dist.barrier()
        if step >= _SETTLED and rank in writers:
            _written_with_equal_values(model, optimizer, step)
        optimizer.step()
    return [parameter.float().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("writers", [[], [0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_two_ranks(wire, writers, daemon, job):
    """One rank compares with the daemon's parameters while the other one may have committed."""
    endpoint = getattr(daemon, wire)
    options = {"reduction": "daemon"}
    plain = ranks.run(_two_ranks, 2, endpoint, f"{job}-plain", False, writers, options)
    options["speculative"] = True
    early = ranks.run(_two_ranks, 2, endpoint, job, wire == "shm", writers, options)
    assert early == plain
    assert early[0] == early[1]
    assert _counts(daemon.shm, job)[0] > 0


def test_what_cannot_be_taken_back_is_refused():
    model = small_model()
    with pytest.raises(optstate.UnimplementedError, match="lamb"):
        optstate.LAMB(model.parameters(), lr=0.01, speculative=True)
