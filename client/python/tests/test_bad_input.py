"""Bad input: a clear text, nothing lost, other jobs untouched."""

from __future__ import annotations

import math

import optstate
import pytest
import torch
from training import largest_difference, loss_of, small_model, train


@pytest.fixture(autouse=True)
def bystander(request):
    """Another job in the same engine host trains on whatever happens."""
    model, expected = small_model(seed=8), small_model(seed=8)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    yield
    train(model, optimizer, range(2, 4))
    train(expected, optstate.AdamW(expected.parameters(), lr=0.01), range(4))
    assert largest_difference(model, expected) == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": math.nan}, "Invalid learning rate: nan"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"betas": (math.nan, 0.9)}, "Invalid beta parameter at index 0: nan"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
        ({"lr": math.inf}, "Invalid learning rate: inf"),
        ({"eps": math.inf}, "Invalid epsilon value: inf"),
        ({"weight_decay": math.inf}, "Invalid weight_decay value: inf"),
        ({"max_norm": -1.0}, "Invalid max_norm: -1.0"),
        ({"max_norm": math.nan}, "Invalid max_norm: nan"),
        ({"partition": "both"}, "Invalid partition: 'both'"),
        ({"job": ""}, "Invalid job"),
        ({"step_timeout": 0.0}, "Invalid step_timeout: 0.0"),
        ({"capturable": True}, "capturable=True is not supported"),
        ({"differentiable": True}, "differentiable=True is not supported"),
    ],
)
def test_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        optstate.AdamW(small_model().parameters(), **options)


def test_hyperparameters_of_a_new_group():
    """Bad values raise ValueError at once, as in torch, and the group is not there."""
    optimizer = optstate.AdamW(small_model().parameters())
    for change in ({"lr": math.inf}, {"eps": math.nan}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match=r"Invalid .*param_groups\[1\]"):
            optimizer.add_param_group({"params": [torch.zeros(2)], **change})
    assert len(optimizer.param_groups) == 1
    optimizer.close()


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, dtype=torch.float64), "float64"),
        (torch.zeros(2, dtype=torch.int64), "int64"),
        (torch.zeros(2, dtype=torch.complex64), "complex"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.nn.parameter.UninitializedParameter(), "uninitialized"),
    ],
    ids=["float64", "int64", "complex", "sparse", "meta", "lazy"],
)
def test_parameters(tensor, text):
    with pytest.raises(TypeError, match=text):
        optstate.AdamW([("good", torch.zeros(1)), ("bad", tensor)])


def test_parameters_that_share_memory():
    flat = torch.zeros(8)
    halves = [torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[4:])]
    optstate.AdamW(halves).close()
    columns = torch.zeros(4, 4)
    optstate.AdamW([columns[:, :2], columns[:, 2:]]).close()
    optstate.AdamW([torch.zeros(0), torch.zeros(0)]).close()
    optimizer = optstate.AdamW([("first", halves[0])])
    with pytest.raises(ValueError, match='parameters "first" and "tied" share memory'):
        optimizer.add_param_group({"params": [("tied", torch.nn.Parameter(flat[3:5]))]})
    optimizer.close()
    with pytest.raises(ValueError, match='parameters "0.0" and "0.1" share memory'):
        optstate.AdamW([torch.nn.Parameter(flat), torch.nn.Parameter(flat)])


def test_names_that_are_taken_twice():
    with pytest.raises(optstate.InvalidArgumentError, match="twin"):
        optstate.AdamW([("twin", torch.zeros(1)), ("twin", torch.zeros(1))])


