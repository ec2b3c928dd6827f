"""What fails on one of the nodes that share parameters out raises on all ranks: none is left
waiting for the one that failed."""

from __future__ import annotations

import re

import optstate
import pytest
import ranks
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
