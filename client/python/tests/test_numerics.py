"""Parameters against torch.optim, both against torch in float64."""

from __future__ import annotations

import itertools
import math

import optstate
import pytest
import torch
from training import gradients, parameters_of, set_gradients

STEPS = 200
# A tile and a bit, a matrix, an odd tail, one element, none, and a scalar.
SHAPES = [[4099], [64, 65], [17], [1], [0], []]
CLASSES = {"Adam": (optstate.Adam, torch.optim.Adam), "AdamW": (optstate.AdamW, torch.optim.AdamW)}


def run(optimizer_class, parameters, seed, options, dtype=None):
    """200 steps with a OneCycle schedule on a stream of gradients given by seed."""
    optimizer = optimizer_class(parameters, lr=1e-3, **options)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=STEPS + 1, cycle_momentum=True
    )
    for values in gradients(SHAPES, seed, STEPS, missing=0.1):
        if dtype is not None:
            values = [None if value is None else value.to(dtype) for value in values]
        set_gradients(parameters, values)
        optimizer.step()
        scheduler.step()
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in parameters])


@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("maximize", [False, True], ids=["", "maximize"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1], ids=["", "decay"])
@pytest.mark.parametrize("name", list(CLASSES))
def test_error_is_not_above_torchs(name, weight_decay, maximize, amsgrad, seed):
    """The mean squared error against float64 is not above that of torch's fp32.

    All three runs get equal gradients, so rounding is the only difference. Errors
    of single elements are as good as random, so the runs are compared element by
    element: the mean of (our error² - torch's error²) must not be above zero by
    more than 4 of its own standard errors, which chance alone exceeds once in
    30,000 tests. (200 steps on 8,278 elements; torch's implementation is its
    default for CPU.) The largest error may be twice torch's.
    """
    ours_class, torch_class = CLASSES[name]
    options = {"weight_decay": weight_decay, "maximize": maximize, "amsgrad": amsgrad}
    exact = run(torch_class, parameters_of(SHAPES, seed, torch.float64), seed, options)
    torchs = run(torch_class, parameters_of(SHAPES, seed, torch.float32), seed, options)
    ours = run(ours_class, parameters_of(SHAPES, seed, torch.float32), seed, options)
    our_error, torch_error = ours - exact, torchs - exact
    excess = our_error.square() - torch_error.square()
    standard_error = excess.std() / math.sqrt(excess.numel())
    print(
        f"rms error: {our_error.square().mean().sqrt():.3e},"
        f" torch {torch_error.square().mean().sqrt():.3e};"
        f" largest {our_error.abs().max():.3e}, torch {torch_error.abs().max():.3e}"
    )
    assert excess.mean() <= 4 * standard_error
    assert our_error.abs().max() <= 2 * torch_error.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(CLASSES))
def test_16_bit_parameters_are_the_rounded_float64_run(name, dtype, seed):
    """Parameters of 16 bits with an fp32 master differ from the rounded float64
    run only where that is within fp32's error of a rounding boundary."""
    ours_class, torch_class = CLASSES[name]
    options = {"weight_decay": 0.1}
    start = parameters_of(SHAPES, seed, dtype)
    exact_start = [torch.nn.Parameter(each.detach().double()) for each in start]
    exact = run(torch_class, exact_start, seed, options, dtype).to(dtype)
    ours = run(ours_class, start, seed, options, dtype).to(dtype)
    differing = (ours != exact).double().mean().item()
    steps = (ours.view(torch.int16).int() - exact.view(torch.int16).int()).abs()
    print(f"{differing:.2e} of the elements differ")
    assert differing < 2e-3
    assert steps.max() <= 1


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e9])
def test_clipping_is_clip_grad_norm(max_norm, seed):
    ours, torchs = (parameters_of(SHAPES, seed, torch.float32) for _ in range(2))
    optimizer = optstate.AdamW(ours, max_norm=max_norm)
    reference = torch.optim.AdamW(torchs)
    for values in gradients(SHAPES, seed, 20):
        set_gradients(ours, values)
        set_gradients(torchs, [value.clone() for value in values])
        norm = torch.nn.utils.clip_grad_norm_(torchs, max_norm or math.inf)
        optimizer.step()
        reference.step()
        outcome = optimizer.last_outcome
        assert outcome.applied and not outcome.found_inf
        assert outcome.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
        expected = min(1.0, (max_norm or math.inf) / (norm.item() + 1e-6))
        assert outcome.clip_coefficient == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(ours, torchs):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_norm", [None, 0, 0.0, math.inf, torch.tensor(0.0)])
