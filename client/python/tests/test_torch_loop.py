"""Does what a training loop does with torch's optimizers, with every one we serve."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import (
    CyclicLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torchs_table import (
    INFOS,
    assert_follows,
    copied,
    ours,
    parameters_for,
    shapes_of,
    take_steps,
    torchs,
)
from training import gradients, set_gradients

# A schedule's learning rates are far from the defaults: weight decay and signs add up.
OF_WAY = {name: 1e-4 for name in INFOS} | {"Muon": 1e-2}
# A momentum that may be 0: then a job has no array for it, and cannot get one later.
MAY_LACK_MOMENTUM = ("RMSprop", "SGD")

every_optimizer = pytest.mark.parametrize("name", list(INFOS))


def pair(name: str, seed: int, **options):
    """Ours, torch's, and what both begin with."""
    start = parameters_for(name, seed)
    mine, theirs = copied(start), copied(start)
    return (ours(name)(mine, **options), mine), (torchs(name)(theirs, **options), theirs), start


def without(group: dict) -> dict:
    return {key: value for key, value in group.items() if key != "params"}


@every_optimizer
def test_param_groups(name, seed):
    """Keys in torch's order, values of its types, parameters themselves in the given order."""
    start = parameters_for(name, seed)
    made = []
    for kind in (ours(name), torchs(name)):
        parameters = copied(start)
        optimizer = kind(
            [
                {"params": iter(parameters[:1]), "lr": 0.5, "tag": "head"},
                {"params": parameters[1]},
            ],
            weight_decay=0.25,
        )
        optimizer.add_param_group({"weight_decay": 0.125, "params": parameters[2:]})
        made.append((optimizer, parameters))
    (optimizer, mine), (reference, _) = made
    assert len(optimizer.param_groups) == 3
    for group, expected in zip(optimizer.param_groups, reference.param_groups):
        assert list(group) == list(expected)
        assert without(group) == without(expected)
        assert [type(value) for value in group.values()] == [
            type(value) for value in expected.values()
        ]
    given = [mine[:1], mine[1:2], mine[2:]]
    for group, parameters in zip(optimizer.param_groups, given):
        assert len(group["params"]) == len(parameters)
        assert all(one is other for one, other in zip(group["params"], parameters))
    assert optimizer.defaults == reference.defaults
    title, _job, _endpoint, _step, *groups = repr(optimizer).splitlines()
    assert [title, *groups] == repr(reference).splitlines()


@every_optimizer
def test_groups_that_cannot_be_added(name):
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = ours(name)([parameter])
    other = torch.nn.Parameter(torch.ones(2, 2))
    for group, error, text in (
        ([other], TypeError, "param_group must be a dict"),
        ({"params": {other}}, TypeError, "ordered collections"),
        ({"params": ["other"]}, TypeError, "can only optimize Tensors"),
        ({"params": [other * 2]}, ValueError, "non-leaf"),
        ({"params": [parameter]}, ValueError, "more than one parameter group"),
    ):
        with pytest.raises(error, match=text):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    assert optimizer.committed_step == 1


@every_optimizer
def test_add_param_group_between_steps(name, seed):
    """Adding equals training both from the beginning, the added one without gradients till then."""
    start = parameters_for(name, seed)
    mine, expected = copied(start), copied(start)
    optimizer = ours(name)(mine[:-1])
    reference = ours(name)(expected)
    stream = list(gradients(shapes_of(name), seed, 6))
    for step, values in enumerate(stream):
        if step == 3:
            optimizer.add_param_group({"params": mine[-1:]})
        set_gradients(mine, values)
        set_gradients(expected, values if step >= 3 else [*values[:-1], None])
        optimizer.step()
        reference.step()
    assert optimizer.committed_step == 6
    assert all(map(torch.equal, mine, expected))


@every_optimizer
def test_closure(name, seed):
    """Called once, with gradients on; what it returns is returned."""
    (parameter,) = [torch.nn.Parameter(torch.full((2, 2), 2.0))]
    optimizer = ours(name)([parameter])
    losses = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        losses.append(parameter.square().sum())
        losses[-1].backward()
        return losses[-1]

    with torch.no_grad():
        assert optimizer.step(closure) is losses[0]
        assert optimizer.step(closure=closure) is losses[1]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert optimizer.step() is None


