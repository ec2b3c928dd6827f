"""Several nodes, each with a daemon of its own, on one machine: one step on all or on none."""

from __future__ import annotations

import copy
import os
import signal

import nodes as on_nodes
import optstate
import pytest
import ranks
import torch
from ddp_on_nodes import STEPS, same_on_all, train
from optstate._torch.nodes import agreement
from optstate._torch.optimizer_info import infos
from training import bits, loss_of, small_model, values_of

nodes = on_nodes.nodes


CASES = {
    "plain": {},
    "clipped": {"max_norm": 0.1},
    "inf": {},
    "scaler": {"fused": True},
    "accumulate": {"accumulate": True},
    "missing": {},
    "missing on a node": {},
    "SGD": {"momentum": 0.9},
    "Lion": {},
    "Muon": {},
    "LAMB": {},
}


ON_FOUR = ("plain", "clipped", "inf", "accumulate", "missing")


@pytest.mark.parametrize(
    ("case", "nodes"),
    [*((case, 2) for case in CASES), *((case, 4) for case in ON_FOUR)],
    indirect=["nodes"],
)
def test_the_bits_of_one_node_with_all_ranks(case, nodes, daemon, job):
    kwargs, world = CASES[case], 2 * len(nodes)
    one = ranks.run(train, world, [daemon.shm], world, job, case, kwargs)
    several = on_nodes.run_on(nodes, train, job, case, kwargs)
    assert repr(same_on_all(several)) == repr(same_on_all(one))
    if case in ("inf", "scaler"):
        skipped = [applied for _, applied in several[0][2]].count(False)
        assert skipped == (2 if case == "inf" else 1)
    assert [each.jobs() for each in nodes] == [[job]] * len(nodes)


@pytest.mark.parametrize("nodes", [4], indirect=True)
def test_every_optimizer_has_the_bits_of_one_node(nodes, daemon, job):
    assert {name.lower() for name in on_nodes.OPTIMIZERS} == set(infos())
    kinds = [name for name in on_nodes.OPTIMIZERS if hasattr(optstate, name)]
    on_nodes.assert_each_has_the_bits_of_one_node(train, kinds, {}, nodes, daemon, job)