def test_no_clipping(max_norm):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optstate.AdamW([parameter], max_norm=max_norm)
    parameter.grad = torch.full((3,), 100.0)
    optimizer.step()
    assert optimizer.last_outcome.clip_coefficient == 1
    assert (parameter < 1).all()


def test_max_norm_can_change_and_clipping_leaves_gradients_alone(seed):
    (parameter,) = parameters_of([[100]], seed, torch.float32)
    optimizer = optstate.AdamW([parameter], max_norm=1.0)
    gradient = torch.full((100,), 3.0)
    parameter.grad = gradient.clone()
    optimizer.step()
    assert optimizer.last_outcome.clip_coefficient < 0.04
    assert torch.equal(parameter.grad, gradient)
    optimizer.max_norm = None
    optimizer.step()
    assert optimizer.last_outcome.clip_coefficient == 1
    optimizer.max_norm = torch.tensor(1.0)
    optimizer.step()
    assert optimizer.last_outcome.clip_coefficient < 0.04


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_micro_steps_add_up_in_fp32(dtype, seed):
    """accumulate_step sums micro-steps exactly as one fp32 sum does."""
    shapes = [[1000], [3, 5]]
    masters = parameters_of(shapes, seed, torch.float32)
    accumulated = [torch.nn.Parameter(each.detach().to(dtype)) for each in masters]
    summed = [torch.nn.Parameter(each.detach().float().clone()) for each in accumulated]
    optimizer = optstate.AdamW(accumulated, accumulate=True)
    reference = optstate.AdamW(summed)
    stream = gradients(shapes, seed, 12)
    for _ in range(4):
        micro = [[value.to(dtype) for value in next(stream)] for _ in range(3)]
        for values in micro[:2]:
            set_gradients(accumulated, values)
            optimizer.accumulate_step()
            assert all(parameter.grad is None for parameter in accumulated)
        set_gradients(accumulated, micro[2])
        optimizer.step()
        totals = [(a.float() + b.float()) + c.float() for a, b, c in zip(*micro)]
        set_gradients(summed, totals)
        reference.step()
        optimizer.zero_grad()
    for index, (mine, theirs) in enumerate(zip(accumulated, summed)):
        assert torch.equal(mine, theirs.to(dtype)), index
    assert optimizer.committed_step == reference.committed_step == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["trainer", "daemon"])
def test_micro_steps_add_up_in_the_gradients_dtype(dtype, reduction, seed):
    """Micro-steps add up as torch adds them up in .grad."""
    shapes = [[1000], [3, 5]]
    ours = parameters_of(shapes, seed, dtype)
    torchs = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    optimizer = optstate.AdamW(
        ours, accumulate=True, accumulate_dtype="gradient", reduction=reduction
    )
    reference = optstate.AdamW(torchs)
    stream = gradients(shapes, seed, 9)
    for _ in range(3):
        reference.zero_grad()
        for _ in range(3):
            micro = [value.to(dtype) for value in next(stream)]
            set_gradients(ours, micro)
            optimizer.accumulate_step()
            for parameter, value in zip(torchs, micro):
                parameter.grad = value if parameter.grad is None else parameter.grad + value
        optimizer.step()
        reference.step()
    for index, (mine, theirs) in enumerate(zip(ours, torchs)):
        assert torch.equal(mine, theirs), index