@pytest.mark.parametrize("set_to_none", [True, False])
@every_optimizer
def test_zero_grad(name, set_to_none, seed):
    """No gradient, no update; one of zeros decays moments and may go on moving."""
    (optimizer, mine), (reference, theirs), start = pair(name, seed)
    runs = [(optimizer, mine), (reference, theirs)]
    take_steps(name, runs, seed, 3, missing=0)
    before = copied(mine)
    for each, parameters in runs:
        each.zero_grad(set_to_none=set_to_none)
        for parameter in parameters:
            if set_to_none:
                assert parameter.grad is None
            else:
                assert not parameter.grad.any()
        each.step()
        each.step()
    assert all(map(torch.equal, mine, before)) or not set_to_none
    steps = optimizer.fetch_state(mine[0])["step"]
    assert steps == (3 if set_to_none else 5) or name in ("Muon", "SGD")
    assert_follows(mine, theirs, start, OF_WAY[name])


@every_optimizer
def test_without_gradients_step_does_nothing(name, seed):
    parameters = parameters_for(name, seed)
    before = copied(parameters)
    optimizer = ours(name)(parameters, weight_decay=0.5)
    optimizer.step()
    for parameter in parameters:
        parameter.requires_grad_(False)
    optimizer.step()
    assert all(map(torch.equal, parameters, before))
    assert optimizer.committed_step == 2


@every_optimizer
def test_step_hooks(name, seed):
    """Global ones first, each in the order of registering; removed ones are silent."""
    parameters = parameters_for(name, seed)
    optimizer = ours(name)(parameters)
    heard = []

    def hear(what):
        return lambda each, args, kwargs: heard.append((what, each.committed_step))

    everywhere = [
        register_optimizer_step_pre_hook(hear("everywhere before")),
        register_optimizer_step_post_hook(hear("everywhere after")),
    ]
    optimizer.register_step_pre_hook(hear("before"))
    optimizer.register_step_pre_hook(hear("also before"))
    optimizer.register_step_post_hook(hear("after"))
    gone = optimizer.register_step_post_hook(hear("never"))
    gone.remove()
    take_steps(name, [(optimizer, parameters)], seed, 1)
    for handle in everywhere:
        handle.remove()
    first = heard.copy()
    assert [what for what, _ in first[:3]] == ["everywhere before", "before", "also before"]
    assert {step for _, step in first[:3]} == {0}
    assert sorted(what for what, _ in first[3:]) == ["after", "everywhere after"]
    assert {step for _, step in first[3:]} == {1}
    heard.clear()
    take_steps(name, [(optimizer, parameters)], seed, 1)
    assert heard == [("before", 1), ("also before", 1), ("after", 2)]


@every_optimizer
def test_a_pre_hook_may_replace_the_arguments(name):
    optimizer = ours(name)([torch.nn.Parameter(torch.ones(2, 2))])
    wrong = optimizer.register_step_pre_hook(lambda each, args, kwargs: 7)
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        optimizer.step()
    wrong.remove()
    optimizer.register_step_pre_hook(lambda each, args, kwargs: ((each, lambda: 7), {}))
    assert optimizer.step() == 7


@every_optimizer
def test_the_profiler_sees_it(name, seed):
    parameters = parameters_for(name, seed)
    optimizer = ours(name)(parameters)
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        take_steps(name, [(optimizer, parameters)], seed, 2)
        optimizer.zero_grad()
    counts = {each.key: each.count for each in profile.key_averages()}
    assert counts[f"Optimizer.step#{name}.step"] == 2
    assert counts[f"Optimizer.zero_grad#{name}.zero_grad"] == 1


@every_optimizer
def test_found_inf_of_a_grad_scaler(name, seed):
    """GradScaler leaves found_inf on an optimizer that supports it: 1 skips, 0 does not."""
    parameters = parameters_for(name, seed)
    optimizer = ours(name)(parameters, overlap=True)
    assert optimizer._step_supports_amp_scaling
    before = copied(parameters)
    for found_inf in (1.0, 0.0):
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found_inf)
        take_steps(name, [(optimizer, parameters)], seed, 1, missing=0)
        assert optimizer.last_outcome.applied == (found_inf == 0)
        assert all(map(torch.equal, parameters, before)) == (found_inf == 1)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@every_optimizer
def test_copies(name, how, seed):
    """Copies have torch's public attributes, ours and the state, and go on alone."""
    parameters = parameters_for(name, seed)
    optimizer = ours(name)(parameters, lr=0.0625, max_norm=5.0)
    take_steps(name, [(optimizer, parameters)], seed, 3)
    whole = (optimizer, parameters)
    other, others = copy.deepcopy(whole) if how == "deepcopy" else pickle.loads(pickle.dumps(whole))

    def public(each):
        return {key for key in vars(each) if not key.startswith("_")}

    assert public(other) == public(optimizer)
    assert other.param_groups[0]["params"][0] is others[0]
    assert without(other.param_groups[0]) == without(optimizer.param_groups[0])
    other.attach()
    take_steps(name, [(optimizer, parameters), (other, others)], seed + 1, 3)
    assert all(map(torch.equal, parameters, others))
    assert other.job != optimizer.job
    take_steps(name, [(optimizer, parameters)], seed + 2, 1, missing=0)
    assert not all(map(torch.equal, parameters, others))


