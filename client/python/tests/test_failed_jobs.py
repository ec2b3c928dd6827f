"""A job that has failed keeps its state until somebody says that it may go; and a job that must
exist is not made anew."""

from __future__ import annotations

import types

import nodes as on_nodes
import optstate
import pytest
import ranks
import torch
from optstate._torch.job import failed, opening
from optstate._torch.job.opening import Existing, check_exists
from optstate.session import Session
from optstate.session_spec import SessionSpec
from training import bits, loss_of, small_model

nodes = on_nodes.nodes


def _state(optimizer):
    entries = optimizer.state_dict()["state"]
    return bits([value for _, entry in sorted(entries.items()) for value in entry.values()])


def _extends(connection, rank, endpoint, job, thaws):
    """Extends a job whose daemon says that it has failed; returns what was said, whether a load
    was begun, and whether the state is what it was."""
    model = small_model()
    new = torch.nn.Parameter(torch.ones(3), requires_grad=not thaws)
    parameters = [*model.named_parameters(), *([("new", new)] if thaws else [])]
    optimizer = optstate.AdamW(parameters, lr=0.01, job=job, endpoint=endpoint)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    before = _state(optimizer)
    begun = []
    begin_load, fetch_numbers = Session.begin_load, failed.fetch_numbers

    def begins(self, **how):
        begun.append(how)
        begin_load(self, **how)

    def fails(session, which, count):
        raise optstate.DataLossError(f'job "{job}" cannot go on')

    Session.begin_load, failed.fetch_numbers = begins, fails
    try:
        if thaws:
            new.requires_grad_(True)
            new.grad = torch.ones(3)
            optimizer.step()
        else:
            optimizer.add_param_group({"params": [("new", new)]})
        said = ""
    except optstate.DataLossError as error:
        said = str(error)
    finally:
        Session.begin_load, failed.fetch_numbers = begin_load, fetch_numbers
    kept = _state(optimizer) == before
    optimizer.close()
    return said, begun, kept


@pytest.mark.parametrize("thaws", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failed_job_is_not_extended(world_size, thaws, daemon, job):
    for said, begun, kept in ranks.run(_extends, world_size, daemon.shm, job, thaws):
        assert f"optctl recover job {job}" in said and f"optctl delete job {job}" in said
        assert begun == [] and kept


def _extends_on_nodes(connection, rank, endpoints, job):
    """The job has failed on the last node alone: the other's ranks are told too."""
    endpoint = on_nodes.enter(rank, endpoints, 1)
    model = small_model()
    optimizer = optstate.AdamW(
        model.named_parameters(), job=job, endpoint=endpoint, across_nodes="replicated"
    )
    fetch_numbers = failed.fetch_numbers

    def fails(session, which, count):
        if rank == len(endpoints) - 1:
            raise optstate.DataLossError(f'job "{job}" cannot go on')
        return fetch_numbers(session, which, count)

    failed.fetch_numbers = fails
    new = torch.nn.Parameter(torch.ones(3))
    try:
        optimizer.add_param_group({"params": [("new", new)]})
    except optstate.DataLossError as error:
        return str(error)
    finally:
        failed.fetch_numbers = fetch_numbers
        optimizer.close()
    return ""


def test_a_job_that_failed_on_one_node_is_extended_on_none(nodes, job):
    endpoints = [each.shm for each in nodes]
    for said in ranks.run(_extends_on_nodes, 2, endpoints, job):
        assert f"optctl recover job {job}" in said
    assert all(len(each.parameters(job)) == 6 for each in nodes)


class _Failed:
    """A session whose daemon refuses a fetch with this error."""

    _library = types.SimpleNamespace(optstate_fetch_many=None)

    def __init__(self, error):
        self._error = error

    def _call(self, function, *arguments):
        raise self._error


def test_the_kind_of_error_stays():
    with pytest.raises(optstate.ResourceExhaustedError, match="no room.*optctl recover job gpt"):
        failed.refuse_failed(_Failed(optstate.ResourceExhaustedError("no room")), "gpt", 1)
    with pytest.raises(optstate.UnavailableError) as unreachable:
        failed.refuse_failed(_Failed(optstate.UnavailableError("away")), "gpt", 1)
    assert "recover" not in str(unreachable.value)
    failed.refuse_failed(_Failed(AssertionError("asked")), "gpt", 0)  # it has no parameters


def test_a_job_that_must_exist_is_not_made(daemon, job):
    spec = SessionSpec(job=job, optimizer=0, group_options=[], parameters=[], endpoint=daemon.shm)
    check_exists(spec, None)
    with pytest.raises(optstate.NotFoundError, match=f'no job "{job}" any more'):
        check_exists(spec, Existing(daemon.shm))
    assert job not in daemon.jobs()
    optimizer = optstate.AdamW(small_model().parameters(), job=job, endpoint=daemon.shm)
    check_exists(spec, Existing(None))
    optimizer.close()


def _train_thawing(daemon, job):
    """Trains a job whose last parameter was added when it was thawed."""
    model = small_model()
    model[3].bias.requires_grad_(False)
    optimizer = optstate.AdamW(model.named_parameters(), job=job, endpoint=daemon.shm)
    for step in range(2):
        model[3].bias.requires_grad_(step == 1)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    optimizer.close()


def test_a_job_with_other_groups_is_not_made_anew(daemon, job, monkeypatch):
    """It is deleted when the optimizer has found that it has other groups than the script."""
    _train_thawing(daemon, job)
    again = optstate.AdamW(small_model().named_parameters(), job=job, endpoint=daemon.shm)
    assert again.committed_step == 2
    again.close()
    asked = []

    def deletes(spec, existing):
        check_exists(spec, existing)
        if existing is not None:
            asked.append(spec.job)
            daemon.run_optctl("delete", "job", job)

    monkeypatch.setattr(opening, "check_exists", deletes)
    with pytest.raises(optstate.NotFoundError, match=f'no job "{job}" any more'):
        optstate.AdamW(small_model().named_parameters(), job=job, endpoint=daemon.shm)
    assert asked == [job]


def test_reload_states_makes_no_job(daemon, job):
    """It is deleted between being woken and being attached to."""
    from optstate._torch import sleeping
    from optstate._torch.job.asleep import Asleep
    from optstate._torch.ranks import Ranks

    model = small_model()
    optimizer = optstate.AdamW(model.named_parameters(), job=job, endpoint=daemon.shm)
    served = optimizer._served
    asleep = Asleep.of(served.attachment, {})
    served.detach("it is asleep")
    daemon.run_optctl("delete", "job", job)
    with pytest.raises(optstate.NotFoundError, match="any more"):
        sleeping._attach(served, asleep, Ranks(None))
    assert job not in daemon.jobs()
