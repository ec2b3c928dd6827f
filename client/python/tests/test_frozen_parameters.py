"""Parameters that nothing updates: no state, any dtype, until they have a gradient."""

from __future__ import annotations

import copy

import optstate
import pytest
import ranks
import torch
from optstate._torch.job.attachment import Attachment
from training import bits, largest_difference, loss_of, small_model, train

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]


def frozen_model(*names: str) -> torch.nn.Module:
    model = small_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
    return model


def thaw(model: torch.nn.Module, *names: str) -> None:
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(True)


def in_job(daemon, job) -> list[str]:
    return [each["name"] for each in daemon.parameters(job)]


def assert_same_state(ours, torchs) -> None:
    ours, torchs = ours.state_dict(), torchs.state_dict()
    assert [g["params"] for g in ours["param_groups"]] == [
        g["params"] for g in torchs["param_groups"]
    ]
    assert ours["state"].keys() == torchs["state"].keys()
    for index, entry in torchs["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(ours["state"][index][key], value, rtol=1e-4, atol=1e-7)


def test_as_torchs_without_state(job, daemon):
    ours, torchs = frozen_model(*NAMES[:3]), frozen_model(*NAMES[:3])
    optimizer = optstate.AdamW(ours.parameters(), lr=0.01, job=job, model=ours)
    reference = torch.optim.AdamW(torchs.parameters(), lr=0.01)
    train(ours, optimizer, range(5))
    train(torchs, reference, range(5))
    assert largest_difference(ours, torchs) < 1e-6
    assert_same_state(optimizer, reference)
    assert in_job(daemon, job) == NAMES[3:]
    assert optimizer.fetch_state(ours[0].weight) == {}
    assert dict(optimizer.state.get(ours[0].weight, {})) == {}


class Quantised(torch.Tensor):
    """A tensor subclass that is used for nothing but what it says."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        allowed = ("requires_grad", "grad", "is_leaf", "__get__", "retains_grad", "detach")
        if not any(name in str(function) for name in allowed):
            raise AssertionError(f"{function} of a quantised tensor")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float64])
def test_frozen_tensors_may_be_of_any_kind(dtype, job, daemon):
    model = small_model()
    other = torch.nn.Parameter(torch.ones(3, 2).to(dtype), requires_grad=False)
    subclass = torch.ones(4, dtype=torch.uint8).as_subclass(Quantised)
    meta = torch.nn.Parameter(torch.ones(2, device="meta"), requires_grad=False)
    parameters = [other, *model.parameters(), subclass, meta]
    optimizer = optstate.AdamW(parameters, lr=0.01, job=job)
    torchs = small_model()
    reference = torch.optim.AdamW(
        [other.clone().requires_grad_(False), *torchs.parameters()], lr=0.01
    )
    train(model, optimizer, range(4))
    train(torchs, reference, range(4))
    assert largest_difference(model, torchs) < 1e-6
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["params"] == list(range(9))
    assert set(saved["state"]) == set(range(1, 7))
    assert len(in_job(daemon, job)) == 6
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(4, 6))
    train(torchs, reference, range(4, 6))
    assert largest_difference(model, torchs) < 1e-6


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"accumulate": True}])
def test_thawing_layer_by_layer(options, private, named, job, daemon):
    ours, torchs = frozen_model(*NAMES[:4]), frozen_model(*NAMES[:4])
    job = None if private else job
    model = ours if named else None
    optimizer = optstate.AdamW(ours.parameters(), lr=0.01, job=job, model=model, **options)
    reference = torch.optim.AdamW(torchs.parameters(), lr=0.01)
    for step in range(9):
        for at, names in ((3, NAMES[2:4]), (6, NAMES[:2])):
            if step == at:
                thaw(ours, *names)
                thaw(torchs, *names)
        train(ours, optimizer, [step])
        train(torchs, reference, [step])
        assert optimizer.committed_step == step + 1
    assert largest_difference(ours, torchs) < 1e-6
    assert_same_state(optimizer, reference)
    if not private and named:
        assert in_job(daemon, job) == [*NAMES[4:], *NAMES[2:4], *NAMES[:2]]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("now", ["frozen again", "thawed from the beginning", "others frozen"])
def test_attaching_again_to_a_job_that_grew(now, named, job):
    """The job's parameters are known by their names, whatever the script freezes at its start."""

    def attached(model):
        return optstate.AdamW(model.parameters(), lr=0.01, job=job, model=model if named else None)

    whole = frozen_model(*NAMES[:3])
    reference = torch.optim.AdamW(whole.parameters(), lr=0.01)
    model = frozen_model(*NAMES[:3])
    with attached(model) as optimizer:
        for each, stepped in ((model, optimizer), (whole, reference)):
            train(each, stepped, range(2))
            thaw(each, "0.bias")
            train(each, stepped, range(2, 4))
    frozen = {
        "frozen again": NAMES[:3],
        "thawed from the beginning": [NAMES[0], NAMES[2]],
        "others frozen": [NAMES[0], NAMES[2], NAMES[5]],
    }[now]
    model = frozen_model(*frozen)
    with attached(model) as optimizer:
        assert optimizer.committed_step == 4
        assert largest_difference(model, whole) < 1e-6
        assert optimizer.fetch_state(model[0].bias)["step"] == 2
        thaw(model, "0.bias", "3.bias")
        train(model, optimizer, range(4, 7))
    train(whole, reference, range(4, 7))
    assert largest_difference(model, whole) < 1e-6


def test_freezing_later_keeps_the_job(job):
    """A parameter that a job has, and a new script holds frozen, waits there with its state."""
    model = small_model()
    with optstate.AdamW(model.parameters(), lr=0.01, job=job, model=model) as optimizer:
        train(model, optimizer, range(3))
    again = frozen_model(*NAMES[:2])
    with optstate.AdamW(again.parameters(), lr=0.01, job=job, model=again) as optimizer:
        assert largest_difference(again, model) == 0
        before = bits(list(again.parameters())[:2])
        train(again, optimizer, range(3, 5))
        assert bits(list(again.parameters())[:2]) == before
        assert optimizer.fetch_state(again[0].weight)["step"] == 3


def test_other_parameters_are_refused_as_before(job):
    model = frozen_model("0.weight")
    optstate.AdamW(model.parameters(), job=job, model=model).close()
    other = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    other[0].weight.requires_grad_(False)
    with pytest.raises(optstate.FailedPreconditionError, match="optctl delete job"):
        optstate.AdamW(other.parameters(), job=job, model=other)


def test_a_checkpoint_has_state_of_what_is_frozen_now(job):
    torchs = small_model()
    reference = torch.optim.AdamW(torchs.parameters(), lr=0.01)
    train(torchs, reference, range(3))
    ours = frozen_model("0.weight")
    ours.load_state_dict(torchs.state_dict())
    optimizer = optstate.AdamW(ours.parameters(), lr=0.01, job=job)
    optimizer.load_state_dict(reference.state_dict())
    assert_same_state(optimizer, reference)
    thaw(ours, "0.weight")
    train(ours, optimizer, range(3, 6))
    train(torchs, reference, range(3, 6))
    assert largest_difference(ours, torchs) < 1e-6


def frozen_job(job, **options):
    """A job at step 6 without 0.weight, and state of all at step 4 of another run."""
    source = small_model(seed=3)
    reference = torch.optim.AdamW(source.named_parameters(), lr=0.01)
    train(source, reference, range(4))
    model = frozen_model("0.weight")
    with optstate.AdamW(model.named_parameters(), lr=0.01, job=job) as optimizer:
        train(model, optimizer, range(6))
    again = frozen_model("0.weight")
    optimizer = optstate.AdamW(again.named_parameters(), lr=0.01, job=job, **options)
    return again, optimizer, source, reference.state_dict()


@pytest.mark.parametrize("refused", ["resume", "array", "option"])
def test_a_refused_load_does_not_extend_the_job(refused, job, daemon):
    model, optimizer, source, state = frozen_job(
        job, resume="error" if refused == "resume" else "checkpoint"
    )
    expected = copy.deepcopy(model)
    before, names = copy.deepcopy(optimizer.state_dict()), in_job(daemon, job)
    state = copy.deepcopy(state)
    if refused == "array":
        del state["state"][5]["exp_avg_sq"]
    elif refused == "option":
        state["param_groups"][0]["amsgrad"] = True
    error = RuntimeError if refused == "resume" else ValueError
    model.load_state_dict(source.state_dict())
    with pytest.raises(error, match={"resume": "resume=", "array": "exp_avg_sq"}.get(refused)):
        optimizer.load_state_dict(state)
    assert in_job(daemon, job) == names
    optimizer.close()
    with optstate.AdamW(model.named_parameters(), lr=0.01, job=job) as optimizer:
        for (name, mine), theirs in zip(model.named_parameters(), expected.parameters()):
            assert name == "0.weight" or torch.equal(mine, theirs)
        for index, entry in optimizer.state_dict()["state"].items():
            assert all(torch.equal(entry[key], before["state"][index][key]) for key in entry)


def test_the_job_that_goes_on_is_not_extended(job, daemon):
    model, optimizer, _, state = frozen_job(job, resume="job")
    expected, names = copy.deepcopy(model), in_job(daemon, job)
    with pytest.warns(UserWarning, match="goes on with its own state"):
        optimizer.load_state_dict(state)
    assert in_job(daemon, job) == names
    assert largest_difference(model, expected) == 0


def test_a_group_that_is_all_frozen_is_checked_before_the_job_is_extended(job, daemon):
    model = frozen_model("0.weight", "0.bias")

    def groups_of(model):
        return [{"params": list(each.parameters())} for each in (model[0], model[2], model[3])]

    optimizer = optstate.AdamW(groups_of(model), lr=0.01, job=job, model=model)
    source = small_model()
    reference = torch.optim.AdamW(groups_of(source), lr=0.01)
    train(source, reference, range(3))
    state, names = reference.state_dict(), in_job(daemon, job)
    state["param_groups"][0]["amsgrad"] = True
    for index in range(2):
        state["state"][index]["max_exp_avg_sq"] = state["state"][index]["exp_avg_sq"]
    with pytest.raises(ValueError, match=r"amsgrad of param_groups\[0\]"):
        optimizer.load_state_dict(state)
    assert in_job(daemon, job) == names


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("retries", [True, False])
def test_a_load_that_extends_the_job_is_whole_or_not_at_all(
    retries, private, job, daemon, monkeypatch
):
    model = frozen_model("0.weight")
    name = None if private else job
    optimizer = optstate.AdamW(model.named_parameters(), lr=0.01, job=name)
    train(model, optimizer, range(6))
    newest = copy.deepcopy(model)
    source = small_model(seed=3)
    reference = torch.optim.AdamW(source.named_parameters(), lr=0.01)
    train(source, reference, range(4))

    load = Attachment.load

    def interrupted(attachment, groups, parameters, entries=None):
        if entries and any(each and each["step"] == 4 for each in entries.values()):
            attachment.broken_load = "state"  # as load() notes it
            raise KeyboardInterrupt
        load(attachment, groups, parameters, entries)

    model.load_state_dict(source.state_dict())
    with monkeypatch.context() as patched:
        patched.setattr(Attachment, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(reference.state_dict())
    if retries:
        optimizer.load_state_dict(reference.state_dict())
        thaw(model, "0.weight")
        train(source, reference, range(4, 6))
        train(model, optimizer, range(4, 6))
        assert largest_difference(model, source) < 1e-5
        return
    optimizer.load_state_dict(optimizer.state_dict())
    for mine, theirs in list(zip(model.parameters(), newest.parameters()))[1:]:
        assert torch.equal(mine, theirs)


def test_a_copy_keeps_state_of_what_was_frozen_later():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(3))
    model[0].weight.requires_grad_(False)
    other, copied = copy.deepcopy((model, optimizer))
    copied.attach()
    assert copied.fetch_state(other[0].weight)["step"] == 3
    for each, stepped in ((model, optimizer), (other, copied)):
        thaw(each, "0.weight")
        train(each, stepped, range(3, 5))
    assert largest_difference(model, other) == 0


def test_groups_of_frozen_parameters(job, daemon):
    """A group that is frozen whole, before and after construction."""

    def groups(model):
        return [
            {"params": [model[0].weight], "lr": 0.02},
            {"params": [model[0].bias, model[2].weight]},
            {"params": [model[2].bias], "weight_decay": 0.1},
        ]

    runs = []
    for optimizer_class, options in ((torch.optim.AdamW, {}), (optstate.AdamW, {"job": job})):
        model = frozen_model("0.weight", "0.bias", "3.weight")
        optimizer = optimizer_class(groups(model), lr=0.01, **options)
        train(model, optimizer, range(2))
        optimizer.add_param_group({"params": [model[3].weight], "lr": 0.005})
        train(model, optimizer, range(2, 4))
        optimizer.add_param_group({"params": [model[3].bias], "lr": 0.1})
        thaw(model, "0.bias", "3.weight")
        train(model, optimizer, range(4, 6))
        thaw(model, "0.weight")
        optimizer.param_groups[0]["lr"] = 0.03
        train(model, optimizer, range(6, 8))
        runs.append((model, optimizer))
    (torchs, reference), (ours, optimizer) = runs
    assert largest_difference(ours, torchs) < 1e-6
    assert_same_state(optimizer, reference)


def test_a_gradient_without_requires_grad():
    """torch updates what has a gradient."""
    ours, torchs = (torch.zeros(4) for _ in range(2))
    for parameter, optimizer_class in ((ours, optstate.AdamW), (torchs, torch.optim.AdamW)):
        others = [torch.nn.Parameter(torch.ones(2))]
        optimizer = optimizer_class([parameter, *others], lr=0.1)
        for _ in range(2):
            parameter.grad = torch.ones(4)
            others[0].grad = torch.ones(2)
            optimizer.step()
    torch.testing.assert_close(ours, torchs)


def test_thawing_within_a_step_is_refused():
    model = frozen_model("0.weight")
    optimizer = optstate.AdamW(model.parameters(), accumulate=True)
    loss_of(model, 0).backward()
    optimizer.accumulate_step()
    thaw(model, "0.weight")
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="frozen parameter"):
        optimizer.step()
    optimizer.abort_step()
    optimizer.step()
    assert optimizer.committed_step == 1