def _collective(connection, rank, endpoints, job):
    """Without DistributedDataParallel; one parameter has a gradient on rank 0 alone."""
    module = small_model()
    across = "replicated" if len(endpoints) > 1 else None
    endpoint = on_nodes.enter(rank, endpoints, 1) if across else endpoints[0]
    optimizer = optstate.AdamW(
        module.named_parameters(),
        lr=0.01,
        job=job,
        endpoint=endpoint,
        reduction="collective",
        across_nodes=across,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(module, 100 * step + rank).backward()
        if rank:
            module[3].bias.grad = None
        optimizer.step()
    result = bits(module.parameters()), values_of(module)
    optimizer.close()
    return result


def test_gradients_that_the_client_averages(nodes, daemon, job):
    one = ranks.run(_collective, 2, [daemon.shm], job)
    two = ranks.run(_collective, 2, [each.shm for each in nodes], job)
    module = small_model()
    reference = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(STEPS):
        reference.zero_grad()
        gradients = []
        for rank in range(2):
            module.zero_grad()
            loss_of(module, 100 * step + rank).backward()
            gradients.append([each.grad.clone() for each in module.parameters()])
        gradients[1][-1].zero_()
        for each, first, second in zip(module.parameters(), *gradients):
            each.grad = (first + second) / 2
        reference.step()
    assert len({repr(found) for found, _ in one + two}) == 1
    for found, expected in zip(two[0][1], module.parameters()):
        torch.testing.assert_close(torch.from_numpy(found), expected.detach())


@pytest.mark.parametrize("wire", ["grpc_unix", "grpc_tcp"])
def test_over_grpc(wire, nodes, daemon, job):
    kwargs = {"max_norm": 0.1}
    one = ranks.run(train, 2, [daemon.shm], 2, job, "plain", kwargs)
    two = ranks.run(train, 2, [getattr(each, wire) for each in nodes], 1, job, "plain", kwargs)
    assert repr(same_on_all(two)) == repr(same_on_all(one))


def _kill_nothing(nodes, job):
    pass


def _kill_engine(nodes, job):
    os.kill(on_nodes.engine(nodes[1], job), signal.SIGKILL)


def _kill_engines(nodes, job):
    for each in nodes:
        os.kill(on_nodes.engine(each, job), signal.SIGKILL)


def _kill_supervisor(nodes, job):
    nodes[1].kill()
    nodes[1].start()


@pytest.mark.parametrize(
    ("kill", "wire"),
    [
        (_kill_nothing, "shm"),
        (_kill_engine, "shm"),
        (_kill_engines, "shm"),
        (_kill_supervisor, "shm"),
        (_kill_engines, "grpc_unix"),
    ],
)
@pytest.mark.parametrize(
    ("where", "resumed_at"),
    [
        (on_nodes.stops_when_prepared, 3),
        (on_nodes.stops_before_deciding, 3),
        (on_nodes.stops_before_preparing, 2),
    ],
)
def test_ranks_that_are_killed_within_a_step(where, resumed_at, kill, wire, nodes, daemon, job):
    """All nodes end at one step, with the bits of a training that nobody disturbed."""
    endpoints = [getattr(each, wire) for each in nodes]
    kwargs = {"max_norm": 0.1}
    expected = same_on_all(ranks.run(train, 2, [daemon.shm], 2, job, "plain", kwargs))
    with ranks.running(train, 2, endpoints, 1, job, "plain", kwargs, where) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        kill(nodes, job)
        running.kill(0, 1)
    with ranks.running(train, 2, endpoints, 1, job, "plain", kwargs, on_nodes.says_step) as running:
        assert [running.hear(rank) for rank in range(2)] == [resumed_at] * 2
        again = same_on_all(running.results())
    assert again[:2] == expected[:2] and again[3] == STEPS
    assert again[2] == expected[2][resumed_at:]


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_an_engine_killed_while_its_ranks_live_is_a_delay(wire, nodes, daemon, job):
    endpoints = [getattr(each, wire) for each in nodes]
    expected = same_on_all(ranks.run(train, 2, [daemon.shm], 2, job, "plain", {}))
    for where in (on_nodes.stops_when_prepared, on_nodes.stops_before_deciding):
        name = f"{job}-{where.__name__}"
        with ranks.running(train, 2, endpoints, 1, name, "plain", {}, where) as running:
            for rank in range(2):
                assert running.hear(rank) == "stopped"
            _kill_engines(nodes, name)
            for connection in running.connections:
                connection.send("go on")
            assert repr(same_on_all(running.results())) == repr(expected)


def _other_gradients(connection, rank, endpoints, job):
    endpoint = on_nodes.enter(rank, endpoints, 1)
    model = small_model()
    optimizer = optstate.AdamW(
        model.named_parameters(), lr=0.01, job=job, endpoint=endpoint, across_nodes="replicated"
    )
    said = []
    for step in (rank, 7):  # not averaged, and then equal
        optimizer.zero_grad()
        loss_of(model, step).backward()
        try:
            optimizer.step()
        except optstate.errors.FailedPreconditionError as error:
            said.append(str(error))
    return said, optimizer.committed_step, bits(model.parameters())


def test_gradients_that_are_not_averaged(nodes, job):
    one, other = ranks.run(_other_gradients, 2, [each.shm for each in nodes], job)
    assert one == other
    assert len(one[0]) == 1 and one[1] == 1
    assert "node0: step 1, digest" in one[0][0] and "node1: step 1, digest" in one[0][0]


def _other_state(connection, rank, endpoints, job):
    endpoint = on_nodes.enter(rank, endpoints, 1)
    model = small_model()
    optimizer = optstate.AdamW(
        model.named_parameters(), lr=0.01, job=job, endpoint=endpoint, across_nodes="replicated"
    )

    def step():
        optimizer.zero_grad()
        loss_of(model, 7).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient in gradients:  # the models differ for a while, the gradients do not
            torch.distributed.broadcast(gradient, 0)
        try:
            optimizer.step()
        except optstate.errors.FailedPreconditionError as error:
            return str(error)
        return ""

    said = [step()]
    saved = copy.deepcopy(optimizer.state_dict())
    values = [parameter.detach().clone() for parameter in model.parameters()]
    stale = copy.deepcopy(saved)
    stale["state"][0]["exp_avg"].mul_(2 + rank)
    optimizer.load_state_dict(stale)
    said.append(step())
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values):
            parameter.copy_(value)
    optimizer.load_state_dict(saved)
    said.append(step())
    return said, optimizer.committed_step, bits(model.parameters())


