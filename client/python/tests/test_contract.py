"""torch's contract of an optimizer, and what ours adds to it.

Every optimizer with torch's own test inputs: test_torch_*.py.
"""

from __future__ import annotations

import copy
import pickle
import warnings

import optstate
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import largest_difference, loss_of, small_model, train


def test_is_torchs_optimizer():
    optimizer = optstate.AdamW(small_model().parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, torch.optim.Optimizer)
    reference = torch.optim.AdamW(small_model().parameters())
    title, _job, _endpoint, _step, *groups = repr(optimizer).splitlines()
    assert [title, *groups] == repr(reference).splitlines()
    assert optimizer.defaults == reference.defaults


def test_closure():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        first = optimizer.step(closure)
    assert first is calls[0]
    assert optimizer.step(closure) < first
    assert optimizer.step() is None


def test_step_hooks():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    heard = []
    before = optimizer.register_step_pre_hook(
        lambda opt, args, kwargs: heard.append(("before", opt.committed_step))
    )
    optimizer.register_step_post_hook(
        lambda opt, args, kwargs: heard.append(("after", opt.committed_step))
    )
    everywhere = register_optimizer_step_post_hook(
        lambda opt, args, kwargs: heard.append("everywhere")
    )
    train(model, optimizer, range(1))
    before.remove()
    everywhere.remove()
    train(model, optimizer, range(1))
    assert heard == [("before", 0), ("after", 1), "everywhere", ("after", 2)]


def test_pre_hook_may_change_the_arguments():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: 7), {}))
    assert optimizer.step() == 7


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    """A gradient of zero updates (moments decay), none does not."""
    ours, torchs = small_model(), small_model()
    optimizer = optstate.AdamW(ours.parameters())
    reference = torch.optim.AdamW(torchs.parameters())
    for model, each in ((ours, optimizer), (torchs, reference)):
        train(model, each, range(3))
        each.zero_grad(set_to_none=set_to_none)
        each.step()
        each.step()
    assert largest_difference(ours, torchs) < 1e-6
    assert optimizer.fetch_state(ours[0].weight)["step"] == (3 if set_to_none else 5)


def test_a_parameter_without_gradient_is_left_alone():
    ours, torchs = small_model(), small_model()
    optimizer = optstate.AdamW(ours.parameters())
    reference = torch.optim.AdamW(torchs.parameters())
    for step in range(12):
        for model, each in ((ours, optimizer), (torchs, reference)):
            each.zero_grad()
            loss_of(model, step).backward()
            if step % 3:
                model[0].weight.grad = None
            if step % 2:
                model[3].bias.grad = None
            each.step()
    assert largest_difference(ours, torchs) < 1e-5
    assert optimizer.fetch_state(ours[0].weight)["step"] == 4
    assert optimizer.fetch_state(ours[3].bias)["step"] == 6
    assert optimizer.fetch_state(ours[3].weight)["step"] == 12


def test_frozen_parameters_stay_and_can_thaw():
    ours, torchs = small_model(), small_model()
    for model in (ours, torchs):
        model[0].requires_grad_(False)
    optimizer = optstate.AdamW(ours.parameters())
    reference = torch.optim.AdamW(torchs.parameters())
    frozen = ours[0].weight.detach().clone()
    train(ours, optimizer, range(3))
    train(torchs, reference, range(3))
    assert torch.equal(ours[0].weight, frozen)
    for model in (ours, torchs):
        model[0].requires_grad_(True)
    train(ours, optimizer, range(3))
    train(torchs, reference, range(3))
    assert largest_difference(ours, torchs) < 1e-5
    assert not torch.equal(ours[0].weight, frozen)


