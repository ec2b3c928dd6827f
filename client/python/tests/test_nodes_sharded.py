"""Shards over several nodes, each with a daemon of its own, on one machine: FSDP2 and meshes."""

from __future__ import annotations

import copy
import os
import signal

import nodes as on_nodes
import optstate
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from optstate._torch.nodes.resolution import Verdict
from optstate._torch.optimizer_info import WHOLE_PARAMETER_OPTIMIZERS
from sharded import assert_close, assert_states_close, wholes
from training import bits

STEPS = 5
nodes = on_nodes.nodes


def _make(rank, endpoints, per_node, job, kind=optstate.AdamW, mesh=None, seed=0, **kwargs):
    """Returns a sharded model and its optimizer, of one node when there is one endpoint."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    model = sharded.fsdp(sharded.make_model(seed), mesh)
    kwargs = {"lr": 0.01, "across_nodes": "sharded", **kwargs}
    return model, kind(model.parameters(), model=model, endpoint=endpoint, job=job, **kwargs)


def _train(
    connection, rank, endpoints, per_node, job, case="plain", kwargs=None, pause=None, until=STEPS
):
    """Trains to a step; returns bits of everything."""
    kind = getattr(optstate, case if case[0].isupper() else "AdamW")
    model, optimizer = _make(rank, endpoints, per_node, job, kind, **(kwargs or {}))
    if pause is not None:
        pause(connection, rank, optimizer)
    outcomes = []
    world = dist.get_world_size()
    for step in range(optimizer.committed_step, until):
        for micro_step in range(2 if case == "accumulate" else 1):
            if micro_step:
                optimizer.accumulate_step()
            optimizer.zero_grad()
            sharded.loss_of(model, 100 * step + 10 * micro_step + rank).backward()
        if case == "inf" and step in (1, 3) and rank == world - 2:  # the last one may have no row
            model[0].weight.grad.to_local()[0, 0] = float("inf")
        if case == "scaler" and step == 2:
            optimizer.grad_scale = torch.tensor(4.0)
            optimizer.found_inf = torch.tensor(float(rank == 0))
        if case == "missing" and step != 2:
            model[3].bias.grad = None
        if case == "clipped before":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        for name in ("grad_scale", "found_inf"):  # as a GradScaler does
            optimizer._served.__dict__.pop(name, None)
        outcomes.append((optimizer.last_outcome.gradient_norm, optimizer.last_outcome.applied))
    state = [value for entry in sharded.whole_state(optimizer) for value in entry.values()]
    result = (bits(wholes(model)), bits(state), outcomes, optimizer.committed_step)
    optimizer.close()
    return result


def _same(results, expected):
    """Bits of parameters and of state are equal, and norms nearly so."""
    for each in results:
        assert repr(each[:2]) == repr(expected[:2])
        assert each[3] == expected[3] == STEPS
        taken = expected[2][-len(each[2]) :] if each[2] else []
        for (norm, applied), (expected_norm, expected_applied) in zip(each[2], taken):
            assert applied == expected_applied
            assert norm == pytest.approx(expected_norm, rel=1e-12, nan_ok=True)
        assert repr(each) == repr(results[0])
    return results[0]


CLIPPED = {"max_norm": 0.05}
CASES = {
    "plain": {},
    "clipped": CLIPPED,
    "clipped before": {},
    "max_value": {"max_value": 1e-3},
    "norm_type": {"norm_type": 1.0},
    "inf": {"max_norm": 0.05},
    "scaler": {"fused": True, "max_norm": 0.05},
    "accumulate": {"accumulate": True, "max_norm": 0.05},
    "missing": {"max_norm": 0.05},
    "SGD": {"momentum": 0.9, "max_norm": 0.05},
    "Lion": {},
    "RMSprop": {"centered": True},
}


ON_FOUR = ("plain", "clipped", "inf", "accumulate", "missing")


# Rows of the first parameter, of 7, that the ranks have.
ROWS = {2: ["2", "2", "2", "1"], 4: ["1", "1", "1", "1", "1", "1", "1", "0"]}


@pytest.mark.parametrize(
    ("case", "nodes"),
    [*((case, 2) for case in CASES), *((case, 4) for case in ON_FOUR)],
    indirect=["nodes"],
)
def test_the_bits_of_one_node_with_all_ranks(case, nodes, daemon, job):
    kwargs, world = CASES[case], 2 * len(nodes)
    one = ranks.run(_train, world, [daemon.shm], world, job, case, kwargs)
    several = on_nodes.run_on(nodes, _train, job, case, kwargs)
    _same(several, one[0])
    if "max_norm" in kwargs:  # the sums of all nodes are added in the order of one node
        assert repr(several[0][2]) == repr(one[0][2])
    if case in ("inf", "scaler"):
        skipped = [applied for _, applied in several[0][2]].count(False)
        assert skipped == (2 if case == "inf" else 1)
    assert [each.jobs() for each in nodes] == [[job]] * len(nodes)
    for number, each in enumerate(nodes):
        rows = [p["shape"][0] for p in each.parameters(job) if p["name"].startswith("0.weight")]
        assert rows == ROWS[len(nodes)][2 * number :][:2]


@pytest.mark.parametrize("nodes", [4], indirect=True)
def test_every_optimizer_has_the_bits_of_one_node(nodes, daemon, job):
    """But those that need whole parameters, which are refused."""
    kinds = [name for name in on_nodes.OPTIMIZERS if name.lower() not in WHOLE_PARAMETER_OPTIMIZERS]
    on_nodes.assert_each_has_the_bits_of_one_node(_train, kinds, CLIPPED, nodes, daemon, job)


@pytest.mark.parametrize("wire", ["grpc_unix", "grpc_tcp"])
def test_over_grpc(wire, nodes, daemon, job):
    one = ranks.run(_train, 2, [daemon.shm], 2, job, "clipped", CLIPPED)
    two = ranks.run(_train, 2, [getattr(each, wire) for each in nodes], 1, job, "clipped", CLIPPED)
    _same(two, one[0])


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_other_norms_clip_all_nodes_alike(norm_type, nodes, job):
    """Their last bits may depend on the number of nodes."""
    kwargs = {"max_norm": 0.05, "norm_type": norm_type}
    endpoints = [each.shm for each in nodes]
    clipped = ranks.run(_train, 2, endpoints, 1, job, "plain", kwargs)
    assert repr(clipped[0]) == repr(clipped[1])
    kwargs = {"norm_type": norm_type}
    plain = ranks.run(_train, 2, endpoints, 1, f"{job}-plain", "plain", kwargs)
    assert clipped[0][2][0] == plain[0][2][0] and clipped[0][2][0][0] > 0.05
    assert clipped[0][0] != plain[0][0]


def _beside_torch(connection, rank, endpoints, job):
    """A node a rank, beside torch's class on the same shards."""
    model, optimizer = _make(rank, endpoints, 1, job)
    other = sharded.fsdp(sharded.make_model())
    reference = torch.optim.AdamW(other.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        for each, of in ((model, optimizer), (other, reference)):
            of.zero_grad()
            loss = sharded.loss_of(each, 2 * step + rank)
            loss.backward()
            losses.append(loss.item())
        if step == 3:
            norm = torch.nn.utils.clip_grad_norm_(other.parameters(), torch.inf).full_tensor()
            norms = [sharded.whole(each.grad).norm() for each in other.parameters()]
        for of in (optimizer, reference):
            of.step()
        if step == 3:
            assert optimizer.last_outcome.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
            found = optimizer.gradient_norms()
            names = [name for name, _ in model.named_parameters()]
            assert found == pytest.approx(dict(zip(names, map(float, norms))), rel=1e-5)
    assert losses[::2] == pytest.approx(losses[1::2], rel=1e-5)
    assert_close(wholes(model), wholes(other))
    assert_states_close(sharded.whole_state(optimizer), sharded.whole_state(reference))
    # A write in place by one node's rank reaches its job, and the others go on.
    for each, of in ((model, optimizer), (other, reference)):
        with torch.no_grad():
            if rank == 1:
                each[0].weight.to_local().mul_(0.5)
        sharded.train(each, of, [6])
        if rank == 0:
            of.state[each[0].weight]["exp_avg"].to_local().mul_(3)
        sharded.train(each, of, [7])
    assert_close(wholes(model), wholes(other))
    assert_states_close(sharded.whole_state(optimizer), sharded.whole_state(reference))
    saved = copy.deepcopy(optimizer.state_dict())
    values = [each.detach().clone() for each in model.parameters()]
    sharded.train(model, optimizer, [8])
    then = bits(wholes(model))
    with torch.no_grad():
        for each, value in zip(model.parameters(), values):
            each.copy_(value)
    optimizer.load_state_dict(saved)
    sharded.train(model, optimizer, [8])
    assert bits(wholes(model)) == then
    step = optimizer.committed_step
    optimizer.close()
    model, optimizer = _make(rank, endpoints, 1, job, seed=5)
    assert optimizer.committed_step == step and bits(wholes(model)) == then


def test_it_trains_as_torch_does(nodes, job):
    ranks.run(_beside_torch, 2, [each.shm for each in nodes], job)


# Where ranks are stopped, for the test to kill what it wants to.


def _kill_nothing(nodes, job):
    pass


def _kill_engine(nodes, job):
    os.kill(on_nodes.engine(nodes[1], job), signal.SIGKILL)


def _kill_supervisor(nodes, job):
    nodes[1].kill()
    nodes[1].start()


@pytest.mark.parametrize(
    ("where", "kill", "wire", "resumed_at"),
    [
        # No node has noted the norm of all gradients: the step is dropped.
        (on_nodes.stops_when_prepared, _kill_nothing, "shm", 2),
        (on_nodes.stops_when_prepared, _kill_engine, "shm", 2),
        (on_nodes.stops_when_prepared, _kill_supervisor, "grpc_unix", 2),
        (on_nodes.stops_before_deciding, _kill_nothing, "shm", 3),
        (on_nodes.stops_before_deciding, _kill_engine, "grpc_unix", 3),
        (on_nodes.stops_before_deciding, _kill_supervisor, "shm", 3),
        (on_nodes.stops_when_noted, _kill_nothing, "grpc_unix", 3),
        (on_nodes.stops_when_noted, _kill_engine, "shm", 3),
        (on_nodes.stops_before_committing, _kill_nothing, "shm", 3),
        (on_nodes.stops_before_committing, _kill_engine, "shm", 3),
        (on_nodes.stops_before_preparing, _kill_nothing, "shm", 2),
        (on_nodes.stops_before_preparing, _kill_engine, "shm", 2),
    ],
)
def test_ranks_that_are_killed_within_a_step(where, kill, wire, resumed_at, nodes, daemon, job):
    """All nodes end at one step, with the bits of a training that nobody disturbed."""
    endpoints = [getattr(each, wire) for each in nodes]
    expected = ranks.run(_train, 2, [daemon.shm], 2, job, "clipped", CLIPPED)[0]
    with ranks.running(_train, 2, endpoints, 1, job, "clipped", CLIPPED, where) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        kill(nodes, job)
        running.kill(0, 1)
    says = on_nodes.says_step
    with ranks.running(_train, 2, endpoints, 1, job, "clipped", CLIPPED, says) as running:
        assert [running.hear(rank) for rank in range(2)] == [resumed_at] * 2
        again = running.results()
    assert len(_same(again, expected)[2]) == STEPS - resumed_at


@pytest.mark.parametrize(
    "where",
    [
        on_nodes.stops_before_deciding,
        on_nodes.stops_when_noted,
        on_nodes.stops_before_committing,
    ],
)
def test_an_engine_killed_while_its_ranks_live_is_a_delay(where, nodes, daemon, job):
    expected = ranks.run(_train, 2, [daemon.shm], 2, job, "clipped", CLIPPED)[0]
    endpoints = [each.shm for each in nodes]
    with ranks.running(_train, 2, endpoints, 1, job, "clipped", CLIPPED, where) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        _kill_engine(nodes, job)
        for connection in running.connections:
            connection.send("go on")
        _same(running.results(), expected)


def test_an_engine_killed_before_the_norm_is_noted_ends_the_step(nodes, daemon, job):
    """Its sums of squares are gone; the next ranks drop the step, and take it again."""
    expected = ranks.run(_train, 2, [daemon.shm], 2, job, "clipped", CLIPPED)[0]
    endpoints, where = [each.shm for each in nodes], on_nodes.stops_when_prepared
    with ranks.running(_train, 2, endpoints, 1, job, "clipped", CLIPPED, where) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        _kill_engine(nodes, job)
        for connection in running.connections:
            connection.send("go on")
        with pytest.raises(ranks.RankFailed, match="UnavailableError"):
            running.results()
    again = ranks.run(_train, 2, endpoints, 1, job, "clipped", CLIPPED)
    assert len(_same(again, expected)[2]) == STEPS - 2


def _fails_once(connection, rank, endpoints, job):
    """A rank cannot prepare a step; then options differ; then all is well, with other gradients."""
    model, optimizer = _make(rank, endpoints, 1, job)
    session = optimizer._served.attachment.session
    commit, said = session.commit, []

    def failing(step, *rest, **options):
        session.commit = commit
        raise optstate.errors.InternalError("made up")

    for step in range(4):
        optimizer.zero_grad()
        sharded.loss_of(model, 100 * step + rank).backward()
        if step == 1 and rank == 1:
            session.commit = failing
        optimizer.param_groups[0]["lr"] = 0.02 if step == 2 and rank == 1 else 0.01
        try:
            optimizer.step()
        except optstate.OptstateError as error:
            said.append((step, str(error)))
    assert optimizer.committed_step == 2
    other = sharded.fsdp(sharded.make_model())
    reference = torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in (0, 3):
        reference.zero_grad()
        sharded.loss_of(other, 100 * step + rank).backward()
        reference.step()
    assert_close(wholes(model), wholes(other))
    return said


def test_a_step_that_one_node_cannot_prepare_is_taken_on_none(nodes, job):
    for said in ranks.run(_fails_once, 2, [each.shm for each in nodes], job):
        assert [step for step, _ in said] == [1, 2]
        assert "made up" in said[0][1]
        assert "node0: step 2, digest" in said[1][1] and "equal options" in said[1][1]


def _undecided(connection, rank, endpoints, job, fails_to):
    """A rank that did not learn the verdict takes no other step: nor does any other."""
    model, optimizer = _make(rank, endpoints, 1, job, max_norm=0.05)
    session = optimizer._served.attachment.session
    decide, said = session.decide, []

    def failing(step, digest, verdict, *norm):
        if verdict is fails_to:
            raise optstate.errors.InternalError("made up")
        return decide(step, digest, verdict, *norm)

    for step in range(3):
        optimizer.zero_grad()
        sharded.loss_of(model, 100 * step + rank).backward()
        session.decide = failing if step == 1 and rank == 1 else decide
        try:
            optimizer.step()
        except optstate.OptstateError as error:
            said.append(str(error))
    steps = [session.committed_step]
    optimizer.close()
    model, optimizer = _make(rank, endpoints, 1, job, max_norm=0.05)
    steps.append(optimizer.committed_step)
    sharded.train(model, optimizer, [7])
    return said, steps


@pytest.mark.parametrize("fails_to", [Verdict.COMMIT, Verdict.CLIP])
def test_a_verdict_that_was_not_brought(fails_to, nodes, job):
    endpoints = [each.shm for each in nodes]
    (first, second), (other, again) = ranks.run(_undecided, 2, endpoints, job, fails_to)
    assert other[0] == "made up" and len(other) == 2
    # Settled as it was decided.
    assert again == [1, 2]
    if fails_to is Verdict.COMMIT:
        assert second == [2, 2]
        assert len(first) == 1 and "rank 1" in first[0]
    else:
        assert second == [1, 2]
        assert len(first) == 2 and "the daemon of rank 1 has not noted the norm" in first[0]


def _refused(connection, rank, endpoints, per_node, job, kwargs, how):
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    if "node_names" in how:
        os.environ["OPTSTATE_NODE"] = how["node_names"][rank]
        endpoint = endpoints[how["places"][rank]]
    steps = how.get("steps", 0)
    model = sharded.make_model() if how.get("plain") else sharded.fsdp(sharded.make_model())
    try:
        optimizer = optstate.AdamW(
            model.parameters(), lr=0.01, model=model, job=job, endpoint=endpoint, **kwargs
        )
        for step in range(steps):
            optimizer.zero_grad()
            sharded.loss_of(model, 10 * step + rank).backward()
            if how.get("group"):
                optimizer.param_groups[0]["max_norm"] = 1.0
            optimizer.step()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("kwargs", "how", "kind", "text"),
    [
        ({}, {}, "UnimplementedError", '"sharded" when each node'),
        ({"across_nodes": "replicated"}, {}, "UnimplementedError", 'across_nodes="sharded"'),
        ({}, {"steps": 1, "group": True}, "UnimplementedError", "clip_grad_norm_"),
        ({"reduction": "daemon"}, {}, "ValueError", "sums the ranks of one node"),
        ({"speculative": True}, {}, "ValueError", "speculative"),
    ],
)
def test_what_shards_on_several_nodes_exclude(kwargs, how, kind, text, nodes, job):
    if how or kwargs and "across_nodes" not in kwargs:
        kwargs = {"across_nodes": "sharded", **kwargs}
    endpoints = [each.shm for each in nodes]
    for found in ranks.run(_refused, 2, endpoints, 1, job, kwargs, how):
        assert found is not None and found[0] == kind and text in found[1]


