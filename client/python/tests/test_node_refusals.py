"""Nodes that cannot be one job: an older daemon, other layouts, other steps. Nothing is lost."""

from __future__ import annotations

import array
import os
from typing import Any

import optstate
import pytest
import ranks
import sharded
import torch
from daemon import Daemon
from older_daemon import LACKS, OlderDaemon
from optstate import _native
from optstate._torch.nodes.resolution import Verdict
from optstate._torch.optimizer_info import infos
from optstate.job_position import NodesNorm, bring_verdict
from optstate.session import Session
from optstate.session_spec import ParameterSpec, SessionSpec
from training import bits, loss_of, small_model

NUMEL = 1000


@pytest.fixture
def nodes():
    daemons = [Daemon(), Daemon()]
    yield daemons
    for each in daemons:
        each.stop()


@pytest.fixture(params=LACKS)
def older(nodes, tmp_path, request):
    """Stands before the second node's daemon."""
    made = OlderDaemon(tmp_path / "older.sock", nodes[1].socket, request.param)
    yield made
    made.close()


def _endpoints(nodes):
    return [each.shm for each in nodes]


def _make(rank, endpoints, job, model, kind=optstate.AdamW, **kwargs):
    os.environ["OPTSTATE_NODE"] = f"node{rank}"
    kwargs = {"lr": 0.01, "across_nodes": "replicated", **kwargs}
    return kind(model.named_parameters(), job=job, endpoint=endpoints[rank], **kwargs)


def _train(connection, rank, endpoints, job, until, pause_at=None):
    """Returns where it began, what was raised, and the parameters."""
    model = small_model()
    try:
        optimizer = _make(rank, endpoints, job, model)
        begun = optimizer.committed_step
        for step in range(begun, until):
            if step == pause_at:
                ranks.say(connection, "paused")
                connection.recv()
            optimizer.zero_grad()
            loss_of(model, step).backward()  # of equal data: there is nothing to average
            optimizer.step()
    except optstate.OptstateError as error:
        return type(error).__name__, str(error)
    return begun, bits(model.parameters())


def _alone(until):
    model = small_model()
    optimizer = optstate.AdamW(model.named_parameters(), lr=0.01)
    for step in range(until):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return bits(model.parameters())


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_a_daemon_that_does_not_know_two_phases(wire, nodes, older, job):
    good = _endpoints(nodes)
    ranks.run(_train, 2, good, job, 2)
    mixed = [good[0], getattr(older, wire)]
    for kind, text in ranks.run(_train, 2, mixed, job, 4):
        assert kind == "UnimplementedError"
        assert "does not know steps of two phases" in text and "optctl upgrade" in text
    assert ranks.run(_train, 2, good, job, 4) == [(2, _alone(4))] * 2


def test_a_new_job_and_an_older_daemon(nodes, older, job):
    for kind, text in ranks.run(_train, 2, [nodes[0].shm, older.shm], job, 2):
        assert kind == "UnimplementedError" and "optctl upgrade" in text
    assert ranks.run(_train, 2, _endpoints(nodes), job, 2) == [(0, _alone(2))] * 2


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_a_daemon_that_is_put_back_to_an_earlier_build_while_ranks_train(wire, nodes, older, job):
    older.is_older = False
    endpoints = [nodes[0].shm, getattr(older, wire)]
    with ranks.running(_train, 2, endpoints, job, 4, 2) as running:
        for rank in range(2):
            assert running.hear(rank) == "paused"
        older.is_older = True
        older.cut()
        for connection in running.connections:
            connection.send("go on")
        for kind, text in running.results():
            assert kind == "UnimplementedError" and "optctl upgrade" in text
    assert ranks.run(_train, 2, _endpoints(nodes), job, 4) == [(2, _alone(4))] * 2


class _Renamed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()


class _WithAnEmptyGroup:
    def named_parameters(self):
        named = dict(small_model().named_parameters())
        return [
            {"params": list(named.values()), "param_names": list(named)},
            {"params": [], "param_names": []},
        ]