@pytest.mark.parametrize("named", [False, True], ids=["private", "named"])
@pytest.mark.parametrize("after_steps", [0, 4])
def test_add_param_group(named, after_steps, job):
    ours, torchs = small_model(), small_model()
    optimizer = optstate.AdamW(ours.parameters(), job=job if named else None)
    reference = torch.optim.AdamW(torchs.parameters())
    train(ours, optimizer, range(after_steps))
    train(torchs, reference, range(after_steps))
    added = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))]
    optimizer.add_param_group({"params": added[0], "lr": 0.1, "amsgrad": True})
    reference.add_param_group({"params": added[1], "lr": 0.1, "amsgrad": True})
    assert optimizer.committed_step == after_steps
    for step in range(5):
        for model, each, extra in ((ours, optimizer, added[0]), (torchs, reference, added[1])):
            each.zero_grad()
            (loss_of(model, step) + (extra * step).square().sum()).backward()
            each.step()
    assert optimizer.committed_step == after_steps + 5
    assert largest_difference(ours, torchs) < 1e-5
    torch.testing.assert_close(added[0], added[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("named", [False, True], ids=["private", "named"])
def test_groups_without_parameters(named, job):
    model, expected = small_model(), small_model()
    groups = [{"params": []}, {"params": list(model.parameters()), "lr": 0.01}]
    optimizer = optstate.AdamW(groups, job=job if named else None)
    train(model, optimizer, range(2))
    optimizer.add_param_group({"params": []})
    train(model, optimizer, range(2, 4))
    train(expected, optstate.AdamW(expected.parameters(), lr=0.01), range(4))
    assert largest_difference(model, expected) == 0
    assert len(optimizer.state_dict()["param_groups"]) == 3


def test_a_refused_param_group_changes_nothing():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    bad = [
        torch.zeros(2, dtype=dtype, requires_grad=True)
        for dtype in (torch.float64, torch.complex64)
    ]
    for tensor in bad:
        with pytest.raises(TypeError):
            optimizer.add_param_group({"params": [tensor]})
    with pytest.raises(ValueError, match="differentiable"):
        optimizer.add_param_group({"params": [torch.zeros(2)], "differentiable": True})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, range(2))
    assert optimizer.committed_step == 2


def test_training_goes_on_after_a_param_group_that_does_not_fit(job):
    model, expected = small_model(), small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job)
    train(model, optimizer, range(2))
    huge = torch.nn.Parameter(torch.zeros(1).expand(1 << 36))  # one element of memory
    with pytest.raises(optstate.ResourceExhaustedError, match="bytes"):
        optimizer.add_param_group({"params": [huge]})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, range(2, 4))
    assert optimizer.committed_step == 4
    train(expected, optstate.AdamW(expected.parameters()), range(4))
    assert largest_difference(model, expected) == 0


SCHEDULERS = {
    "OneCycleLR": lambda each: torch.optim.lr_scheduler.OneCycleLR(each, 0.1, total_steps=40),
    "CosineAnnealingLR": lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 30),
    "LambdaLR": lambda each: torch.optim.lr_scheduler.LambdaLR(
        each, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]
    ),
    "SequentialLR": lambda each: torch.optim.lr_scheduler.SequentialLR(
        each,
        [
            torch.optim.lr_scheduler.LinearLR(each, 0.1, 1.0, 10),
            torch.optim.lr_scheduler.ExponentialLR(each, 0.9),
        ],
        [10],
    ),
}


def _grouped(optimizer_class, model):
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    return optimizer_class(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2
    )


@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
def test_schedulers(scheduler):
    ours, torchs = small_model(), small_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that optimizer.step() is not seen, for one
        optimizer, reference = _grouped(optstate.AdamW, ours), _grouped(torch.optim.AdamW, torchs)
        train(ours, optimizer, range(35), SCHEDULERS[scheduler](optimizer))
        train(torchs, reference, range(35), SCHEDULERS[scheduler](reference))
    assert largest_difference(ours, torchs) < 2e-5
    for mine, theirs in zip(optimizer.param_groups, reference.param_groups):
        assert mine["lr"] == theirs["lr"]


