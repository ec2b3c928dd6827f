"""All nodes of a job are drained while it trains: the drains end, and no step is lost."""

from __future__ import annotations

import os
import threading

import optstate
import pytest
import ranks
from daemon import Daemon
from optstate._torch.nodes import agreement
from optstate.session import Session
from training import bits, loss_of, small_model

STEPS = 5
DRAINED_AT = 3


@pytest.fixture
def nodes():
    daemons = [Daemon(), Daemon()]
    yield daemons
    for each in daemons:
        each.stop()


def _hold(connection, rank):
    """Stops rank 0 when its node has prepared the step, and rank 1 before it pushes anything."""
    votes = agreement.NodeAgreement._votes
    push = Session.push_gradients
    held = []

    def stop(step):
        if step == DRAINED_AT and not held:
            held.append(step)
            ranks.say(connection, "stopped")
            connection.recv()

    def voting(self, outcome):
        if rank == 0 and outcome is not None:
            stop(outcome.step)
        return votes(self, outcome)

    def pushing(self, step, *rest):
        if rank == 1:
            stop(step)
        return push(self, step, *rest)

    agreement.NodeAgreement._votes = voting
    Session.push_gradients = pushing


def _train(connection, rank, endpoints, job):
    """Returns what was raised while the nodes drained, and the parameters at the end."""
    os.environ["OPTSTATE_NODE"] = f"node{rank}"
    model = small_model()
    optimizer = optstate.AdamW(
        model.named_parameters(),
        lr=0.01,
        job=job,
        endpoint=endpoints[rank],
        across_nodes="replicated",
        gradients_as_views=False,
    )
    _hold(connection, rank)
    said = []
    while optimizer.committed_step < STEPS:
        optimizer.zero_grad()
        loss_of(model, optimizer.committed_step).backward()  # of equal data
        try:
            optimizer.step()
        except optstate.UnavailableError as error:
            said.append(str(error))
            ranks.say(connection, "refused")
            connection.recv()
    return said, bits(model.parameters())


def _alone():
    model = small_model()
    optimizer = optstate.AdamW(model.named_parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return bits(model.parameters())


def test_a_node_that_drains_before_a_step_and_one_after_it_prepared_it(nodes, job):
    failed = []

    def drain(node):
        try:
            node.run_optctl("drain")
        except AssertionError as error:
            failed.append(error)

    with ranks.running(_train, 2, [each.shm for each in nodes], job) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        drain(nodes[1])  # it has no open step
        other = threading.Thread(target=drain, args=(nodes[0],))
        other.start()
        for connection in running.connections:
            connection.send("go on")
        for rank in range(2):
            assert running.hear(rank) == "refused"
        other.join()
        assert not failed
        for node in nodes:
            node.run_optctl("drain", "--resume")
        for connection in running.connections:
            connection.send("go on")
        for said, parameters in running.results():
            assert len(said) == 1 and "drain" in said[0]
            assert parameters == _alone()
