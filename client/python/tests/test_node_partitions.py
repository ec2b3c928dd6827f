"""The network between two nodes is cut, or late: for less, and for more, than the process group
waits. Nodes have replicas, shards of FSDP2, or whole parameters shared out."""

from __future__ import annotations

import datetime
import os
import random
import time

import late_packets
import nodes as on_nodes
import optstate
import pytest
import ranks
import sharded
import torch
import two_networks
from optstate._torch.nodes import agreement
from optstate._torch.nodes.resolution import Verdict
from training import bits, loss_of, small_model

STEPS = 5
CUT_AT = 3
# Ranks that are to fail wait this long for each other, once the link is cut.
SHORT_TIMEOUT_S = 3
LONG_TIMEOUT_S = 120
# Where ranks stop that have voted, by what they tell their daemons.
VERDICTS = {"noting": Verdict.CLIP, "noted": Verdict.CLIP, "after": Verdict.COMMIT}
nodes = on_nodes.nodes


def _made(kind, *arguments):
    try:
        return kind(*arguments)
    except OSError as error:
        pytest.skip(f"no such networks can be made here: {error}")


@pytest.fixture
def networks():
    made = _made(two_networks.TwoNetworks)
    yield made
    made.close()


@pytest.fixture
def late_networks(seed):
    made = _made(late_packets.LateNetworks, seed)
    yield made
    made.close()


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
    """Stops the ranks in step CUT_AT. where: "before" they vote; "within" it, rank 1 before, and
    rank 0 as it begins to; "noted", when both have noted the norm of all gradients; or when they
    have agreed, and rank 0 alone has told its daemon: to note the norm ("noting"), or to take the
    step ("after")."""
    votes = agreement.NodeAgreement._votes
    decide = optstate.session.Session.decide

    def voting(self, outcome):
        if outcome.step != CUT_AT or where in VERDICTS:
            return votes(self, outcome)
        if rank == 0 and where == "within":
            wait = datetime.timedelta(seconds=timeout_s)
            torch.distributed.set_timeout(wait)
            ranks.say(connection, "stopped")
        else:
            _stop(connection, timeout_s)
        return votes(self, outcome)

    def deciding(self, step, digest, verdict, *norm):
        if step != CUT_AT or verdict is not VERDICTS.get(where):
            return decide(self, step, digest, verdict, *norm)
        is_first = rank == 1 and where != "noted"
        if is_first:
            _stop(connection, timeout_s)
        outcome = decide(self, step, digest, verdict, *norm)
        if not is_first:
            _stop(connection, timeout_s)
        return outcome

    agreement.NodeAgreement._votes = voting
    optstate.session.Session.decide = deciding


def _make(how, networks, endpoint, job):
    """Returns a model, and its optimizer. how: "replicated", or what nodes share: "fsdp2", shards;
    "zero", whole parameters; "contiguous", elements."""
    kwargs = {"lr": 0.01, "job": job, "endpoint": endpoint, "max_norm": 0.1}
    if networks:
        kwargs["across_nodes"] = "replicated" if how == "replicated" else "sharded"
        if how == "contiguous":
            kwargs["partition"] = "contiguous"
    if how == "fsdp2":
        model = sharded.fsdp(sharded.make_model())
        return model, optstate.AdamW(model.parameters(), model=model, **kwargs)
    module = small_model()
    model = torch.nn.parallel.DistributedDataParallel(module)
    return model, optstate.AdamW(module.named_parameters(), **kwargs)


def _train(connection, rank, endpoints, networks, meeting, job, how, where="", timeout_s=0):
    """Trains to STEPS; returns the first step, and the bits of everything. Or what the network
    ended, and the error."""
    _join(rank, networks, meeting)
    model, optimizer = _make(how, networks, endpoints[rank], job)
    first = optimizer.committed_step
    if where:
        _hold(connection, rank, where, timeout_s)
    for step in range(first, STEPS):
        optimizer.zero_grad()
        try:
            loss_of(model, 100 * step + rank).backward()
        except RuntimeError as error:  # from torch's own collectives
            return "torch", str(error)
        try:
            optimizer.step()
        except optstate.UnavailableError as error:
            return "step", str(error)
    optimizer.consolidate_state_dict(to=None)
    state = [value for entry in sharded.whole_state(optimizer) for value in entry.values()]
    result = bits(sharded.wholes(model)), bits(state), optimizer.committed_step
    optimizer.close()
    return first, result