def test_reduce_on_plateau():
    ours, torchs = small_model(), small_model()
    for model, optimizer_class in ((ours, optstate.AdamW), (torchs, torch.optim.AdamW)):
        optimizer = _grouped(optimizer_class, model)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        for step in range(20):
            train(model, optimizer, [step])
            scheduler.step(1.0)
        assert optimizer.param_groups[0]["lr"] < 1e-2
    assert largest_difference(ours, torchs) < 1e-5


def test_copies_and_pickles_go_on_when_they_are_attached():
    """A copy has the state and is an optimizer of its own, as in torch; no use of it but
    attach() makes a job."""
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, max_norm=1.0)
    train(model, optimizer, range(5))
    copied = copy.deepcopy((model, optimizer))
    unpickled = pickle.loads(pickle.dumps((model, optimizer)))
    saved = optimizer.state_dict()
    for other_model, other in (copied, unpickled):
        assert other.job is None and other.max_norm == 1.0
        assert other.state_dict()["param_groups"] == saved["param_groups"]
        uses = [
            other.step,
            other.abort_step,
            other.upload_parameters,
            other.gradient_norms,
            lambda other=other: other.loss_scale,
            lambda other=other: other.load_state_dict(saved),
            lambda other=other: other.fetch_state(other.param_groups[0]["params"][0]),
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match=r"copied or unpickled: call attach\(\)"):
                use()
        assert other.job is None and other.committed_step == 0
        other.attach()
        train(other_model, other, range(5, 10))
        assert other.job != optimizer.job
    assert optimizer.committed_step == 5
    train(model, optimizer, range(5, 10))
    for other_model, other in (copied, unpickled):
        assert largest_difference(model, other_model) == 0
        state = other.state_dict()["state"]
        for index, entry in optimizer.state_dict()["state"].items():
            assert all(torch.equal(entry[key], state[index][key]) for key in entry)


def test_an_unpickled_optimizer_can_attach_to_a_job(job):
    model = small_model()
    with optstate.AdamW(model.parameters(), job=job) as optimizer:
        train(model, optimizer, range(3))
        old_model, old = pickle.loads(pickle.dumps((model, optimizer)))
        train(model, optimizer, range(3, 6))
    old.attach(job=job)
    assert old.committed_step == 6
    assert largest_difference(old_model, model) == 0
    with pytest.raises(RuntimeError, match="attached to job"):
        old.attach(job=job)


def test_tensors_that_are_not_contiguous():
    torch.manual_seed(1)
    start = torch.randn(4, 6, 3, 3)
    ours = torch.nn.Parameter(start.clone().to(memory_format=torch.channels_last))
    transposed = torch.nn.Parameter(torch.randn(7, 5).t())
    torchs = [torch.nn.Parameter(each.detach().clone()) for each in (ours, transposed)]
    assert not ours.is_contiguous() and not transposed.is_contiguous()
    optimizer = optstate.AdamW([ours, transposed], lr=0.01, accumulate=True)
    reference = torch.optim.AdamW(torchs, lr=0.01)
    for step in range(5):
        for parameters in ([ours, transposed], torchs):
            torch.manual_seed(step)
            for parameter in parameters:
                gradient = torch.randn(parameter.shape)
                parameter.grad = gradient.to(memory_format=torch.preserve_format)
            # A gradient with strides of its own.
            parameters[0].grad = parameters[0].grad.transpose(2, 3).contiguous().transpose(2, 3)
        reference.step()
        halves = [parameter.grad / 2 for parameter in (ours, transposed)]
        for parameter, half in zip((ours, transposed), halves):
            parameter.grad = half
        optimizer.accumulate_step()
        for parameter, half in zip((ours, transposed), halves):
            parameter.grad = half
        optimizer.step()
    assert ours.is_contiguous(memory_format=torch.channels_last)
    for mine, theirs in zip((ours, transposed), torchs):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    state = optimizer.state_dict()["state"]
    for index, entry in reference.state_dict()["state"].items():
        torch.testing.assert_close(state[index]["exp_avg"], entry["exp_avg"])


def test_autograd_sees_that_parameters_changed():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optstate.AdamW([parameter])
    loss = (parameter**2).sum()
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
