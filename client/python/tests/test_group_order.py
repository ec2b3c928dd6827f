"""Param groups that are reversed, replaced, regrouped or taken away: state follows tensors."""

from __future__ import annotations

import copy

import optstate
import pytest
import torch
from training import largest_difference, small_model, train


def two_groups(optimizer_class, model, **options):
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[:2], "lr": 0.01},
        {"params": parameters[2:4], "lr": 0.003, "weight_decay": 0.1},
        {"params": parameters[4:], "lr": 0.001},
    ]
    return optimizer_class(groups, **options)


def reverse(optimizer):
    optimizer.param_groups.reverse()


def replace(optimizer):
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups[:] = groups[1:] + groups[:1]


def rebind(optimizer):
    optimizer.param_groups = list(reversed(optimizer.param_groups))


def reverse_within(optimizer):
    for group in optimizer.param_groups:
        group["params"] = list(reversed(group["params"]))


SURGERIES = (reverse, replace, rebind, reverse_within)
by_name = pytest.mark.parametrize("surgery", SURGERIES, ids=lambda each: each.__name__)


@by_name
def test_state_follows_tensors(surgery):
    pairs = []
    for package in (optstate, torch.optim):
        model = small_model()
        pairs.append((model, two_groups(package.AdamW, model)))
    (ours, optimizer), (theirs, reference) = pairs
    saved = []
    for model, each in pairs:
        train(model, each, range(3))
        surgery(each)
        each.param_groups[0]["lr"] = 0.02
        saved.append(copy.deepcopy(each.state_dict()))
        train(model, each, range(3, 6))
    for index, entry in saved[1]["state"].items():
        for key, value in entry.items():
            mine = saved[0]["state"][index][key]
            assert torch.allclose(mine, value, atol=1e-6), (index, key)
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        fetched = optimizer.fetch_state(mine)
        assert torch.allclose(fetched["exp_avg"], reference.state[other]["exp_avg"], atol=1e-6)
    assert largest_difference(ours, theirs) < 1e-5
    # The positions of a checkpoint are those of the groups now, as in torch.
    for (model, each), state in zip(pairs, saved):
        each.load_state_dict(state)
        train(model, each, range(6, 9))
    assert largest_difference(ours, theirs) < 1e-5


@by_name
@pytest.mark.parametrize("named", [False, True])
def test_a_group_is_added_after(surgery, named, job):
    pairs = []
    for package in (optstate, torch.optim):
        model = small_model()
        options = {"job": job} if named and package is optstate else {}
        each = two_groups(package.AdamW, model, **options)
        train(model, each, range(2))
        surgery(each)
        extra = torch.nn.Parameter(torch.ones(3))
        each.add_param_group({"params": [extra], "lr": 0.1})
        extra.grad = torch.ones(3)
        for step in range(2, 5):
            train(model, each, [step])
            extra.grad = torch.full((3,), float(step))
        pairs.append((model, each, extra))
    (ours, _, mine), (theirs, _, other) = pairs
    assert largest_difference(ours, theirs) < 1e-5 and torch.allclose(mine, other, atol=1e-6)


def test_a_group_that_is_gone():
    model = small_model()
    optimizer = two_groups(optstate.AdamW, model)
    train(model, optimizer, range(3))
    expected = optimizer.state_dict()["state"]
    gone = optimizer.param_groups.pop(0)
    saved = optimizer.state_dict()["state"]
    assert list(saved) == [0, 1, 2, 3]
    for index, entry in saved.items():
        assert all(torch.equal(entry[key], expected[index + 2][key]) for key in entry)
    first = optimizer.fetch_state(model[2].weight)
    assert torch.equal(first["exp_avg"], expected[2]["exp_avg"])
    with pytest.raises(KeyError):
        optimizer.fetch_state(gone["params"][0])
    for use in (optimizer.step, lambda: optimizer.load_state_dict(optimizer.state_dict())):
        with pytest.raises(RuntimeError, match="lost parameters"):
            use()
    optimizer.param_groups.append(gone)
    train(model, optimizer, range(3, 5))
    assert optimizer.committed_step == 5


def test_a_parameter_that_moves_to_another_group_is_refused():
    """The parameter has its group's memory and options, although the order of all is unchanged."""
    model = small_model()
    optimizer = two_groups(optstate.AdamW, model)
    train(model, optimizer, range(2))
    first, second = optimizer.param_groups[:2]
    second["params"].insert(0, first["params"].pop())
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['params'\] has other tensors"):
        train(model, optimizer, range(2, 3))
    assert optimizer.committed_step == 2


def test_a_re_attach_has_the_jobs_order(job):
    model = small_model()
    optimizer = two_groups(optstate.AdamW, model, job=job)
    train(model, optimizer, range(2))
    reverse(optimizer)
    train(model, optimizer, range(2, 4))
    optimizer.close()
    again = small_model(seed=1)
    optimizer = two_groups(optstate.AdamW, again, job=job)
    assert optimizer.committed_step == 4 and largest_difference(model, again) == 0


def test_a_job_that_is_deleted_while_it_grows_is_not_made_anew(job, daemon, monkeypatch):
    """A job made anew would let training go on without its state."""
    model = small_model()
    optimizer = two_groups(optstate.AdamW, model, job=job)
    train(model, optimizer, range(3))
    served = optimizer._served
    detach = served.detach

    def detach_and_delete(because, **options):
        detach(because, **options)
        daemon.run_optctl("delete", "job", job)

    monkeypatch.setattr(served, "detach", detach_and_delete)
    with pytest.raises(RuntimeError, match="was deleted while new parameters"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    with pytest.raises(RuntimeError, match="cannot be used: add_param_group\\(\\) failed"):
        optimizer.step()