def test_nodes_that_load_other_state(nodes, job):
    one, other = ranks.run(_other_state, 2, [each.shm for each in nodes], job)
    assert one == other
    assert one[0][0] == one[0][2] == "" and "what was loaded since" in one[0][1]
    assert one[1] == 2


def _interrupted(connection, rank, endpoints, job):
    endpoint = on_nodes.enter(rank, endpoints, 1)
    model = small_model()
    optimizer = optstate.AdamW(
        model.named_parameters(), lr=0.01, job=job, endpoint=endpoint, across_nodes="replicated"
    )
    votes = agreement.NodeAgreement._votes

    def interrupting(self, outcome):
        found = votes(self, outcome)
        if rank == 0 and outcome.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return found

    agreement.NodeAgreement._votes = interrupting
    interrupted = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        try:
            optimizer.step()
        except KeyboardInterrupt:
            interrupted.append(step)
            optimizer.state_dict()  # the next use of the optimizer reads the parameters
    return interrupted, optimizer.committed_step, bits(model.parameters())


def test_an_interrupt_between_vote_and_decision_comes_afterwards(nodes, job):
    one, other = ranks.run(_interrupted, 2, [each.shm for each in nodes], job)
    assert (one[0], other[0]) == ([1], [])
    assert one[1:] == other[1:] and one[1] == 4


def _refused(connection, rank, endpoints, job, kwargs, model_seed=0):
    endpoint = on_nodes.enter(rank, endpoints, 1)
    try:
        optstate.AdamW(
            small_model(model_seed * rank).named_parameters(), job=job, endpoint=endpoint, **kwargs
        )
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("kwargs", "kind", "text"),
    [
        ({}, "UnimplementedError", 'across_nodes="replicated"'),
        ({"across_nodes": "sharded", "overlap": True}, "ValueError", "overlap=True"),
        ({"across_nodes": "all"}, "ValueError", "Invalid across_nodes"),
        (
            {"across_nodes": "replicated", "reduction": "daemon"},
            "ValueError",
            'reduction="daemon" sums the ranks of one node',
        ),
        ({"across_nodes": "replicated", "partition": "local"}, "UnimplementedError", '"sharded"'),
    ],
)
def test_what_several_nodes_exclude(kwargs, kind, text, nodes, job):
    for found in ranks.run(_refused, 2, [each.shm for each in nodes], job, kwargs):
        assert found is not None and found[0] == kind and text in found[1]


def _last_node(connection, rank, endpoint, job, kwargs):
    os.environ["OPTSTATE_NODE"] = "node0"
    model = small_model()
    kwargs = {"lr": 0.01, "across_nodes": "replicated", **kwargs}
    optimizer = optstate.AdamW(model.named_parameters(), job=job, endpoint=endpoint, **kwargs)
    found = optimizer.committed_step
    loss_of(model, 0).backward()
    optimizer.step()
    return found, optimizer.committed_step


@pytest.mark.parametrize("kwargs", [{}, {"max_norm": 0.1}])
def test_the_last_node_goes_on_alone(kwargs, nodes, job):
    """With the step that was prepared, which waits for no norm of other jobs."""
    endpoints = [each.shm for each in nodes]
    with ranks.running(
        train, 2, endpoints, 1, job, "plain", kwargs, on_nodes.stops_when_prepared
    ) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        running.kill(0, 1)
    [found] = ranks.run(_last_node, 1, endpoints[0], job, kwargs)
    assert found == (3, 4)


def test_nodes_that_begin_with_other_parameters(nodes, job):
    endpoints = [each.shm for each in nodes]
    kwargs = {"across_nodes": "replicated"}
    for kind, text in ranks.run(_refused, 2, endpoints, job, kwargs, 1):
        assert kind == "ValueError" and "has other values on other ranks" in text