def test_jobs_of_other_runs_are_not_mixed(nodes, job):
    """Two runs of one name are at the same step, and their parts would fit together."""
    more = [on_nodes.Daemon(), on_nodes.Daemon()]
    kwargs, trains = {"across_nodes": "sharded"}, {"steps": 2}
    try:
        for group in (nodes, more):
            endpoints = [each.shm for each in group]
            assert ranks.run(_refused, 2, endpoints, 1, job, kwargs, trains) == [None, None]
        mixed = [nodes[0].shm, more[1].shm]
        for found in ranks.run(_refused, 2, mixed, 1, job, kwargs, {}):
            assert found[0] == "FailedPreconditionError"
            assert "node0: part 1 of 2 of run" in found[1] and "node1: part 2 of 2" in found[1]
        [found] = ranks.run(_refused, 1, [nodes[0].shm], 1, job, kwargs, {})
        assert found[0] == "FailedPreconditionError" and "part 1 of 2" in found[1]
        assert "those of part 2 have no ranks here" in found[1]
        assert "at step 2" in found[1] and "go on from step 2" in found[1]
        # Nodes of one run that change places go on; see test_nodes_moves.py.
        for places in ([nodes[1], nodes[0]], nodes):
            endpoints = [each.shm for each in places]
            assert ranks.run(_refused, 2, endpoints, 1, job, kwargs, {}) == [None] * 2
        nodes[1].run_optctl("delete", "job", job)
        for found in ranks.run(_refused, 2, [e.shm for e in nodes], 1, job, kwargs, {}):
            assert found[0] == "FailedPreconditionError"
            assert "node0: part 1 of 2" in found[1] and "at step 2" in found[1]
            assert "node1: no such job" in found[1]
    finally:
        for each in more:
            each.stop()