def train_on_schedule(name, runs, schedules, seed) -> None:
    """Trains both runs, which must see the same learning rates, and these must change."""
    seen = []
    for step in range(20):
        rates = [[group["lr"] for group in each.param_groups] for each, _ in runs]
        assert rates[0] == rates[1]
        seen.append(tuple(rates[0]))
        take_steps(name, runs, seed + step, 1)
        for schedulers in schedules:
            for scheduler in schedulers:
                watches = isinstance(scheduler, ReduceLROnPlateau)
                scheduler.step(*([1.0] if watches else []))
    assert len(set(seen)) > 1


TABLE_SCHEDULES = [
    pytest.param(name, makers, id=f"{name}-{index}")
    for name, info in INFOS.items()
    for index, makers in enumerate(info.scheduler_inputs)
]


@pytest.mark.parametrize(("name", "makers"), TABLE_SCHEDULES)
def test_schedules_of_torchs_table(name, makers, seed):
    ours_run, torchs_run, start = pair(name, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step() that the schedule did not see, for one
        schedules = [[make(each) for make in makers] for each, _ in (ours_run, torchs_run)]
        train_on_schedule(name, [ours_run, torchs_run], schedules, seed)
    (optimizer, mine), (reference, theirs) = ours_run, torchs_run
    assert without(optimizer.param_groups[0]) == without(reference.param_groups[0])
    assert_follows(mine, theirs, start, OF_WAY[name])


def plateau(each):
    return ReduceLROnPlateau(each, patience=1, factor=0.5)


def per_group(each):
    return LambdaLR(each, [lambda step: 0.9**step])


def one_cycle(each):
    return OneCycleLR(each, 0.05, total_steps=30, cycle_momentum=True)


def one_cycle_of_lr(each):
    return OneCycleLR(each, 0.05, total_steps=30, cycle_momentum=False)


def cyclic(each):
    return CyclicLR(each, 1e-3, 1e-2, step_size_up=4, cycle_momentum=True, base_momentum=0.7)


@pytest.mark.parametrize("make", [plateau, per_group, one_cycle, one_cycle_of_lr, cyclic])
@every_optimizer
def test_schedules(name, make, seed):
    """A schedule gives torch's rates where it takes the optimizer; momentum and betas cycle too."""
    options = {"momentum": 0.9} if name in MAY_LACK_MOMENTUM else {}
    ours_run, torchs_run, start = pair(name, seed, **options)
    runs = (ours_run, torchs_run)
    try:
        make(torchs_run[0])
    except ValueError as refusal:  # one that has no momentum, in torch's words
        with pytest.raises(ValueError, match=str(refusal)):
            make(ours_run[0])
        return
    ours_run, torchs_run, start = pair(name, seed, **options)
    runs = [ours_run, torchs_run]
    schedules = [[make(each)] for each, _ in runs]
    train_on_schedule(name, runs, schedules, seed)
    (optimizer, mine), (reference, theirs) = runs
    assert without(optimizer.param_groups[0]) == without(reference.param_groups[0])
    if make in (one_cycle, cyclic):
        moved = {"betas", "momentum"} & optimizer.param_groups[0].keys()
        assert any(optimizer.param_groups[0][k] != optimizer.defaults[k] for k in moved)
    assert_follows(mine, theirs, start, OF_WAY[name])


@pytest.mark.parametrize("name", MAY_LACK_MOMENTUM)
def test_a_schedule_cannot_bring_momentum_to_a_job_without(name, seed):
    """Refused by name at step(): torch would make the array then, a job has its arrays."""
    parameters = parameters_for(name, seed)
    optimizer = ours(name)(parameters)
    one_cycle(optimizer)
    with pytest.raises(ValueError, match="momentum of param_groups.* registered without it"):
        take_steps(name, [(optimizer, parameters)], seed, 1)


@every_optimizer
def test_a_schedule_counts_steps(name):
    """A scheduler that steps first warns with torch's optimizers, and with ours."""
    optimizer = ours(name)([torch.nn.Parameter(torch.ones(2, 2))])
    scheduler = LambdaLR(optimizer, lambda step: 0.5)
    with pytest.warns(UserWarning, match="lr_scheduler.step.* before .*optimizer.step"):
        scheduler.step()
    optimizer = ours(name)([torch.nn.Parameter(torch.ones(2, 2))])
    scheduler = LambdaLR(optimizer, lambda step: 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
