"""A parameter file that another process cuts short: DataLossError in the trainer and no SIGBUS,
whatever it does next."""

from __future__ import annotations

import functools
import os
import pathlib

import optstate
import pytest
import ranks
import torch

# Bytes that are left; the file has 800,000 and something.
SIZES = [0, 8192, 600_000]
WAYS = {"views": {}, "copies": {"parameters_as_views": False}}


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(400, 500), torch.nn.Linear(500, 2))


def _step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 400)).square().mean().backward()
    optimizer.step()


def _change_in_place(model):
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def _change_without_a_trace(model):
    model[1].bias.data.fill_(0.5)


def _made(model, endpoint, job, **options):
    return optstate.AdamW(model.named_parameters(), lr=0.01, endpoint=endpoint, job=job, **options)


# The trainer's next act: act(model, optimizer).


def step(model, optimizer):
    _step(model, optimizer)


def step_after_a_change(model, optimizer):
    _change_in_place(model)
    _step(model, optimizer)


def step_after_a_traceless_change(model, optimizer):
    _change_without_a_trace(model)
    _step(model, optimizer)


def upload(model, optimizer):
    optimizer.upload_parameters()


def upload_of_a_change(model, optimizer):
    _change_in_place(model)
    optimizer.upload_parameters()


def load_state_dict(model, optimizer):
    optimizer.load_state_dict(torch.optim.AdamW(_model().parameters(), lr=0.01).state_dict())


def load_of_a_model(model, optimizer):
    model.load_state_dict(_model().state_dict())
    _step(model, optimizer)


ACTS = [
    step,
    step_after_a_change,
    step_after_a_traceless_change,
    upload,
    upload_of_a_change,
    load_state_dict,
    load_of_a_model,
]


def _file_of(state, job):
    [path] = pathlib.Path(state, "jobs", job).rglob("parameters*")
    return path


def _raises(act, *arguments):
    with pytest.raises(optstate.DataLossError, match="cut short by another process") as raised:
        act(*arguments)
    assert "/parameters" in str(raised.value) and "from a checkpoint" in str(raised.value)


def _cut(connection, rank, endpoint, state, job, cuts, options):
    for act, size in cuts:
        model, name = _model(), f"{job}-{act.__name__}-{size}"
        optimizer = _made(model, endpoint, name, **options)
        _step(model, optimizer)
        path = _file_of(state, name)
        assert os.path.getsize(path) > SIZES[-1]
        os.truncate(path, size)
        _raises(act, model, optimizer)
        if options:  # copies are whole
            assert all(each.detach().abs().sum() > 0 for each in model.parameters())
        else:
            _raises(optimizer.close)
        optimizer.close()
        # No script can go on with the job.
        _raises(functools.partial(_made, **options), _model(), endpoint, name)
    # The rest is memory of the process, and the next job begins with it.
    with _made(model, endpoint, f"{job}-next", **options) as following:
        _step(model, following)
    return len(cuts)


@pytest.mark.parametrize("way", WAYS)
def test_what_touches_the_parameters_next_says_so(way, daemon, job):
    state = str(daemon.directory / "state")
    cuts = [*((step, size) for size in SIZES), *((act, 8192) for act in ACTS[1:])]
    assert ranks.run(_cut, 1, daemon.shm, state, job, cuts, WAYS[way]) == [len(cuts)]


def _never_steps(connection, rank, endpoint, state, job, size, end):
    model = _model()
    optimizer = _made(model, endpoint, job)
    _step(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    os.truncate(_file_of(state, job), size)
    if end == "close":
        _raises(optimizer.close)
        optimizer.close()
    elif end == "with":
        with pytest.raises(optstate.DataLossError), optimizer:
            pass
    # The rest of the parameters stays, and a daemon that is still there takes them.
    assert torch.equal(model[0].weight.flatten()[: size // 4], before[0].flatten()[: size // 4])
    kept = model[0].weight.detach().clone()
    following = _made(model, endpoint, f"{job}-next")
    assert torch.equal(model[0].weight.detach(), kept)
    _step(model, following)
    del optimizer
    following.close()
    return "well"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("end", ["close", "with", "nothing"])
def test_without_a_step_after_the_cut(end, size, daemon, job):
    state = str(daemon.directory / "state")
    assert ranks.run(_never_steps, 1, daemon.shm, state, job, size, end) == ["well"]


def _forks(connection, rank, endpoint, state, job):
    """A fork copies all views before, and says what it could not copy."""
    model = _model()
    optimizer = _made(model, endpoint, job)
    _step(model, optimizer)
    os.truncate(_file_of(state, job), 8192)
    with pytest.warns(UserWarning, match="cut short by another process"):
        child = os.fork()
        if child == 0:
            os._exit(int(model[0].weight.flatten()[-1].item() != 0))
    assert os.waitpid(child, 0)[1] == 0
    _raises(_step, model, optimizer)
    return "well"


def test_a_fork_after_the_cut(daemon, job):
    state = str(daemon.directory / "state")
    assert ranks.run(_forks, 1, daemon.shm, state, job) == ["well"]


def _reads(connection, rank, endpoint, state, job, options):
    """State is the engine's, and may be had or not; a signal is neither."""
    found = []
    for size in SIZES:
        model, name = _model(), f"{job}-{size}"
        optimizer = _made(model, endpoint, name, connect_timeout=2, **options)
        _step(model, optimizer)
        os.truncate(_file_of(state, name), size)
        for read in (
            optimizer.state_dict,
            functools.partial(optimizer.fetch_state, model[0].weight),
            optimizer.gradient_norms,
            optimizer.memory,
        ):
            try:
                read()
                found.append("had")
            except optstate.OptstateError as error:
                found.append(type(error).__name__)
        model[0].weight.sum().item()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_reading_is_no_signal(way, daemon, job):
    state = str(daemon.directory / "state")
    [found] = ranks.run(_reads, 1, daemon.shm, state, job, WAYS[way])
    assert len(found) == 4 * len(SIZES)
    assert set(found) <= {"had", "DataLossError"}


def _on_two(connection, rank, endpoint, state, job, options):
    model = _model()
    optimizer = _made(model, endpoint, job, step_timeout=30, **options)
    _step(model, optimizer)
    torch.distributed.barrier()
    if rank == 0:
        os.truncate(_file_of(state, job), 8192)
    torch.distributed.barrier()
    _raises(_step, model, optimizer)
    return "well"


@pytest.mark.parametrize("reduction", ["trainer", "daemon"])
@pytest.mark.parametrize("way", WAYS)
def test_on_two_ranks(way, reduction, daemon, job):
    state = str(daemon.directory / "state")
    options = {**WAYS[way], "reduction": reduction}
    assert ranks.run(_on_two, 2, daemon.shm, state, job, options) == ["well", "well"]