def _other(connection, rank, endpoints, job, what, across_nodes="replicated", fsdp=False):
    """Makes rank 1 another one; returns what is raised."""
    model: Any = small_model()
    kind, kwargs = optstate.AdamW, {"across_nodes": across_nodes}
    if fsdp:
        sharded.fsdp(model)
    if rank == 1:
        if what == "names":
            model = _Renamed()
        elif what == "shapes":
            model[3] = torch.nn.Linear(16, 5)
        elif what == "count":
            model[3] = torch.nn.Linear(16, 4, bias=False)
        elif what == "optimizer":
            kind = optstate.Lion
        elif what == "options":
            kwargs["amsgrad"] = True
        elif what == "state":
            kwargs["state_dtype"] = "dynamic8"
        elif what == "scaler":
            kwargs["loss_scaler"] = optstate.LossScaler()
        elif what == "groups":
            model = _WithAnEmptyGroup()
        elif what == "job":
            job = f"{job}-other"
    try:
        _make(rank, endpoints, job, model, kind, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("names", ['parameter 0: "0.weight"', ' "inner.0.weight" of shape']),
        ("shapes", ['parameter 4: "3.weight" of shape (4, 16)', '"3.weight" of shape (5, 16)']),
        ("count", ["the number of parameters: 6 on rank 0", "5 on rank 1"]),
        ("optimizer", ["the optimizer: adamw on rank 0", "lion on rank 1"]),
        ("options", ["the options of group 0: no amsgrad on rank 0", ", amsgrad on rank 1"]),
        ("state", ["state_dtype: 'float32' on rank 0", "'dynamic8' on rank 1"]),
        ("groups", ["the number of groups: 1 on rank 0", "2 on rank 1"]),
    ],
)
def test_ranks_of_another_layout_are_named(what, texts, nodes, job):
    for found in ranks.run(_other, 2, _endpoints(nodes), job, what):
        assert found is not None and found[0] == "FailedPreconditionError"
        assert "rank 0 (node0)" in found[1] and "rank 1 (node1)" in found[1]
        assert all(text in found[1] for text in texts), found[1]
    assert [each.jobs() for each in nodes] == [[], []]


@pytest.mark.parametrize("fsdp", [False, True], ids=["zero", "fsdp2"])
@pytest.mark.parametrize("is_named", [False, True], ids=["private", "named"])
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("optimizer", "the optimizer: adamw on rank 0"),
        ("options", "the options of group 0: "),
        ("state", "state_dtype: 'float32' on rank 0"),
        ("scaler", "loss_scaler: None on rank 0"),
    ],
)
def test_shards_of_other_optimizers_are_named(what, text, is_named, fsdp, nodes, job):
    """Their digests cannot be compared, so nothing but this would tell them apart."""
    name = job if is_named else None
    for found in ranks.run(_other, 2, _endpoints(nodes), name, what, "sharded", fsdp):
        assert found is not None and found[0] == "FailedPreconditionError"
        assert text in found[1] and "rank 1 (node1)" in found[1]
    assert [each.jobs() for each in nodes] == [[], []]


def test_a_rank_of_another_job_is_named(nodes, job):
    for found in ranks.run(_other, 2, _endpoints(nodes), job, "job"):
        assert found is not None and found[0] == "ValueError"
        assert f'rank 1 asks for job "{job}-other"' in found[1]
    assert [each.jobs() for each in nodes] == [[], []]


def _uneven(connection, rank, endpoints, job):
    try:
        _make(min(rank, 1), endpoints, job, small_model())
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_nodes_of_unequally_many_ranks(nodes, job):
    for found in ranks.run(_uneven, 3, _endpoints(nodes), job):
        assert found is not None and found[0] == "ValueError"
        assert "node0: 1, node1: 2" in found[1]


