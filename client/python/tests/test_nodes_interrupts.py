"""Ctrl-C on one of the nodes that share parameters out: in a vote, and between the broadcasts by
which the others get its parameters."""

from __future__ import annotations

import signal

import optstate
import pytest
import ranks
from nodes import enter
from nodes import nodes as nodes
from training import bits, loss_of, small_model

STEPS = 4


def _interrupts_once(held, name):
    """Has a signal come within the next call of a method of the object, when it has done its
    work."""
    call = getattr(held, name)

    def interrupted(*arguments):
        delattr(held, name)
        result = call(*arguments)
        signal.raise_signal(signal.SIGINT)
        return result

    setattr(held, name, interrupted)


def _fails_once(session):
    def failing(*_, **__):
        del session.commit
        raise optstate.errors.InternalError("made up")

    session.commit = failing


def _train(connection, rank, endpoints, job, ends, where):
    """ends: how step 2 ends. where: the places in which rank 1 is interrupted in that step, one
    after the other. Returns bits of the parameters, and how often this rank was interrupted."""
    model = small_model()
    optimizer = optstate.AdamW(
        model.named_parameters(),
        lr=0.01,
        job=job,
        endpoint=enter(rank, endpoints, 1),
        across_nodes="sharded",
    )
    attachment = optimizer._served.attachment
    places = {"vote": (attachment.nodes, "_votes"), "spread": (attachment.ranks, "replicate_all")}
    left, interrupts, has_failed = list(where), 0, False
    while True:
        if left and rank == 1 and attachment.session.committed_step >= 1:
            _interrupts_once(*places[left.pop(0)])
        try:
            step = optimizer.committed_step
            if step == STEPS:
                break
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step == 1 and ends == "skip":
                model[0].weight.grad[0, 0] = float("inf")
            if step == 1 and ends == "abort" and rank == 0 and not has_failed:
                has_failed = True
                _fails_once(attachment.session)
            optimizer.step()
        except KeyboardInterrupt:
            interrupts += 1
        except optstate.errors.InternalError:
            assert ends == "abort"
    result = bits(model.parameters()), interrupts
    optimizer.close()
    return result


@pytest.mark.parametrize(
    ("ends", "where"),
    [
        ("commit", ["vote"]),
        ("skip", ["vote"]),
        ("abort", ["vote"]),
        ("commit", ["spread"]),
        # In the vote, and when the next use of the optimizer gives the others its parameters.
        ("commit", ["vote", "spread"]),
        ("skip", ["vote", "spread"]),
    ],
)
def test_ctrl_c_on_one_node(ends, where, nodes, job):
    endpoints = [each.shm for each in nodes]
    smooth = ranks.run(_train, 2, endpoints, f"{job}-smooth", ends, ())
    assert smooth[0] == smooth[1] == (smooth[0][0], 0)
    found = ranks.run(_train, 2, endpoints, job, ends, where)
    assert found == [smooth[0], (smooth[0][0], len(where))]