def _thaws(connection, rank, job, endpoint):
    model = frozen_model(*NAMES[:3])
    optimizer = optstate.SGD(
        model.parameters(), lr=0.1, job=job, endpoint=endpoint, reduction="daemon"
    )
    for step in range(4):
        if step == 2:
            thaw(model, *NAMES[:3])
        optimizer.zero_grad()
        loss_of(model, 10 * step + rank).backward()
        optimizer.step()
    optimizer.close()
    again = frozen_model(*NAMES[:3])
    optimizer = optstate.SGD(
        again.parameters(), lr=0.1, job=job, endpoint=endpoint, reduction="daemon"
    )
    return optimizer.committed_step, largest_difference(again, model), bits(model.parameters())


def test_ranks_thaw_together(job, daemon):
    (step, difference, values), other = ranks.run(_thaws, 2, job, daemon.shm)
    assert step == 4 and difference == 0 and (step, difference, values) == other
    model = frozen_model(*NAMES[:3])
    reference = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            thaw(model, *NAMES[:3])
        reference.zero_grad()
        ((loss_of(model, 10 * step) + loss_of(model, 10 * step + 1)) / 2).backward()
        reference.step()
    ours = small_model()
    for parameter, value in zip(ours.parameters(), values):
        parameter.data = torch.frombuffer(bytearray(value), dtype=torch.float32).view_as(parameter)
    assert largest_difference(ours, model) < 1e-5


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
@pytest.mark.parametrize("private", [True, False])
def test_a_group_that_thaws_is_clipped_by_one_norm(private, norm_type, job):
    """Though the job has what was frozen as a group of its own, also after attaching again."""

    def groups_of(parameters):
        return [{"params": parameters[:1]}, {"params": parameters[1:], "max_norm": 0.5}]

    def made():
        return [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]

    def train(parameters, optimizer, steps):
        for step in steps:
            parameters[2].requires_grad_(step >= 2)
            for index, each in enumerate(parameters):
                value = (step + 1.0) * 10.0**index
                each.grad = torch.full_like(each, value) if each.requires_grad else None
            if not isinstance(optimizer, optstate.SGD):
                clipped = [each for each in parameters[1:] if each.grad is not None]
                torch.nn.utils.clip_grad_norm_(clipped, 0.5, norm_type)
            optimizer.step()

    ours, torchs = made(), made()
    ours[2].requires_grad_(False)
    reference = torch.optim.SGD(groups_of(torchs), lr=0.1, momentum=0.9)
    train(torchs, reference, range(6))
    options = {"lr": 0.1, "momentum": 0.9, "norm_type": norm_type}
    name = None if private else job
    optimizer = optstate.SGD(groups_of(ours), **options, job=name)
    train(ours, optimizer, range(4))
    if not private:
        optimizer.close()
        again = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
        named = [(str(index), each) for index, each in enumerate(again)]
        with pytest.warns(UserWarning, match="have no names"):
            optimizer = optstate.SGD(groups_of(again), **options, job=job)
        del named
        ours = again
    train(ours, optimizer, range(4, 6))
    for mine, theirs in zip(ours, torchs):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
