"""State of 8 bits goes from one daemon to another through floats, and arrives as it left."""

from __future__ import annotations

import math

import pytest
import torch
from optstate import _native
from optstate._torch.nodes import eight_bits
from optstate._torch.optimizer_info import infos
from optstate._torch.state.arrays import ArrayTransfer
from optstate.session import Session
from optstate.session_spec import ParameterSpec, SessionSpec

SIZES = (1, 255, 256, 257, 5000, 70_000)
EXP_AVG, EXP_AVG_SQ = _native.STATE_0, _native.STATE_0 + 1


def _values(kind):
    """Values of both signs, of which about half of the blocks have a negative largest one."""
    noise = torch.Generator().manual_seed(1)
    scale = {"large": 1e36, "small": 1e-36, "denormal": 1e-42}.get(kind, 1.0)
    values = [torch.randn(numel, generator=noise) * scale for numel in SIZES]
    if kind == "equal":  # both signs have the place below 1
        values = [torch.where(each < 0, -1.0, 0.993) for each in values]
    if kind == "special":
        for each in values[1:]:
            each[7] = -math.inf
        values[-1][1000] = math.nan
        values[-1][512:768] = 0
    if kind == "negative":
        values = [-each.abs() for each in values]
    return values


def _decoded(job, daemon, values):
    """Loads values into a new job; returns what it has then. (A job that has a value keeps its code
    and its scale when that is loaded again.)"""
    spec = SessionSpec(
        job=job,
        optimizer=infos()["adam"].kind,
        group_options=[0],
        parameters=session_parameters(),
        endpoint=daemon.shm,
        state_format=_native.STATE_FORMATS["dynamic8"],
    )
    session = Session.open(spec)
    wanted = [
        (array, index, (numel,))
        for array in (EXP_AVG, EXP_AVG_SQ)
        for index, numel in enumerate(SIZES)
    ]
    arrays = ArrayTransfer(session, session_parameters())
    session.begin_load()
    for index, numel in enumerate(SIZES):
        arrays.load_array(_native.MASTER, index, torch.zeros(numel))
    for (array, index, _), value in zip(wanted, values):
        arrays.load_array(array, index, value)
    arrays.flush_loads()
    session.finish_load()
    decoded = arrays.fetch_arrays(wanted)
    session.close()
    return decoded


def session_parameters():
    return [ParameterSpec(f"p{n}", (n,), n, _native.FLOAT32, _native.FLOAT32, 0) for n in SIZES]


def _same(ones, others):
    return all(
        torch.equal(one.view(torch.int32), other.view(torch.int32))
        for one, other in zip(ones, others)
    )


@pytest.mark.parametrize(
    "kind", ["plain", "negative", "equal", "large", "small", "denormal", "special"]
)
def test_values_that_were_decoded_are_encoded_to_the_same(kind, daemon, job):
    values = _values(kind)
    decoded = _decoded(job, daemon, [*values, *(each.square() for each in values)])
    # As they are they would become others, but squares.
    again = _decoded(f"{job}-again", daemon, decoded)
    assert not _same(decoded, again)
    assert _same(decoded[len(SIZES) :], again[len(SIZES) :])
    restored = [each.clone() for each in decoded]
    for each in restored:
        eight_bits.restore_scales(each)
    assert _same(decoded, _decoded(f"{job}-restored", daemon, restored))


def test_other_values_stay():
    for values in (torch.empty(0), torch.zeros(300), torch.rand(3, 200), torch.tensor(2.0)):
        kept = values.clone()
        eight_bits.restore_scales(kept)
        assert torch.equal(kept, values)
    values = torch.full((3, 100), math.nan)
    eight_bits.restore_scales(values)
    assert bool(values.isnan().all())


def test_the_map():
    places = eight_bits.magnitudes()
    assert len(places) == 129 and places[0] == 0 and places[128] == 1
    assert bool((places[1:] > places[:-1]).all())
    assert places[127] == pytest.approx(0.99296875)
    assert places[1] == pytest.approx(5.5e-7)
