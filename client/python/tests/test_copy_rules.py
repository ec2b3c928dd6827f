"""The rules by which a node gets a copy of a job, without a daemon (see test_nodes_copies.py)."""

from __future__ import annotations

import math

import optstate
import pytest
import torch
from optstate._torch.nodes import copied_state, copy_note
from optstate._torch.nodes.copy_note import Copy, CopyNote, meaning_of
from optstate._torch.nodes.resolution import Position, Step
from optstate._torch.optimizer_info import infos
from optstate.job_position import NodesNorm
from optstate.session_spec import LossScalerState, ParameterSpec, SessionSpec

SCALER = optstate.LossScaler(init_scale=1024.0, growth_interval=3, hysteresis=3)
NOTE = CopyNote(
    step=7,
    digest=0xABC,
    found_inf=False,
    loads_finished=2,
    made_at="2026-11-27T01:02:03.000000004Z",
)


def _at(step, *, digest=0, found_inf=True, norm=0.0, loads=2, prepared=None):
    return Position(
        Step(step, digest, found_inf, norm=NodesNorm(norm, 1.0)),
        prepared=prepared,
        loads_finished=loads,
    )


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (None, Copy.NONE),
        (_at(0, found_inf=False, loads=0), Copy.HALF_MADE),
        (_at(0, found_inf=False), Copy.HALF_MADE),
        (_at(6), Copy.HALF_MADE),
        (_at(6, found_inf=False), Copy.HALF_MADE),  # a step without gradients
        (_at(6, found_inf=False, norm=1.5), Copy.TRAINED),
        (_at(6, digest=5), Copy.TRAINED),
        (_at(6, prepared=Step(7, 3)), Copy.TRAINED),
        (_at(7), Copy.WHOLE),
        (_at(7, loads=3), Copy.WHOLE),
        (_at(7, prepared=Step(8, 3)), Copy.WHOLE),
        (_at(7, loads=1), Copy.HALF_MADE),
        (_at(7, digest=5), Copy.TRAINED),
        (_at(7, found_inf=False, norm=1.5), Copy.TRAINED),
        (_at(8, digest=5), Copy.OUTGROWN),
    ],
)
def test_what_a_job_beside_a_note_is(position, expected):
    assert meaning_of(NOTE, position, is_copy=True) is expected
    if position is not None:
        assert meaning_of(NOTE, position, is_copy=False) is Copy.ANOTHER


def test_a_whole_copy_counts_as_what_it_was_made_of():
    found = copy_note.as_copied(NOTE, _at(7))
    assert (found.committed.step, found.committed.digest) == (7, 0xABC)
    assert not found.committed.found_inf and found.loads_finished == 2
    assert copy_note.note_from(NOTE.name) == NOTE
    assert copy_note.note_from("weight") is None


def test_names_of_notes_fit():
    assert copy_note.job_of_note("gpt") == "gpt.optstate-copy"
    longest = copy_note.job_of_note("x" * 128)
    assert len(longest) <= 128 and longest != copy_note.job_of_note("y" * 128)


def test_a_loss_scaler_begins_where_that_of_the_job_is():
    state = LossScalerState(64.0, 2, 1)
    spec = SessionSpec(job="gpt", optimizer=0, group_options=[], parameters=[], loss_scaler=SCALER)
    assert copied_state.with_scaler(spec, state).loss_scaler_state == state
    with pytest.raises(optstate.UnimplementedError, match='job "gpt"'):
        copied_state.with_scaler(spec, None)
    without = SessionSpec(job="gpt", optimizer=0, group_options=[], parameters=[])
    assert copied_state.with_scaler(without, None) == without


def test_pieces_are_cut_by_size(monkeypatch):
    shapes = [(3,), (2, 5), (), (0,), (4,)]
    spec = SessionSpec(
        job="gpt",
        optimizer=infos()["adam"].kind,
        group_options=[0],
        parameters=[ParameterSpec(str(s), s, math.prod(s), 1, 1, 0) for s in shapes],
    )
    whole = [each for piece in copied_state.pieces_of(spec) for each in piece]
    assert {index for _, index, _ in whole} == set(range(len(shapes)))
    for limit in (1, 10, 11, 1 << 20):
        monkeypatch.setattr(copied_state, "_PIECE_ELEMENTS", limit)
        pieces = list(copied_state.pieces_of(spec))
        assert [each for piece in pieces for each in piece] == whole
        assert all(len(p) == 1 or copied_state.numel_of(p) <= limit for p in pieces)
    values = [torch.randn(shape) for _, _, shape in whole]
    parts = copied_state.split(whole, copied_state.join(values))
    assert all(map(torch.equal, parts, values))
