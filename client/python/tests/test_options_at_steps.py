"""Options that a step finds in the groups: as torch takes them, option by option."""

from __future__ import annotations

import copy
import math
import pickle

import optstate
import pytest
import torch
from torchs_table import assert_follows, copied, default_of, ours, parameters_for, takes, torchs
from training import gradients, set_gradients

# Values that torch's constructors refuse, and its steps take.
VALUES = {
    "lr": (-1e-19, -1e-3),
    "eps": (-1e-3,),
    "momentum": (1.25,),
    "dampening": (-1.0, 2.0),
    "lr_decay": (-0.01,),
    "momentum_decay": (-0.004,),
    "d": (0.5, -1.0),
    "ns_steps": (-1, 0),
}
NAMES = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adafactor", "Muon")
CASES = [
    pytest.param(name, option, value, id=f"{name}-{option}-{value}")
    for name in NAMES
    if hasattr(torch.optim, name)
    for option, values in VALUES.items()
    for value in values
    if takes(name, option) and (name, option) != ("Adafactor", "eps")
]


@pytest.mark.parametrize(("name", "option", "value"), CASES)
def test_what_torch_checks_in_constructors_alone_is_trained_with(name, option, value, seed):
    start = parameters_for(name, seed)
    mine, theirs, exact = (copied(start, each) for each in (None, None, torch.float64))
    given = {"momentum": 0.5} if option in ("momentum", "dampening") else {}
    runs = [
        (make(name)(parameters, **given), parameters)
        for make, parameters in ((ours, mine), (torchs, theirs), (torchs, exact))
    ]
    shapes = [list(each.shape) for each in start]
    for number, values in enumerate(gradients(shapes, seed, 6)):
        for optimizer, parameters in runs:
            if number == 2:
                for group in optimizer.param_groups:
                    group[option] = value
            set_gradients(parameters, [each.to(parameters[0].dtype) for each in values])
            optimizer.step()
    assert_follows(mine, theirs, start, 1e-2 if name == "Muon" else 2**-19, exact)
    assert default_of(name, option) != value


