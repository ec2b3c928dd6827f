"""Jobs of 1,024 and 100,000 parameters, and of parameters without elements."""

from __future__ import annotations

import optstate
import pytest
import torch


@pytest.mark.parametrize("count", [1024, 100_000])
def test_many(count, job, seed):
    torch.manual_seed(seed)
    values = torch.randn(count, 3)
    ours = [torch.nn.Parameter(row.clone()) for row in values]
    stacked = torch.nn.Parameter(values.clone())
    optimizer = optstate.AdamW(ours, lr=0.01, job=job)
    reference = torch.optim.AdamW([stacked], lr=0.01)
    for _ in range(3):
        gradient = torch.randn(count, 3)
        for parameter, row in zip(ours, gradient):
            parameter.grad = row.clone()
        stacked.grad = gradient
        optimizer.step()
        reference.step()
    found = torch.stack([parameter.detach() for parameter in ours])
    torch.testing.assert_close(found, stacked.detach(), rtol=1e-5, atol=1e-6)
    optimizer.close()
    again = [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]
    optimizer = optstate.AdamW(again, lr=0.01, job=job)
    assert optimizer.committed_step == 3
    assert torch.equal(torch.stack([parameter.detach() for parameter in again]), found)
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_state_of_many(wire, dtype, daemon):
    """More than one call's worth is saved and loaded, each value at its place."""
    count = 5000
    endpoint = getattr(daemon, wire)
    ours = [torch.nn.Parameter(torch.full((2,), i / count, dtype=dtype)) for i in range(count)]
    optimizer = optstate.AdamW(ours, amsgrad=True, endpoint=endpoint)
    for i, parameter in enumerate(ours):
        parameter.grad = torch.full((2,), 1.0 + i, dtype=dtype) if i % 3 else None
    optimizer.step()
    saved = optimizer.state_dict()
    assert sorted(saved["state"]) == [i for i in range(count) if i % 3]
    for i, entry in saved["state"].items():
        gradient = ours[i].grad.float()
        torch.testing.assert_close(entry["exp_avg"], 0.1 * gradient)
        torch.testing.assert_close(entry["exp_avg_sq"], 0.001 * gradient**2)
        assert entry["step"] == 1
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    other = optstate.AdamW(copies, amsgrad=True, endpoint=endpoint)
    other.load_state_dict(saved)
    again = other.state_dict()["state"]
    assert again.keys() == saved["state"].keys()
    for i, entry in saved["state"].items():
        assert entry.keys() == again[i].keys()
        assert all(torch.equal(value, again[i][key]) for key, value in entry.items())
    optimizer.close()
    other.close()


def many(count: int = 100) -> list[tuple[str, torch.nn.Parameter]]:
    named = [(f"p{i}", torch.nn.Parameter(torch.ones(2, 3))) for i in range(count)]
    for _, parameter in named:
        parameter.grad = torch.ones(2, 3)
    return named


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda gradient: gradient.view(3, 2), r'gradient of parameter "p70" is .* \[3, 2\]'),
        (lambda gradient: gradient.half(), 'gradient of parameter "p70" is torch.float16'),
    ],
    ids=["shape", "dtype"],
)
def test_one_wrong_gradient_of_many(change, text):
    """The error names it, nothing is taken, and the step can be taken when it is right again."""
    named = many()
    optimizer = optstate.AdamW(named, lr=0.1)
    wrong = named[70][1].grad
    right = wrong.data
    wrong.data = change(right)
    with pytest.raises(TypeError, match=text):
        optimizer.step()
    assert all(torch.equal(parameter, torch.ones(2, 3)) for _, parameter in named)
    wrong.data = right
    optimizer.step()
    assert optimizer.committed_step == 1
    assert not any(torch.equal(parameter, torch.ones(2, 3)) for _, parameter in named)


def test_one_parameter_of_many_in_another_shape():
    """Neither its address nor its version says so."""
    named = many()
    optimizer = optstate.AdamW(named)
    parameter = named[70][1]
    address, version = parameter.data_ptr(), parameter._version
    parameter.data = parameter.data.view(3, 2)
    assert (parameter.data_ptr(), parameter._version) == (address, version)
    with pytest.raises(TypeError, match=r'"p70" is now torch.float32 \[3, 2\]'):
        optimizer.step()


def test_gradients_of_many_kinds():
    """Missing ones and ones with strides of their own, between the others."""
    named = many()
    torchs = [torch.nn.Parameter(parameter.detach().clone()) for _, parameter in named]
    optimizer = optstate.AdamW(named, lr=0.1)
    reference = torch.optim.AdamW(torchs, lr=0.1)
    for step in range(3):
        for i, theirs in enumerate(torchs):
            gradient = torch.randn(2, 3)
            kind = (i + step) % 7
            if kind == 0:
                gradient = None
            elif kind == 1:
                gradient = torch.randn(3, 2).t()
            elif kind == 2:
                gradient = torch.randn(3).expand(2, 3)
            named[i][1].grad = theirs.grad = gradient
        optimizer.step()
        reference.step()
    for (_, mine), theirs in zip(named, torchs):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_one_of_many_changed_in_place():
    """The changed parameter is sent to the daemon; the others' history goes on."""
    named = many()
    torchs = [torch.nn.Parameter(parameter.detach().clone()) for _, parameter in named]
    optimizer = optstate.AdamW(named, lr=0.1)
    reference = torch.optim.AdamW(torchs, lr=0.1)
    for step in range(3):
        with torch.no_grad():
            named[step][1].mul_(2)
            torchs[step].mul_(2)
        for (_, mine), theirs in zip(named, torchs):
            mine.grad = theirs.grad = torch.randn(2, 3)
        named[70 + step][1].grad.mul_(0)
        optimizer.step()
        reference.step()
    for (_, mine), theirs in zip(named, torchs):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [False, True])
def test_empty_and_single(accumulate):
    tensors = [torch.zeros(0), torch.zeros(3, 0), torch.tensor(1.0), torch.ones(1)]
    ours = [torch.nn.Parameter(each.clone()) for each in tensors]
    torchs = [torch.nn.Parameter(each.clone()) for each in tensors]
    optimizer = optstate.AdamW(ours, lr=0.1, accumulate=accumulate)
    reference = torch.optim.AdamW(torchs, lr=0.1)
    for step in range(4):
        for each, parameters in ((optimizer, ours), (reference, torchs)):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1.0 + step)
            each.step()
    for mine, theirs in zip(ours, torchs):
        torch.testing.assert_close(mine, theirs)
    saved = optimizer.state_dict()
    assert saved["state"].keys() == reference.state_dict()["state"].keys()
    assert saved["state"][1]["exp_avg"].shape == (3, 0)
    optimizer.load_state_dict(saved)
    optimizer.step()


def test_only_an_empty_parameter():
    parameter = torch.nn.Parameter(torch.zeros(0))
    optimizer = optstate.AdamW([parameter])
    parameter.grad = torch.zeros(0)
    optimizer.step()
    assert optimizer.committed_step == 1
    assert optimizer.last_outcome.gradient_norm == 0