def test_a_node_that_went_on_alone(nodes, job):
    endpoints = _endpoints(nodes)
    ranks.run(_train, 2, endpoints, job, 2)
    [(begun, _)] = ranks.run(_train, 1, endpoints, job, 4)
    assert begun == 2
    for kind, text in ranks.run(_train, 2, endpoints, job, 5):
        assert kind == "FailedPreconditionError"
        assert "node0: step 4" in text and "node1: step 2" in text
        assert "node0 has taken more steps than the others" in text
        assert 'stale_nodes="replace"' in text and "on node1 alone" in text
        assert "all nodes had step 2, and the last one was 4" in text
    # Each node's state is untouched.
    assert ranks.run(_train, 1, endpoints, job, 4) == [(4, _alone(4))]


class _Raw:
    """One rank of a node, without torch's interface."""

    def __init__(self, endpoint: str, job: str) -> None:
        self.spec = SessionSpec(
            job=job,
            optimizer=infos()["adam"].kind,
            group_options=[0],
            parameters=[ParameterSpec("weight", (NUMEL,), NUMEL, 1, 1, 0)],
            endpoint=endpoint,
            two_phase=True,
        )
        self._values = torch.ones(NUMEL)
        self._groups = _native.array_of(_native.Hyperparams, 1)
        self._groups[0].value[:5] = (1e-3, 0.9, 0.999, 1e-8, 0.01)
        self.session = Session.open(self.spec)
        self.session.begin_load()
        self.session.load(_native.MASTER, 0, 1, self._values.data_ptr())
        self.session.finish_load()

    def prepare(self):
        addresses = array.array("Q", [self._values.data_ptr()])
        self.session.push_gradients(1, 0, array.array("I", [0]), addresses)
        return self.session.commit(1, self._groups)


def test_a_decision_about_another_step(own_daemon, job):
    node = _Raw(own_daemon.shm, job)
    prepared = node.prepare()
    assert prepared.prepared and node.session.committed_step == 0
    other = prepared.digest ^ 1
    for verdict in Verdict:
        with pytest.raises(
            optstate.FailedPreconditionError, match=f"{prepared.digest:016x}.*{other:016x}"
        ):
            norm = NodesNorm(1.0, 1.0) if verdict is Verdict.CLIP else None
            node.session.decide(1, other, verdict, norm)
    with pytest.raises(optstate.FailedPreconditionError, match="step 2 .* is not prepared here"):
        node.session.decide(2, prepared.digest, Verdict.COMMIT)
    with pytest.raises(optstate.UnavailableError, match="ranks are attached .* end them first"):
        bring_verdict(node.spec, 1, prepared.digest, Verdict.COMMIT)
    assert node.session.decide(1, prepared.digest, Verdict.COMMIT).applied
    assert node.session.committed_step == 1
    # A verdict that is repeated changes nothing; the opposite one is refused.
    assert node.session.decide(1, prepared.digest, Verdict.COMMIT).step == 1
    with pytest.raises(optstate.FailedPreconditionError, match="was applied here"):
        node.session.decide(1, prepared.digest, Verdict.ABORT)
    with pytest.raises(optstate.FailedPreconditionError, match="was committed here as"):
        node.session.decide(1, other, Verdict.COMMIT)
    node.session.close()


@pytest.mark.parametrize("across", ["replicated", "sharded"])
def test_a_daemon_that_is_not_there_is_said_to_be_its_nodes(across, nodes, job):
    """In words about the job that the user has named."""
    nodes[1].kill()
    kwargs = {"across_nodes": across, "connect_timeout": 0.5}
    for kind, text in ranks.run(_without_daemon, 2, _endpoints(nodes), job, kwargs):
        assert kind == "UnavailableError"
        assert "the daemon of node1" in text and f'job "{job}"' in text
        assert "optstate-copy" not in text
    assert nodes[0].jobs() == []


def _without_daemon(connection, rank, endpoints, job, kwargs):
    with pytest.raises(optstate.UnavailableError) as raised:
        _make(rank, endpoints, job, small_model(), **kwargs)
    return type(raised.value).__name__, str(raised.value)
