"""optimizer.state: read as torch's, with the user's own values, and with masters."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import MutableMapping

import optstate
import pytest
import torch
from optimizer_pairs import OPTIMIZERS, both, is_close
from training import small_model, train


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_reads_as_torchs(name):
    (ours, optimizer), (theirs, reference) = both(name)
    assert len(optimizer.state) == len(reference.state) and bool(optimizer.state)
    assert isinstance(optimizer.state, defaultdict)
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        assert mine in optimizer.state
        entry, expected = optimizer.state[mine], reference.state[other]
        assert isinstance(entry, MutableMapping) and isinstance(entry, dict)
        assert [key for key in entry if key in expected] == list(expected)
        assert set(entry) - set(expected) <= {"step"}
        for key, value in expected.items():
            assert is_close(entry[key], value), key
            assert entry[key].shape == value.shape
            assert entry[key] is entry[key]
        with pytest.raises(KeyError):
            entry["unheard"]
        assert entry.get("unheard") is None
        plain = dict(entry)
        assert type(plain) is dict and list(plain) == list(entry)
        assert list({**entry}) == list(entry.copy()) == list(entry | {}) == list(entry)
    assert [id(p) for p in optimizer.state] == [id(p) for p in ours.parameters()]
    assert [list(each) for each in optimizer.state.values()] == [
        list(each) for _, each in optimizer.state.items()
    ]


def test_reads_nothing_before_a_step():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    parameter = model[0].weight
    assert parameter not in optimizer.state and len(optimizer.state[parameter]) == 0
    assert optimizer.state.get(parameter) is None
    assert list(optimizer.state.items()) == []
    with pytest.raises(KeyError):
        optimizer.state[parameter]["exp_avg"]


def test_copies_of_it_are_plain():
    (model, optimizer), _ = both("AdamW")
    copied = copy.deepcopy(optimizer.state)
    assert type(copied) is defaultdict and all(type(each) is dict for each in copied.values())
    unpickled = pickle.loads(pickle.dumps(optimizer.state))
    for state in (copied, unpickled):
        assert len(state) == 6
        for entry, original in zip(state.values(), optimizer.state.values()):
            assert all(torch.equal(entry[key], original[key]) for key in original)
    file = io.BytesIO()
    torch.save(dict(optimizer.state[model[0].weight]), file)
    shallow = copy.copy(optimizer.state)
    assert all(type(each) is dict for each in shallow.values())


def test_own_entries_are_kept():
    (model, optimizer), (theirs, reference) = both("AdamW")
    for each, net in ((optimizer, model), (reference, theirs)):
        each.state[net[0].weight]["ema"] = net[0].weight.detach().clone()
        each.state["note"] = 5
    train(model, optimizer, range(3, 5))
    train(theirs, reference, range(3, 5))
    saved, expected = optimizer.state_dict(), reference.state_dict()
    assert saved["state"]["note"] == 5
    assert torch.allclose(saved["state"][0]["ema"], expected["state"][0]["ema"], atol=1e-6)
    for each, state in ((optimizer, saved), (reference, expected)):
        each.load_state_dict(state)
    assert torch.equal(optimizer.state[model[0].weight]["ema"], saved["state"][0]["ema"])
    assert "ema" not in optimizer.state[model[0].bias]
    optimizer.state["settings"] = {"step": 5, "deep": {"exp_avg": 1}}
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["settings"] == {"step": 5, "deep": {"exp_avg": 1}}
    del optimizer.state["settings"]
    other_model = small_model()
    other = optstate.AdamW(other_model.parameters())
    other.load_state_dict(saved)
    again = other.state_dict()["state"]
    assert torch.equal(again[0]["ema"], saved["state"][0]["ema"]) and again["note"] == 5
    copied_model, copied = copy.deepcopy((model, optimizer))
    copied.attach()
    assert torch.equal(copied.state[copied_model[0].weight]["ema"], saved["state"][0]["ema"])
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert torch.equal(optimizer.state[model[0].weight]["ema"], saved["state"][0]["ema"])
    del optimizer.state[model[0].weight]["ema"]
    assert "ema" not in optimizer.state_dict()["state"][0]


def test_the_users_own_values_are_cast_as_torchs():
    model, theirs = small_model(dtype=torch.bfloat16), small_model(dtype=torch.bfloat16)
    optimizer = optstate.AdamW(model.parameters())
    reference = torch.optim.AdamW(theirs.parameters())
    for each, net in ((optimizer, model), (reference, theirs)):
        train(net, each, range(1))
        each.state[net[0].weight]["ema"] = torch.ones(16, 8, dtype=torch.float64)
        each.load_state_dict(each.state_dict())
        assert each.state[net[0].weight]["ema"].dtype is torch.bfloat16
    assert optimizer.state_dict()["state"][0]["exp_avg"].dtype is torch.float32


def test_what_is_read_is_let_go(monkeypatch):
    """A loop that looks at all state does not keep all of it."""
    from optstate._torch import state_edits

    monkeypatch.setattr(state_edits, "_READ_BYTES", 1000)
    parameters = [torch.nn.Parameter(torch.ones(100)) for _ in range(50)]
    optimizer = optstate.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(100)
    optimizer.step()
    optimizer._served.edits.forget()
    held = optimizer.state[parameters[0]]["exp_avg"]
    optimizer.state[parameters[1]]["exp_avg"].mul_(2)
    for parameter in parameters:
        optimizer.state[parameter]["exp_avg_sq"].sum()
    assert optimizer._served.edits._read_bytes < 5000
    assert optimizer.state[parameters[0]]["exp_avg"] is held
    saved = optimizer.state_dict()["state"]
    assert torch.equal(saved[1]["exp_avg"], 2 * saved[0]["exp_avg"])


def attached_in_bfloat16(name, **options):
    parameter = torch.nn.Parameter(torch.ones(6).bfloat16())
    optimizer = getattr(optstate, name)([parameter], lr=1e-3, **options)
    parameter.grad = torch.linspace(1, 2, 6).bfloat16()
    optimizer.step()
    master = optimizer.state_dict()["state"][0]["master_param"]
    assert not torch.equal(master, parameter.detach().float())
    return parameter, optimizer


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("how", ["clear", "entry"])
def test_a_master_goes_with_its_entry(name, how):
    """Without its entry the parameter is the master, exactly, as in a load without one."""
    parameter, optimizer = attached_in_bfloat16(name)
    if how == "clear":
        optimizer.state.clear()
    else:
        entry = dict(optimizer.state[parameter])
        del entry["master_param"]
        optimizer.state[parameter] = entry
    optimizer.param_groups[0]["lr"] = 0.0
    before = parameter.detach().float()
    optimizer.step()
    assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], before)


def test_state_dict_has_the_master_that_the_next_step_takes():
    """A parameter that was changed in place has its value as master, in all of its elements."""
    parameter, optimizer = attached_in_bfloat16("AdamW")
    with torch.no_grad():
        parameter[0] = 0.125
    changed = parameter.detach().float()
    assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], changed)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], changed)


def test_copies_after_a_change_in_place():
    parameter, optimizer = attached_in_bfloat16("AdamW")
    with torch.no_grad():
        parameter[0] = 0.125
    saved = copy.deepcopy(optimizer.state_dict())
    assert not saved["state"][0]["master_param"].requires_grad
