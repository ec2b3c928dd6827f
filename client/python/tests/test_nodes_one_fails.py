"""Errors on one of the nodes that share parameters out are raised on all ranks: none is left
waiting for the one that failed."""

from __future__ import annotations

import copy
import re

import optstate
import pytest
import ranks
import torch
from nodes import enter
from nodes import nodes as nodes
from optstate._torch.nodes.resolution import Verdict
from training import bits, small_model, train


def _make(rank, endpoints, job, model, **kwargs):
    return optstate.AdamW(
        model.named_parameters(),
        lr=0.01,
        job=job,
        endpoint=enter(rank, endpoints, 1),
        across_nodes="sharded",
        **kwargs,
    )


def _fails_once(held, name, error):
    """Has a method of the object raise the error, the next time that it is called."""

    def failing(*_, **__):
        delattr(held, name)
        raise error

    setattr(held, name, failing)


def _made_up():
    return optstate.errors.InternalError("made up")


def _raised(call):
    """Returns the error that the call must raise."""
    with pytest.raises(optstate.errors.InternalError) as raised:
        call()
    return str(raised.value)


def _consolidates(connection, rank, endpoints, job):
    model = small_model()
    optimizer = _make(rank, endpoints, job, model)
    train(model, optimizer, range(2))
    if rank == 1:
        _fails_once(optimizer._served.attachment, "fetch", _made_up())
    said = _raised(lambda: optimizer.consolidate_state_dict(to=None))
    optimizer.consolidate_state_dict(to=None)
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    optimizer.close()
    return said


def test_consolidate_state_dict(nodes, job):
    said = ranks.run(_consolidates, 2, [each.shm for each in nodes], job)
    assert said == ["rank 1: made up", "made up"]


def _takes_norms(connection, rank, endpoints, job):
    model = small_model()
    optimizer = _make(rank, endpoints, job, model)
    train(model, optimizer, range(2))
    if rank == 1:
        _fails_once(optimizer._served.attachment.session, "gradient_norms", _made_up())
    said = _raised(optimizer.gradient_norms)
    found = optimizer.gradient_norms()
    assert found.keys() == {name for name, _ in model.named_parameters()}
    train(model, optimizer, range(2, 3))
    optimizer.close()
    return said, found, bits(model.parameters())


def test_gradient_norms(nodes, job):
    one, other = ranks.run(_takes_norms, 2, [each.shm for each in nodes], job)
    assert (one[0], other[0]) == ("rank 1: made up", "made up")
    assert one[1:] == other[1:]


# The call that fails within a load: a method of what the attachment holds.
CALLS = [("options", "check_groups"), ("parameters", "changed"), ("parameters", "read")]


def _loads(connection, rank, endpoints, job, held, call):
    model = small_model()
    optimizer = _make(rank, endpoints, job, model)
    train(model, optimizer, range(2))
    optimizer.consolidate_state_dict(to=None)
    values, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    at_the_end = bits(model.parameters())
    model.load_state_dict(values)
    if rank == 1:
        _fails_once(getattr(optimizer._served.attachment, held), call, _made_up())
    said = _raised(lambda: optimizer.load_state_dict(state))
    optimizer.load_state_dict(state)
    train(model, optimizer, range(2, 4))
    assert bits(model.parameters()) == at_the_end
    optimizer.close()
    return said


@pytest.mark.parametrize(("held", "call"), [*CALLS, ("session", "finish_load")])
def test_load_state_dict(held, call, nodes, job):
    said = ranks.run(_loads, 2, [each.shm for each in nodes], job, held, call)
    assert said == ["rank 1: made up", "made up"]


def _keeps_the_job(connection, rank, endpoints, job, held, call):
    """A checkpoint is left out, because the job goes on."""
    model = small_model()
    optimizer = _make(rank, endpoints, job, model)
    train(model, optimizer, range(2))
    optimizer.consolidate_state_dict(to=None)
    values, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    at_the_end = bits(model.parameters())
    optimizer.close()
    optimizer = _make(rank, endpoints, job, model, resume="job")
    model.load_state_dict(values)
    if rank == 1:
        _fails_once(getattr(optimizer._served.attachment, held), call, _made_up())
    with pytest.warns(UserWarning):
        said = _raised(lambda: optimizer.load_state_dict(state))
        optimizer.load_state_dict(state)
    assert bits(model.parameters()) == at_the_end
    optimizer.close()
    return said


@pytest.mark.parametrize(("held", "call"), CALLS[1:])
def test_load_state_dict_of_a_job_that_goes_on(held, call, nodes, job):
    said = ranks.run(_keeps_the_job, 2, [each.shm for each in nodes], job, held, call)
    assert said == ["rank 1: made up", "made up"]


def _sends_changes(connection, rank, endpoints, job):
    model = small_model()
    optimizer = _make(rank, endpoints, job, model)
    train(model, optimizer, range(1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    if rank == 1:
        _fails_once(optimizer._served.attachment.session, "finish_load", _made_up())
    said = _raised(lambda: train(model, optimizer, range(1, 2)))
    train(model, optimizer, range(1, 2))
    assert optimizer.committed_step == 2
    optimizer.close()
    return said, bits(model.parameters())


def test_parameters_that_are_changed_in_place(nodes, job):
    one, other = ranks.run(_sends_changes, 2, [each.shm for each in nodes], job)
    assert (one[0], other[0]) == ("rank 1: made up", "made up")
    assert one[1] == other[1]


def _cannot_bring(connection, rank, endpoints, job, verdict):
    """Rank 1 cannot bring the verdict of step 2, which rank 0 fails to prepare if it is ABORT."""
    model = small_model()
    optimizer = _make(rank, endpoints, job, model)
    train(model, optimizer, range(1))
    session = optimizer._served.attachment.session
    if rank == 1:
        decide = session.decide

        def failing(step, digest, decided, *norm):
            if decided is verdict:
                raise _made_up()
            return decide(step, digest, decided, *norm)

        session.decide = failing
    elif verdict is Verdict.ABORT:
        _fails_once(session, "commit", _made_up())
    try:
        train(model, optimizer, range(1, 2))
    except optstate.UnavailableError as error:
        return str(error)
    except optstate.errors.InternalError:
        with pytest.raises(optstate.FailedPreconditionError) as raised:
            train(model, optimizer, range(1, 2))
        return str(raised.value)


def _goes_on(connection, rank, endpoints, job):
    model = small_model()
    optimizer = _make(rank, endpoints, job, model)
    began_at = optimizer.committed_step
    train(model, optimizer, range(began_at, 4))
    optimizer.close()
    return began_at, bits(model.parameters())


@pytest.mark.parametrize("verdict", [Verdict.COMMIT, Verdict.ABORT])
def test_a_verdict_that_is_not_brought(verdict, nodes, job):
    endpoints = [each.shm for each in nodes]
    smooth = ranks.run(_goes_on, 2, endpoints, f"{job}-smooth")
    said = ranks.run(_cannot_bring, 2, endpoints, job, verdict)
    undecided = "what all nodes decided about step 2 is not known on node1.*start all ranks"
    assert re.search(undecided, said[1])
    if verdict is Verdict.COMMIT:  # rank 0 has waited for rank 1, which has ended
        assert "do not reach each other" in said[0]
    else:
        assert re.search(undecided.replace("node1", "node0"), said[0])
    found = ranks.run(_goes_on, 2, endpoints, job)
    assert [(began_at, values) for began_at, values in found] == [
        (2 if verdict is Verdict.COMMIT else 1, values) for _, values in smooth
    ]
