"""Several nodes on one machine, each with a daemon of its own, for tests of several modules."""

from __future__ import annotations

import os
import tempfile

import bridged_networks
import pytest
import ranks
import torch
import two_networks
from daemon import Daemon
from optstate._torch.nodes import agreement
from optstate._torch.nodes.resolution import Verdict

# Every optimizer, with options that make state arrays of their own.
OPTIMIZERS = {
    "Adam": {"weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
    "SGD": {"momentum": 0.9},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "NAdam": {},
    "RAdam": {"weight_decay": 0.1},
    "Lion": {"weight_decay": 0.1},
    "LAMB": {"weight_decay": 0.1},
    "Adafactor": {},
    "Muon": {},
}


@pytest.fixture
def nodes(request):
    """Two daemons, or as many as a test is parametrized with."""
    daemons = [Daemon() for _ in range(getattr(request, "param", 2))]
    yield daemons
    for each in daemons:
        each.stop()


def enter(rank, endpoints, per_node):
    """Makes this process one of its node; returns the node's endpoint."""
    os.environ["OPTSTATE_NODE"] = f"node{rank // per_node}"
    return endpoints[rank // per_node]


def _enter_network(connection, rank, function, endpoints, networks, meeting, *args):
    per_node = 2
    two_networks.enter(networks[rank // per_node])
    os.environ["GLOO_SOCKET_IFNAME"] = two_networks.INTERFACE
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=per_node * len(endpoints)
    )
    return function(connection, rank, endpoints, per_node, *args)


def run_on(nodes, function, *args):
    """Runs function(connection, rank, endpoints, ranks of a node, *args) on two ranks of each node.
    With more than two nodes each has a network of its own, if this machine makes some."""
    endpoints = [each.shm for each in nodes]
    world = 2 * len(nodes)
    if len(nodes) == 2:
        return ranks.run(function, world, endpoints, 2, *args)
    try:
        networks = bridged_networks.BridgedNetworks(len(nodes))
    except OSError as error:
        print(f"all nodes are in one network: {error}")
        return ranks.run(function, world, endpoints, 2, *args)
    try:
        with tempfile.TemporaryDirectory(prefix="optstate-test-") as directory:
            within = (
                function,
                endpoints,
                networks.names,
                os.path.join(directory, "meeting"),
                *args,
            )
            with ranks.running(_enter_network, world, *within, grouped=False) as running:
                return running.results()
    finally:
        networks.close()


def train_each(connection, rank, endpoints, per_node, train, job, kinds, kwargs, until):
    """Has each kind of optimizer train a job of its own on all ranks; returns train()'s results.

    train: called as train(connection, rank, endpoints, per_node, job, kind, kwargs, until=until).
    """
    return {
        kind: train(
            connection,
            rank,
            endpoints,
            per_node,
            f"{job}-{kind}",
            kind,
            {**OPTIMIZERS[kind], **kwargs},
            until=until,
        )
        for kind in kinds
    }


def assert_each_has_the_bits_of_one_node(train, kinds, kwargs, nodes, daemon, job):
    """Nodes of two ranks train as one node of all ranks does, with each kind of optimizer."""
    world, arguments = 2 * len(nodes), (train, job, kinds, kwargs, 3)
    one = ranks.run(train_each, world, [daemon.shm], world, *arguments)
    several = run_on(nodes, train_each, *arguments)
    for kind in kinds:
        parameters, state, *_ = one[0][kind]
        assert any(any(each) for each in state), kind
        for found in (*one[1:], *several):
            assert found[kind][0] == parameters and found[kind][1] == state, kind


def engine(daemon, job):
    """The process of a job's engine."""
    return int(daemon.optctl("describe", "job", job)["engine_pid"])


# Where a rank stops in step 3, for the test to kill what it wants to.


def _stop(connection):
    ranks.say(connection, "stopped")
    connection.recv()


def stops_when_prepared(connection, rank, optimizer, at=3):
    """Stops every rank when its node has prepared the step, and none knows of the others'."""
    votes = agreement.NodeAgreement._votes

    def stopping(self, outcome):
        if outcome is not None and outcome.step == at:
            _stop(connection)
        return votes(self, outcome)

    agreement.NodeAgreement._votes = stopping


def stops_before_deciding(connection, rank, optimizer, at=3, verdict=None):
    """Rank 0's node takes the step, or notes its norm where nodes hold different shards; every
    other rank stops before it says what was decided.

    verdict: the one before which it stops; None: the first.
    """
    session = optimizer._served.attachment.session
    decide = session.decide

    def stopping(step, digest, decided, *norm):
        if step != at or verdict not in (None, decided):
            return decide(step, digest, decided, *norm)
        session.decide = decide  # once
        if rank != 0:
            _stop(connection)
        outcome = decide(step, digest, decided, *norm)
        if rank == 0:
            _stop(connection)
        return outcome

    session.decide = stopping


def stops_before_committing(connection, rank, optimizer, at=3):
    """Both nodes have noted the norm of all gradients, and rank 0's node takes the step."""
    stops_before_deciding(connection, rank, optimizer, at, Verdict.COMMIT)


def stops_when_noted(connection, rank, optimizer, at=3):
    """Both nodes have noted the norm, and none takes the step."""
    session = optimizer._served.attachment.session
    decide = session.decide

    def stopping(step, digest, verdict, *norm):
        outcome = decide(step, digest, verdict, *norm)
        if step == at and verdict is Verdict.CLIP:
            _stop(connection)
        return outcome

    session.decide = stopping


def stops_before_preparing(connection, rank, optimizer, at=3):
    """Rank 0's node prepares the step, and the other one does not."""
    session = optimizer._served.attachment.session
    commit = session.commit

    def stopping(step, *rest, **options):
        if step == at and rank != 0:
            _stop(connection)
        return commit(step, *rest, **options)

    session.commit = stopping
    if rank == 0:
        stops_when_prepared(connection, rank, optimizer, at)


def says_step(connection, rank, optimizer):
    ranks.say(connection, optimizer.committed_step)