@pytest.mark.parametrize(
    ("endpoint", "error", "text"),
    [
        ("nonsense", optstate.InvalidArgumentError, '^endpoint "nonsense": expected unix:PATH'),
        ("grpc:somewhere", optstate.InvalidArgumentError, "^endpoint .*grpc:HOST:PORT"),
        ("unix:/nowhere/a.sock", optstate.UnavailableError, "^no daemon at unix:/nowhere/a.sock"),
        ("grpc:unix:/nowhere/a", optstate.UnavailableError, "^no daemon at grpc:unix:/nowhere/a"),
        ("grpc:127.0.0.1:1", optstate.UnavailableError, "^no daemon at grpc:127.0.0.1:1"),
    ],
)
def test_endpoints(endpoint, error, text):
    with pytest.raises(error, match=text):
        optstate.AdamW(small_model().parameters(), endpoint=endpoint)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lr": math.nan}, "Invalid learning rate: nan"),
        ({"lr": math.inf}, "Invalid learning rate: inf"),
        ({"betas": (0.9, 1.5)}, "Invalid beta parameter at index 1"),
        ({"eps": -math.inf}, "Invalid epsilon value"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value"),
        ({"weight_decay": math.nan}, "Invalid weight_decay value"),
        ({"amsgrad": True}, "amsgrad"),
        ({"differentiable": True}, "differentiable"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay"),
    ],
)
def test_hyperparameters_that_were_edited(change, text):
    """The step raises, and can be taken when the value is right again."""
    model, expected = small_model(), small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    reference = optstate.AdamW(expected.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    train(expected, reference, range(3))
    good = dict(optimizer.param_groups[0])
    optimizer.zero_grad()
    loss_of(model, 5).backward()  # a gradient that must not stay anywhere
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    assert optimizer.committed_step == 2
    optimizer.param_groups[0].update({key: good[key] for key in change})
    train(model, optimizer, [2])
    assert largest_difference(model, expected) == 0


def test_gradients():
    dense, embedding = torch.nn.Parameter(torch.zeros(4)), torch.nn.Embedding(4, 2, sparse=True)
    optimizer = optstate.AdamW([dense, embedding.weight])
    dense.grad = torch.ones(4)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients.*SparseAdam"):
        optimizer.step()
    assert torch.equal(dense, torch.zeros(4))
    embedding.weight.grad = torch.ones(4, 2)
    optimizer.step()
    assert optimizer.committed_step == 1


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
def test_gradients_of_a_dtype_of_their_own():
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    optimizer = optstate.AdamW([parameter])
    parameter.grad = torch.full((4,), 1e-3, dtype=torch.float32)
    optimizer.step()
    assert optimizer.last_outcome.gradient_norm == pytest.approx(2e-3, rel=1e-6)
    parameter.grad = None
    parameter.grad_dtype = torch.bfloat16
    parameter.grad = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="gradient of parameter .* is torch.bfloat16"):
        optimizer.step()


def test_parameters_that_changed_their_kind():
    model = small_model()
    optimizer = optstate.AdamW(model.named_parameters())
    train(model, optimizer, range(1))
    values = model[0].weight.data
    model[0].weight.data = values.half()
    with pytest.raises(TypeError, match=r'"0.weight" is now torch.float16 \[16, 8\]'):
        optimizer.step()
    model[0].weight.data = values[:3]
    with pytest.raises(TypeError, match=r"\[3, 8\]"):
        optimizer.step()
    model[0].weight.data = values
    model[0].weight.grad = None
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["params"][2] = torch.nn.Parameter(torch.zeros(16))
    with pytest.raises(RuntimeError, match="other tensors than were attached"):
        optimizer.step()
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError):
        optimizer.step()


def test_accumulate_needs_to_be_asked_for():
    optimizer = optstate.AdamW(small_model().parameters())
    with pytest.raises(RuntimeError, match="accumulate=True"):
        optimizer.accumulate_step()


def test_more_state_than_there_is_memory(daemon):
    """Refused before the first step; nothing is left behind."""
    huge = torch.zeros(1).expand(1 << 42)
    with pytest.raises(optstate.ResourceExhaustedError, match="bytes|GiB|TiB"):
        optstate.AdamW([huge], job="huge")
    assert any("huge" not in daemon.jobs() for _ in range(1000))


def test_every_status_has_an_exception():
    for code in range(1, 17):
        error = optstate.errors.from_status(code, "text")
        assert error.code == code and str(error) == "text"
        assert isinstance(error, optstate.OptstateError)
    assert isinstance(optstate.InvalidArgumentError("x"), ValueError)
    assert isinstance(optstate.FailedPreconditionError("x"), RuntimeError)
    assert isinstance(optstate.DeadlineExceededError("x"), TimeoutError)
    assert type(optstate.errors.from_status(99, "x")) is optstate.UnknownError