def test_a_scheduler_that_ends_a_hair_below_0():
    """LinearLR's closed form of 0 is -1e-19 or so with some numbers."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    runs = [(optstate.SGD, parameters[0]), (torch.optim.SGD, parameters[1])]
    for make, parameter in runs:
        optimizer = make([parameter], lr=0.05)
        scheduler = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=0.3, end_factor=0.0, total_iters=3
        )
        lowest = 0.0
        for _ in range(12):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            scheduler.step()
            lowest = min(lowest, optimizer.param_groups[0]["lr"])
        assert lowest < 0, "the case is gone: look for other numbers"
    torch.testing.assert_close(*parameters)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", math.nan),
        ("lr", math.inf),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9, -0.5)),
        ("weight_decay", -0.1),
        ("eps", None),
    ],
)
def test_what_the_daemon_would_compute_otherwise_is_refused(option, value):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optstate.AdamW([parameter])
    before = copy.copy(optimizer.param_groups[0])
    optimizer.param_groups[0][option] = value
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"Invalid .*"):
        optimizer.step()
    assert parameter.tolist() == [1.0] * 3
    optimizer.param_groups[0][option] = before[option]
    optimizer.step()
    assert optimizer.committed_step == 1


@pytest.mark.parametrize(
    "copies", [lambda each: each, lambda each: pickle.loads(pickle.dumps(each))]
)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lion"])
def test_an_option_that_a_group_has_lost_is_missed(name, copies):
    """No default takes the option's place, as in torch."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(optstate, name)([parameter], lr=0.5)
    del optimizer.param_groups[0]["lr"]
    parameter.grad = torch.ones_like(parameter)
    if copies(1) == 1:
        parameter, optimizer = copies((parameter, optimizer))
        if optimizer.job is None:
            optimizer.attach()
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(KeyError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    assert optimizer.committed_step == 1 and parameter[0] != 1


def test_adagrads_first_sum_is_the_constructors():
    """torch ignores a group's own, in groups, added ones and edits."""
    runs = []
    for make in (optstate.Adagrad, torch.optim.Adagrad):
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = make(
            [
                {"params": parameters[:1], "initial_accumulator_value": 4.0},
                {"params": parameters[1:]},
            ],
            lr=1.0,
            initial_accumulator_value=0.5,
        )
        optimizer.param_groups[1]["initial_accumulator_value"] = 9.0
        first = optimizer.state_dict()["state"]
        assert [first[k]["sum"].tolist() for k in (0, 1)] == [[0.5] * 3] * 2
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        runs.append(parameters)
    for mine, theirs in zip(*runs):
        torch.testing.assert_close(mine, theirs)


def test_adagrads_first_sum_comes_with_a_checkpoint():
    saved = torch.optim.Adagrad(
        [torch.nn.Parameter(torch.ones(3))], lr=1.0, initial_accumulator_value=2.0
    ).state_dict()
    runs = []
    for make in (optstate.Adagrad, torch.optim.Adagrad):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = make([parameter], lr=1.0)
        optimizer.load_state_dict(copy.deepcopy(saved))
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        runs.append(parameter)
    torch.testing.assert_close(*runs)


def test_options_without_effect_are_refused():
    parameters = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match='partition=.* has no meaning with reduction="daemon"'):
        optstate.SGD(parameters, reduction="daemon", partition="contiguous")
    with pytest.raises(ValueError, match="accumulate_dtype='gradient' needs accumulate=True"):
        optstate.SGD(parameters, accumulate_dtype="gradient")
    for key in ("max_value", "norm_type"):
        with pytest.raises(ValueError, match=f"has a {key} of its own"):
            optstate.SGD([{"params": parameters, key: 1.0}])
        optimizer = optstate.SGD(parameters)
        with pytest.raises(ValueError, match=f"has a {key} of its own"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], key: 1.0})
        optimizer.param_groups[0][key] = 1.0
        parameters[0].grad = torch.ones(3)
        with pytest.raises(ValueError, match=f"has a {key} of its own"):
            optimizer.step()
        optimizer.param_groups[0][key] = None
        optimizer.step()
        optimizer.close()


def test_last_outcome_counts_as_committed_step_does():
    """last_outcome follows a private job that add_param_group has put into another."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optstate.SGD([parameter], lr=0.1)
    for number in range(1, 7):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert optimizer.committed_step == optimizer.last_outcome.step == number
        if number in (2, 3):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
            assert optimizer.committed_step == optimizer.last_outcome.step == number


@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler_beside_a_loss_scaler_is_refused(unscales):
    """The two scalers would both unscale: a step of a quarter, or of a thousandth."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    settings = optstate.LossScaler(init_scale=4.0)
    optimizer = optstate.SGD([parameter], lr=1.0, loss_scaler=settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="GradScaler is used with .* loss_scaler"):
        scaler.step(optimizer)
    assert parameter.item() == 0 and optimizer.committed_step == 0
    optimizer.zero_grad()
    optimizer.scale(parameter.sum()).backward()
    optimizer.step()
    assert parameter.item() == -1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_that_is_cast_later_is_refused_by_name(dtype, overlap, job):
    """All that moves parameters refuses; loading wrote 4 bytes for each of a bfloat16 one's 2."""
    model = torch.nn.Linear(64, 64)
    optimizer = optstate.AdamW(model.parameters(), job=job, model=model, overlap=overlap)
    saved = optimizer.state_dict()
    model.to(dtype)
    before = [each.detach().clone() for each in model.parameters()]
    match = 'parameter "weight" is .*: change the model before'
    with pytest.raises(TypeError, match=match):
        optimizer.load_state_dict(
            torch.optim.AdamW(torch.nn.Linear(64, 64).parameters()).state_dict()
        )
    for use in (optimizer.step, optimizer.upload_parameters):
        with pytest.raises(TypeError, match=match):
            use()
    assert all(map(torch.equal, model.parameters(), before))
    model.float()
    optimizer.load_state_dict(saved)
    optimizer.step()
