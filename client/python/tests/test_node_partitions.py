"""The network between two nodes is cut: for less, and for more, than the process group waits."""

from __future__ import annotations

import datetime
import os
import random
import time

import optstate
import pytest
import ranks
import torch
import two_networks
from daemon import Daemon
from optstate._torch.nodes import agreement
from training import bits, loss_of, small_model

STEPS = 5
CUT_AT = 3
# Ranks that are to fail wait this long for each other, once the link is cut.
SHORT_TIMEOUT_S = 3
LONG_TIMEOUT_S = 120


@pytest.fixture
def networks():
    try:
        made = two_networks.TwoNetworks()
    except OSError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    yield made
    made.close()


@pytest.fixture
def nodes():
    daemons = [Daemon(), Daemon()]
    yield daemons
    for each in daemons:
        each.stop()


def _join(rank, networks, meeting):
    """Enters the node's network, and makes the group over the link."""
    if networks:
        two_networks.enter(networks[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = two_networks.INTERFACE
        os.environ["OPTSTATE_NODE"] = f"node{rank}"
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=LONG_TIMEOUT_S),
    )


def _stop(connection, timeout_s):
    ranks.say(connection, "stopped")
    connection.recv()
    wait = datetime.timedelta(seconds=timeout_s)
    torch.distributed.set_timeout(wait)


def _hold(connection, rank, where, timeout_s):
    """Stops both ranks before they vote; or rank 1 before, and rank 0 as it begins to; or both
    when they have voted, and rank 0 has told its daemon."""
    votes = agreement.NodeAgreement._votes
    decide = optstate.session.Session.decide

    def voting(self, outcome):
        if outcome.step != CUT_AT or where == "after":
            return votes(self, outcome)
        if rank == 0 and where == "within":
            wait = datetime.timedelta(seconds=timeout_s)
            torch.distributed.set_timeout(wait)
            ranks.say(connection, "stopped")
        else:
            _stop(connection, timeout_s)
        return votes(self, outcome)

    def deciding(self, step, *rest):
        if step != CUT_AT or where != "after":
            return decide(self, step, *rest)
        if rank == 1:
            _stop(connection, timeout_s)
        outcome = decide(self, step, *rest)
        if rank == 0:
            _stop(connection, timeout_s)
        return outcome

    agreement.NodeAgreement._votes = voting
    optstate.session.Session.decide = deciding


def _train(connection, rank, endpoints, networks, meeting, job, where="", timeout_s=0):
    """Trains to STEPS; returns the first step, and the bits of everything."""
    _join(rank, networks, meeting)
    module = small_model()
    model = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = optstate.AdamW(
        module.named_parameters(),
        lr=0.01,
        job=job,
        endpoint=endpoints[rank],
        max_norm=0.1,
        across_nodes="replicated" if networks else None,
    )
    first = optimizer.committed_step
    if where:
        _hold(connection, rank, where, timeout_s)
    for step in range(first, STEPS):
        optimizer.zero_grad()
        try:
            loss_of(model, 100 * step + rank).backward()
        except RuntimeError as error:  # of torch's own all-reduce
            return "backward", str(error)
        try:
            optimizer.step()
        except optstate.UnavailableError as error:
            return "step", str(error)
    state = optimizer.state_dict()["state"]
    tensors = [value for _, entry in sorted(state.items()) for value in entry.values()]
    result = bits(module.parameters()), bits(tensors), optimizer.committed_step
    optimizer.close()
    return first, result


def _run(meeting, endpoints, networks, job):
    with ranks.running(_train, 2, endpoints, networks, str(meeting), job, grouped=False) as running:
        return running.results()


@pytest.mark.parametrize("where", ["before", "within", "after"])
@pytest.mark.parametrize("ends", [True, False])
def test_the_link_is_cut_around_a_vote(where, ends, networks, nodes, daemon, job, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed of the cut's instant: {seed}")
    (_, expected), again = _run(tmp_path / "alone", [daemon.shm] * 2, None, job)
    assert again[1] == expected
    endpoints = [each.shm for each in nodes]
    timeout_s = LONG_TIMEOUT_S if ends else SHORT_TIMEOUT_S
    arguments = (endpoints, networks.names, str(tmp_path / "two"), job, where, timeout_s)
    with ranks.running(_train, 2, *arguments, grouped=False) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        if where == "within":  # any instant of the vote will do
            running.connections[1].send("go on")
            time.sleep(random.Random(seed).uniform(0, 0.01))
        networks.cut()
        for rank in range(2):
            if where != "within":
                running.connections[rank].send("go on")
        if ends:
            networks.await_loss(*(process.pid for process in running.processes))
            networks.mend()
            assert running.results() == [(0, expected)] * 2
            return
        found = running.results()
    networks.mend()
    for what, text in found:
        assert what == "backward" or "do not reach each other" in text
    if where == "before":  # torch's text is of its own
        assert all(
            what == "step" and "step 3 is prepared on this node" in text for what, text in found
        )
    one, other = _run(tmp_path / "again", endpoints, networks.names, job)
    assert one == other == (one[0], expected)
    assert one[0] >= CUT_AT  # both had prepared it
