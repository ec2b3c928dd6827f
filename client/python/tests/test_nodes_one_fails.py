"""What fails on one of the nodes that share parameters out raises on all ranks: none is left
waiting for the one that failed."""

from __future__ import annotations

import optstate
import pytest
import ranks
from nodes import enter
from nodes import nodes as nodes
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
