"""A job that takes another one's state over is at its step with the end of a load, however late
that step is."""

from __future__ import annotations

import contextlib
import dataclasses

import optstate
import pytest
import torch
from optstate import _native
from optstate._torch.nodes import copied_state, copy_note
from optstate._torch.nodes.copy_note import CopyNote
from optstate._torch.nodes.moves.new_job import NewJob
from optstate._torch.nodes.new_copy import NewCopy
from optstate._torch.nodes.positions import position_of
from optstate._torch.nodes.resolution import Step
from optstate._torch.optimizer_info import infos
from optstate.session import Session
from optstate.session_spec import LossScalerState, ParameterSpec, SessionSpec

STEP = 1 << 40
SCALER = optstate.LossScaler(init_scale=1024.0, growth_interval=2000, hysteresis=3)
# Two overflows and 1999 good steps after them: more than a test takes.
STATE = LossScalerState(loss_scale=64.0, good_steps=1999, hysteresis_left=1)


def _spec(daemon, job, **kwargs):
    return SessionSpec(
        job=job,
        optimizer=infos()["adamw"].kind,
        group_options=[0],
        parameters=[
            ParameterSpec(name, (numel,), numel, _native.FLOAT32, _native.FLOAT32, 0)
            for name, numel in (("weight", 40), ("bias", 9))
        ],
        endpoint=daemon.shm,
        **kwargs,
    )


def _pieces(spec):
    """Returns pieces of the state, and their values, one after the other."""
    for piece in copied_state.pieces_of(spec):
        yield piece, torch.arange(copied_state.numel_of(piece), dtype=torch.float32)


def _commit(session, step):
    groups = _native.array_of(_native.Hyperparams, 1)
    defaults = infos()["adamw"].defaults
    groups[0].value[: len(defaults)] = defaults
    return session.commit(step, groups)


def test_a_copy(daemon, job):
    spec = _spec(daemon, job, loss_scaler=SCALER)
    copy = NewCopy(spec, CopyNote(STEP, 5, False, 3, ""), copied_state.Numbers([7, 8], (), STATE))
    copy.begin()
    sums = []
    for piece, flat in _pieces(spec):
        sums += copied_state.sums_of(copied_state.split(piece, flat))
        copy.take(piece, flat)
    copy.finish_load(sums)
    while copy.check(within_s=60.0):
        pass
    position = position_of(spec)
    assert position.committed.step == 0 and position.loads_finished == 1
    copy.end()
    found, is_noted = copy_note.position_on_node(spec)
    assert is_noted and found.committed == Step(STEP, 5) and found.loads_finished == 3
    with contextlib.closing(Session.open(spec)) as session:
        assert session.committed_step == STEP
        assert session.loss_scaler_state() == STATE
        assert _commit(session, STEP + 1).loss_scale == 128.0
        assert session.committed_step == STEP + 1
    copy_note.remove_note(spec)


def test_a_job_of_several_ranks(daemon, job):
    spec = _spec(daemon, job, world_size=2)
    made = NewJob(spec)
    made.begin()
    for piece, flat in _pieces(spec):
        made.take(list(zip(piece, copied_state.split(piece, flat))))
    made.finish_load(copied_state.Numbers([7, 8], (), None))
    assert made.committed_step == 0
    made.begin_at(STEP, 1)
    assert made.committed_step == STEP
    made.close()
    position = position_of(spec)
    assert position.committed.step == STEP and position.loads_finished == 1
    assert position.committed.digest == 0 and not position.committed.found_inf


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_what_is_refused(wire, daemon, job):
    spec = dataclasses.replace(_spec(daemon, job), endpoint=getattr(daemon, wire))
    values = torch.zeros(40)
    with contextlib.closing(Session.open(spec)) as session:
        session.begin_load()
        for parameter in range(2):
            session.load(_native.MASTER, parameter, _native.FLOAT32, values.data_ptr())
        for step, loads in ((1 << 63, 1), (STEP, 0)):
            with pytest.raises(optstate.InvalidArgumentError, match="cannot begin at step"):
                session.finish_load_at(step, loads)
        session.finish_load()
        session.begin_load()
        ones = torch.ones(40)
        session.load(_native.MASTER, 0, _native.FLOAT32, ones.data_ptr())
        with pytest.raises(optstate.FailedPreconditionError, match="changes parameters"):
            session.finish_load_at(STEP, 1)
        _commit(session, 1)
        session.begin_load()
        with pytest.raises(optstate.FailedPreconditionError, match="has committed step 1"):
            session.finish_load_at(STEP, 1)
        session.finish_load()
        assert session.committed_step == 1