def _run(meeting, endpoints, networks, job, how):
    arguments = (endpoints, networks, str(meeting), job, how)
    with ranks.running(_train, 2, *arguments, grouped=False) as running:
        return running.results()


def _undisturbed(daemon, job, how, tmp_path):
    (_, expected), again = _run(tmp_path / "alone", [daemon.shm] * 2, None, job, how)
    assert again[1] == expected
    return expected


PLACES = [
    *(("replicated", where) for where in ("before", "within", "after")),
    *(("fsdp2", where) for where in ("before", "within", "noting", "noted", "after")),
    ("zero", "noting"),
    ("zero", "after"),
    ("contiguous", "noting"),
]


@pytest.mark.parametrize(("how", "where"), PLACES)
@pytest.mark.parametrize("ends", [True, False])
def test_the_link_is_cut_around_a_vote(how, where, ends, networks, nodes, daemon, job, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed of the cut's instant: {seed}")
    expected = _undisturbed(daemon, job, how, tmp_path)
    endpoints = [each.shm for each in nodes]
    timeout_s = LONG_TIMEOUT_S if ends else SHORT_TIMEOUT_S
    arguments = (endpoints, networks.names, str(tmp_path / "two"), job, how, where, timeout_s)
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
        assert what == "torch" or "do not reach each other" in text
    if where in ("before", "noting", "noted"):  # torch's text is of its own
        assert [what for what, _ in found] == ["step", "step"]
    if how not in ("zero", "contiguous"):  # which can also fail to send what the step has made
        # A vote that is over before the link is cut leaves the next one to it.
        steps = [CUT_AT, CUT_AT + 1] if where == "within" else [CUT_AT]
        for what, text in found:
            assert what == "torch" or any(
                f"step {n} is prepared on this node" in text for n in steps
            )
    one, other = _run(tmp_path / "again", endpoints, networks.names, job, how)
    assert one == other == (one[0], expected)
    if how == "replicated" or where in VERDICTS:
        assert one[0] >= CUT_AT  # both had prepared it, and with shards one had noted the norm
    elif where == "before":  # no node has noted the norm of all gradients: the step is dropped
        assert one[0] == CUT_AT - 1


@pytest.mark.parametrize("how", ["replicated", "fsdp2", "zero"])
def test_packets_that_overtake_each_other(how, late_networks, nodes, daemon, job, tmp_path):
    expected = _undisturbed(daemon, job, how, tmp_path)
    endpoints = [each.shm for each in nodes]
    found = _run(tmp_path / "two", endpoints, late_networks.names, job, how)
    assert found == [(0, expected)] * 2
    assert late_networks.overtaken > 0


# How many packets of rank 1 arrive in time, from its vote on; None: any number of them. A vote
# takes about eleven, of which the last ones tell rank 0.
@pytest.mark.parametrize(
    ("how", "in_time"),
    [
        ("replicated", 7),  # rank 1 knows all votes, and takes the step
        ("fsdp2", 28),  # rank 1 knows the norm of all gradients, and notes it
        ("fsdp2", 39),  # rank 1 knows that both have noted it, and takes the step
        ("fsdp2", None),
        ("zero", None),
    ],
)
def test_packets_that_come_too_late(how, in_time, late_networks, nodes, daemon, job, tmp_path):
    """Rank 0 has ended when they arrive. Until then rank 1 gets what rank 0 sends."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed of the number of packets: {seed}")
    if in_time is None:
        in_time = random.Random(seed).randrange(50)
    expected = _undisturbed(daemon, job, how, tmp_path)
    endpoints = [each.shm for each in nodes]
    meeting, names = str(tmp_path / "two"), late_networks.names
    arguments = (endpoints, names, meeting, job, how, "before", SHORT_TIMEOUT_S)
    with ranks.running(_train, 2, *arguments, grouped=False) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        late_networks.hold(1, in_time)
        for connection in running.connections:
            connection.send("go on")
        found = running.results()
    late_networks.release()
    print(in_time, found)
    for what, text in found:
        assert what == "torch" or "do not reach each other" in text
    one, other = _run(tmp_path / "again", endpoints, names, job, how)
    assert one == other == (one[0], expected)
    is_taken = how == "replicated" or any(what == "torch" for what, _ in found)
    assert one[0] >= (CUT_AT if is_taken else CUT_AT - 1)
