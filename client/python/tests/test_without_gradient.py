"""Parameters that have no gradient in a step: torch does not touch them, nor do we."""

from __future__ import annotations

import os

import optstate
import pytest
import ranks
import torch
from training import bits

SHAPES = {"used": (6, 5), "idle": (7, 3), "frozen": (4,)}


def parameters_of(strided: bool = False, dtype: torch.dtype = torch.float32) -> dict:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator).to(dtype)
        if strided:
            values = values.T.contiguous().T if len(shape) == 2 else values.repeat(2)[::2]
        made[name] = torch.nn.Parameter(values, requires_grad=name != "frozen")
    return made


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_graphs_over_them_outlive_a_step(wire, overlap, strided, daemon):
    def run(make):
        parameters = parameters_of(strided)
        optimizer = make(list(parameters.values()))
        point = torch.ones(3, requires_grad=True)
        for _ in range(3):
            kept = (parameters["idle"] @ point).square().sum()
            kept = kept + (parameters["frozen"] * point.sum()).square().sum()
            before = {name: each._version for name, each in parameters.items()}
            parameters["used"].square().sum().backward()
            optimizer.step()
            assert parameters["used"]._version > before.pop("used")
            assert {name: parameters[name]._version for name in before} == before
            kept.backward()  # torch's "modified by an inplace operation" is about versions
            optimizer.step()
            optimizer.zero_grad()
        return list(parameters.values()), point.grad

    expected, expected_grad = run(lambda each: torch.optim.SGD(each, lr=0.01, momentum=0.9))
    found, grad = run(
        lambda each: optstate.SGD(
            each, lr=0.01, momentum=0.9, overlap=overlap, endpoint=getattr(daemon, wire)
        )
    )
    for mine, theirs in zip([*found, grad], [*expected, expected_grad]):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_a_gradient_of_any_micro_step_counts(overlap):
    parameters = parameters_of()
    optimizer = optstate.SGD(parameters.values(), lr=1.0, accumulate=True, overlap=overlap)
    for _ in range(2):
        before = {name: each.detach().clone() for name, each in parameters.items()}
        versions = {name: each._version for name, each in parameters.items()}
        for name in ("used", None, "idle", None):
            if name is not None:
                parameters[name].sum().backward()
            optimizer.accumulate_step()
        optimizer.step()
        for name in ("used", "idle"):
            assert torch.allclose(parameters[name], before[name] - 1)
        assert parameters["frozen"]._version == versions["frozen"]
        # A parameter's part in one step says nothing of the next one.
        parameters["used"].sum().backward()
        idle = parameters["idle"]._version
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(parameters["used"], before["used"] - 2)
        assert parameters["idle"]._version == idle


def test_a_step_without_any_gradient_touches_nothing():
    parameters = parameters_of()
    optimizer = optstate.AdamW(parameters.values())
    versions = [each._version for each in parameters.values()]
    optimizer.step()
    assert [each._version for each in parameters.values()] == versions
    assert optimizer.last_outcome.applied


def test_changes_by_hand_still_count(job):
    """Changes by hand reach the daemon, even those that leave no trace."""
    parameters = parameters_of()
    optimizer = optstate.SGD(parameters.values(), lr=1.0, job=job)
    with torch.no_grad():
        parameters["idle"].fill_(2)
    parameters["frozen"].data.fill_(3)
    optimizer.upload_parameters()
    parameters["used"].sum().backward()
    optimizer.step()
    assert (parameters["idle"] == 2).all() and (parameters["frozen"] == 3).all()
    parameters["idle"].data.fill_(4)
    parameters["frozen"].data.fill_(4)
    optimizer.step()
    assert (parameters["idle"] == 4).all()
    assert (parameters["frozen"] == 4).all()  # the script's alone, as in torch
    optimizer.close()
    again = parameters_of()
    optstate.SGD(again.values(), lr=1.0, job=job).close()
    of_job = [name for name in parameters if name != "frozen"]
    assert bits([again[name] for name in of_job]) == bits([parameters[name] for name in of_job])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_another_engine(dtype, own_daemon, job):
    parameters = parameters_of(dtype=dtype)
    optimizer = optstate.SGD(parameters.values(), lr=1.0, job=job, endpoint=own_daemon.shm)
    for _ in range(3):
        before = parameters["used"].detach().clone()
        versions = parameters["idle"]._version, parameters["frozen"]._version
        parameters["used"].grad = torch.ones_like(parameters["used"])
        optimizer.step()
        assert torch.allclose(parameters["used"], before - 1, atol=0.02)
        assert versions == (parameters["idle"]._version, parameters["frozen"]._version)
        os.kill(int(own_daemon.optctl("describe", "job", job)["engine_pid"]), 9)
    optimizer.close()


def _one_rank_has_it(connection, rank, endpoint, options, strided):
    parameters = parameters_of(strided)
    before = {name: each.detach().clone() for name, each in parameters.items()}
    optimizer = optstate.SGD(parameters.values(), lr=1.0, endpoint=endpoint, **options)
    versions = {name: each._version for name, each in parameters.items()}
    parameters["used"].sum().backward()
    if rank == 1:
        parameters["idle"].sum().backward()
    if options.get("accumulate"):
        optimizer.accumulate_step()
    optimizer.step()
    moved = {name: (before[name] - each).mean().item() for name, each in parameters.items()}
    touched = [name for name, each in parameters.items() if each._version > versions[name]]
    return moved, touched


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"accumulate": True}, {"overlap": True, "accumulate": True}],
    ids=["plain", "overlap", "accumulate", "both"],
)
@pytest.mark.parametrize("wire", ["shm", "grpc_tcp"])
def test_what_another_rank_has_changed_is_read(wire, options, strided, daemon):
    options = {"reduction": "daemon", **options}
    for moved, touched in ranks.run(_one_rank_has_it, 2, getattr(daemon, wire), options, strided):
        assert moved["used"] == pytest.approx(1) and moved["idle"] == pytest.approx(0.5)
        assert moved["frozen"] == 0
        assert touched == ["used", "idle"]
