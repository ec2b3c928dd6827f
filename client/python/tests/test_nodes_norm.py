"""A prepared step that is clipped by a norm of all nodes, on each wire: two sessions, each with one
of two parameters, take what one session with both takes."""

from __future__ import annotations

import array
import ctypes
import math

import pytest
import torch
from daemon import Daemon
from optstate import _native, errors
from optstate._torch.nodes.resolution import Verdict
from optstate._torch.optimizer_info import infos
from optstate.job_position import NodesNorm, find_position, noted_digest
from optstate.session import Session, StepOutcome
from optstate.session_spec import ParameterSpec, SessionSpec

FLOAT32 = 1
ADAMW = (1e-3, 0.9, 0.999, 1e-8, 0.01)
SIZES = {"a": 5000, "b": 77}
MAX_NORM = 0.5


def open_session(endpoint: str, job: str, values: dict[str, torch.Tensor], **how: bool) -> Session:
    session = Session.open(
        SessionSpec(
            job=job,
            optimizer=infos()["adam"].kind,
            group_options=[0],
            parameters=[
                ParameterSpec(name, tuple(each.shape), each.numel(), FLOAT32, FLOAT32, 0)
                for name, each in values.items()
            ],
            endpoint=endpoint,
            **how,
        )
    )
    session.begin_load()
    for index, each in enumerate(values.values()):
        session.load(_native.MASTER, index, FLOAT32, each.data_ptr())
    session.finish_load()
    return session


def commit(session: Session, gradients: list[torch.Tensor], **how: float) -> StepOutcome:
    groups = _native.array_of(_native.Hyperparams, 1)
    groups[0].value[: len(ADAMW)] = ADAMW
    step = session.committed_step + 1
    addresses = array.array("Q", [each.data_ptr() for each in gradients])
    session.push_gradients(step, 0, array.array("I", range(len(gradients))), addresses)
    return session.commit(step, groups, **how)


def sums_of(session: Session, count: int) -> list[float]:
    sums = (ctypes.c_double * count)()
    begin = ctypes.addressof(sums)
    session.fetch_many(
        array.array("i", [_native.PREPARED_SUM]) * count,
        array.array("I", range(count)),
        array.array("Q", range(begin, begin + 8 * count, 8)),
    )
    return list(sums)


def master(session: Session, index: int, numel: int) -> torch.Tensor:
    values = torch.empty(numel)
    session.fetch(_native.MASTER, index, values.data_ptr(), values.nbytes)
    return values


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_nodes_with_parts_of_the_parameters_clip_as_one_node_does(
    daemon: Daemon, job: str, wire: str
) -> None:
    endpoint = getattr(daemon, wire)
    values = {name: torch.randn(numel) for name, numel in SIZES.items()}
    whole = open_session(endpoint, job, values)
    parts = {
        name: open_session(endpoint, f"{job}-{name}", {name: each}, two_phase=True)
        for name, each in values.items()
    }
    for _ in range(3):
        gradients = {name: torch.randn(numel) for name, numel in SIZES.items()}
        expected = commit(whole, list(gradients.values()), max_norm=MAX_NORM, grad_scale=3.0)
        assert expected.clip_coefficient < 1
        prepared = {
            name: commit(part, [gradients[name]], grad_scale=3.0) for name, part in parts.items()
        }
        # The sums of all nodes, in the order of the parameters, give the bits of one node.
        total = sum(sum(sums_of(part, 1)) for part in parts.values())
        norm = math.sqrt(total) / 3.0
        assert norm == expected.gradient_norm
        found = NodesNorm(norm, min(1.0, MAX_NORM / (norm + 1e-6)))
        for name, part in parts.items():
            step, digest = prepared[name].step, prepared[name].digest
            clipped = part.decide(step, digest, Verdict.CLIP, found)
            assert part.decide(step, digest, Verdict.CLIP, found) == clipped and clipped.prepared
            assert clipped.digest == noted_digest(digest, found) != digest
            assert noted_digest(clipped.digest, found) == digest
            position = find_position(
                SessionSpec(
                    job=f"{job}-{name}",
                    optimizer=0,
                    group_options=(),
                    parameters=(),
                    endpoint=endpoint,
                )
            )
            assert position.prepared_is_clipped
            assert position.prepared_gradient_norm == norm
            assert position.prepared_clip_coefficient == found.clip_coefficient
            with pytest.raises(errors.FailedPreconditionError, match="norm of all nodes already"):
                part.decide(step, digest, Verdict.ABORT)
            outcome = part.decide(step, clipped.digest, Verdict.COMMIT)
            assert outcome.gradient_norm == expected.gradient_norm
            assert outcome.clip_coefficient == expected.clip_coefficient
            assert part.decide(step, clipped.digest, Verdict.COMMIT) == outcome
        for index, (name, part) in enumerate(parts.items()):
            assert torch.equal(master(part, 0, SIZES[name]), master(whole, index, SIZES[name]))
    for session in (whole, *parts.values()):
        session.close()


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_a_norm_that_cannot_be_is_refused_and_the_step_stays_prepared(
    daemon: Daemon, job: str, wire: str
) -> None:
    session = open_session(
        getattr(daemon, wire), job, {"a": torch.randn(SIZES["a"])}, two_phase=True
    )
    with pytest.raises(errors.FailedPreconditionError, match="prepared"):
        sums_of(session, 1)
    outcome = commit(session, [torch.randn(SIZES["a"])])
    for norm in (NodesNorm(-1.0, 1.0), NodesNorm(math.nan, 1.0), NodesNorm(1.0, 0.0)):
        with pytest.raises(ValueError, match="clip_coefficient"):
            session.decide(outcome.step, outcome.digest, Verdict.CLIP, norm)
    assert session.decide(outcome.step, outcome.digest, Verdict.ABORT).step == 0
    # It is committed only with the norm that it awaits.
    outcome = commit(session, [torch.randn(SIZES["a"])], awaits_norm=True)
    with pytest.raises(errors.FailedPreconditionError, match="bring the norm first"):
        session.decide(outcome.step, outcome.digest, Verdict.COMMIT)
    assert session.decide(outcome.step, outcome.digest, Verdict.ABORT).step == 0
    with pytest.raises(ValueError, match="awaits_norm"):
        commit(session, [torch.randn(SIZES["a"])], awaits_norm=True, max_norm=MAX_NORM)
    # Clipped by the node itself, with a norm of its own gradients alone.
    outcome = commit(session, [torch.randn(SIZES["a"])], max_norm=MAX_NORM)
    with pytest.raises(errors.FailedPreconditionError, match="max_norm"):
        session.decide(outcome.step, outcome.digest, Verdict.CLIP, NodesNorm(1.0, 0.5))
    assert session.decide(outcome.step, outcome.digest, Verdict.COMMIT).applied
    session.close()