@pytest.mark.parametrize("wire", ["shm", "grpc_tcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_norms_are_vector_norms(dtype, wire, daemon, seed):
    shapes = [[5000], [3, 5], [0], [7]]
    parameters = parameters_of(shapes, seed, dtype)
    names = ["large", "small", "empty", "sometimes"]
    optimizer = optstate.AdamW(
        list(zip(names, parameters)), endpoint=getattr(daemon, wire), max_norm=0.1
    )
    with pytest.raises(optstate.FailedPreconditionError, match="take a step first"):
        optimizer.gradient_norms()
    for step, values in enumerate(gradients(shapes, seed, 4)):
        values = [value.to(dtype) for value in values]
        if step % 2:
            values[3] = None
        set_gradients(parameters, values)
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.step()
        norms = optimizer.gradient_norms()
        expected = {
            name: torch.linalg.vector_norm(value.double()).item() / 4
            for name, value in zip(names, values)
            if value is not None
        }
        assert norms == pytest.approx(expected, rel=1e-14)
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        assert total == pytest.approx(optimizer.last_outcome.gradient_norm)
    values[0][4321] = float("inf")
    set_gradients(parameters, values)
    optimizer.step()
    norms = optimizer.gradient_norms()
    assert not optimizer.last_outcome.applied
    assert norms["large"] == float("inf")
    assert norms["small"] == pytest.approx(expected["small"], rel=1e-14)


def test_micro_steps_of_different_parameters_and_abort(seed):
    first, second = parameters_of([[10], [10]], seed, torch.float32)
    before = second.detach().clone()
    optimizer = optstate.AdamW([first, second], accumulate=True)
    first.grad = torch.ones(10)
    second.grad = torch.ones(10)
    optimizer.accumulate_step()
    optimizer.abort_step()
    first.grad = torch.ones(10)
    optimizer.accumulate_step()
    optimizer.step()  # without a gradient of its own
    assert torch.equal(second, before)
    assert optimizer.last_outcome.gradient_norm == pytest.approx(math.sqrt(10))
    assert optimizer.fetch_state(second) == {}
    assert optimizer.fetch_state(first)["step"] == 1


@pytest.mark.parametrize("name", list(CLASSES))
def test_groups_have_hyperparameters_of_their_own(name, seed):
    """Per group, also when edited in place at every step, and lr and betas as tensors."""
    ours_class, torch_class = CLASSES[name]
    ours, torchs = (parameters_of([[50], [60], [70]], seed, torch.float32) for _ in range(2))

    def make(optimizer_class, parameters):
        groups = [
            {"params": parameters[:1], "lr": torch.tensor(0.01), "amsgrad": True},
            {"params": parameters[1:2], "maximize": True, "eps": 1e-3},
            {"params": parameters[2:], "betas": (0.5, 0.7), "weight_decay": 0.3},
        ]
        return optimizer_class(groups, lr=2e-3)

    optimizer, reference = make(ours_class, ours), make(torch_class, torchs)
    for step, values in enumerate(gradients([[50], [60], [70]], seed, 30)):
        for each, parameters in ((optimizer, ours), (reference, torchs)):
            set_gradients(parameters, [value.clone() for value in values])
            each.param_groups[0]["lr"].fill_(0.01 / (1 + step))
            each.param_groups[1]["weight_decay"] = 0.01 * step
            each.param_groups[2]["betas"] = (0.5 + 0.01 * step, 0.9)
            each.step()
    for mine, theirs in zip(ours, torchs):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)


def test_equal_bits_over_every_wire_and_partition(daemon, seed):
    results = []
    endpoints = [daemon.shm, daemon.grpc_unix, daemon.grpc_tcp, "embedded"]
    for endpoint, partition in itertools.product(endpoints, ["greedy", "contiguous"]):
        parameters = parameters_of(SHAPES, seed, torch.float32)
        with optstate.AdamW(parameters, endpoint=endpoint, partition=partition) as optimizer:
            assert optimizer.wire == ("grpc" if endpoint.startswith("grpc") else "shm")
            for values in gradients(SHAPES, seed, 10, missing=0.2):
                set_gradients(parameters, values)
                optimizer.step()
            state = optimizer.state_dict()["state"]
        results.append((parameters, state))
    first_parameters, first_state = results[0]
    for parameters, state in results[1:]:
        assert all(map(torch.equal, parameters, first_parameters))
        assert state.keys() == first_state.keys()
        for index, entry in state.items():
            assert all(torch.equal(entry[key], first_state[index][key]) for key in entry)
