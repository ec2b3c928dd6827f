"""optimizer.state: read as torch's, and what is written there is honoured or refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections import defaultdict
from collections.abc import MutableMapping

import optstate
import pytest
import torch
from ranks import run
from training import largest_difference, loss_of, small_model, train

OPTIMIZERS = {
    "AdamW": {"lr": 0.01},
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Adagrad": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},
}


def is_close(value, expected):
    """Equal but for rounding; a sum that comes to about 0 has rounding of its terms' size."""
    size = expected.abs().max().item() if expected.numel() else 0.0
    return torch.allclose(value, expected, rtol=1e-4, atol=1e-7 + 1e-6 * size)


def both(name: str, steps: int = 3):
    """(model, optimizer) of ours and of torch's, after the same steps."""
    made = []
    for package in (optstate, torch.optim):
        model = small_model()
        optimizer = getattr(package, name)(model.parameters(), **OPTIMIZERS[name])
        train(model, optimizer, range(steps))
        made.append((model, optimizer))
    return made


def arrays_of(optimizer, parameter):
    return {key: each for key, each in optimizer.state[parameter].items() if key != "step"}


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


def continue_both(pairs, first=3, steps=4):
    for model, optimizer in pairs:
        train(model, optimizer, range(first, first + steps))
    (ours, _), (theirs, _) = pairs
    return largest_difference(ours, theirs)


def scale_in_loop(optimizer, model):
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if key != "step":
                value.mul_(0.25)


def scale_by_data(optimizer, model):
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if key != "step":
                value.data.mul_(0.25)


def scale_by_numpy(optimizer, model):
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if key != "step":
                array = value.view(-1).numpy()
                array *= 0.25


def set_values(optimizer, model):
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if key != "step":
                entry[key] = value * 0.25


def set_entry(optimizer, model):
    for parameter, entry in optimizer.state.items():
        optimizer.state[parameter] = {
            key: value if key == "step" else value * 0.25 for key, value in entry.items()
        }


def rebind(optimizer, model):
    optimizer.state = defaultdict(dict)


def clear(optimizer, model):
    optimizer.state.clear()


def delete_one(optimizer, model):
    del optimizer.state[model[0].weight]


def clear_entry(optimizer, model):
    optimizer.state[model[0].weight].clear()


def empty_entry(optimizer, model):
    optimizer.state[model[0].weight] = {}


def pop_one(optimizer, model):
    optimizer.state.pop(model[3].bias)


def one_moment(optimizer, model):
    keys = list(arrays_of(optimizer, model[0].weight))
    key = "momentum_buffer" if "momentum_buffer" in keys else keys[0]
    optimizer.state[model[0].weight][key].zero_()


def step_0(optimizer, model):
    """Moments go on, and their bias correction begins anew."""
    for entry in optimizer.state.values():
        entry["step"].zero_()


def step_0_of_entries(optimizer, model):
    for parameter, entry in optimizer.state.items():
        optimizer.state[parameter] = {**entry, "step": torch.tensor(0.0)}


def step_count(optimizer, model):
    optimizer.state[model[0].weight]["step"] += 5


EDITS = (
    scale_in_loop,
    scale_by_data,
    scale_by_numpy,
    set_values,
    set_entry,
    rebind,
    clear,
    delete_one,
    clear_entry,
    empty_entry,
    pop_one,
    one_moment,
    step_count,
    step_0,
    step_0_of_entries,
)
# torch's own cannot step without its state (Adagrad), or counts no steps (SGD).
NOT_OF_TORCH = {
    ("Adagrad", rebind),
    ("Adagrad", clear),
    ("Adagrad", delete_one),
    ("Adagrad", clear_entry),
    ("Adagrad", empty_entry),
    ("Adagrad", pop_one),
    ("SGD", step_count),
    ("SGD", step_0),
    ("SGD", step_0_of_entries),
    ("NAdam", step_0),  # refused, below
    ("NAdam", step_0_of_entries),
}


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_writes_are_honoured(name, edit):
    if (name, edit) in NOT_OF_TORCH:
        pytest.skip("not of torch")
    pairs = both(name)
    for model, optimizer in pairs:
        edit(optimizer, model)
    (ours, optimizer), (theirs, reference) = pairs
    saved, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
    expected = {key: entry for key, entry in expected.items() if entry}
    assert list(saved) == list(expected)
    for index, entry in expected.items():
        for key, value in entry.items():
            assert is_close(saved[index][key], value), (index, key)
    gc.collect()
    assert continue_both(pairs) < 2e-5
    # Not the writes of then, after the steps.
    saved, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
    for index, entry in expected.items():
        for key, value in entry.items():
            assert torch.allclose(saved[index][key], value, rtol=1e-3, atol=1e-5), (index, key)


def test_what_is_read_and_written_back_is_not_sent(monkeypatch):
    """As Lightning does when it moves state to the device."""
    (model, optimizer), _ = both("AdamW")
    before = optimizer.state_dict()["state"]
    loads = []
    session = optimizer._served.attachment.session
    monkeypatch.setattr(session, "begin_load", lambda: loads.append(1))
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if key != "step":
                entry[key] = value.to("cpu")
    for parameter, entry in optimizer.state.items():
        optimizer.state[parameter] = {key: each.clone() for key, each in entry.items()}
    optimizer.state = optimizer.state
    optimizer.state = dict(optimizer.state)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(before[i][k], after[i][k]) for i in before for k in before[i])
    loss_of(model, 0).backward()
    optimizer.step()
    assert not loads


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


def test_writes_that_do_not_fit_raise():
    (model, optimizer), _ = both("AdamW")
    before = optimizer.state_dict()["state"]
    parameter = model[0].weight
    entry = optimizer.state[parameter]
    with pytest.raises(ValueError, match=r"exp_avg .* has shape \[1\]"):
        entry["exp_avg"] = torch.zeros(1)
    with pytest.raises(ValueError, match="not a floating point"):
        entry["exp_avg"] = torch.zeros(16, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="step of parameter"):
        entry["step"] = -1.0
    with pytest.raises(ValueError, match="has no max_exp_avg_sq"):
        entry["max_exp_avg_sq"] = torch.zeros(16, 8)
    with pytest.raises(ValueError, match="has no .*exp_avg_sq"):
        optimizer.state[parameter] = {"step": 1.0, "exp_avg": torch.zeros(16, 8)}
    with pytest.raises(RuntimeError, match="cannot be deleted alone"):
        del entry["exp_avg"]
    with pytest.raises(TypeError, match="a mapping"):
        optimizer.state[parameter] = 5
    with pytest.raises(KeyError):
        del entry["unheard"]
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(before[i][k], after[i][k]) for i in before for k in before[i])


def test_a_change_of_a_tensor_of_a_former_step_raises():
    """It would be one in torch, whose tensors live on; ours has no effect."""
    (model, optimizer), _ = both("AdamW")
    old = optimizer.state[model[0].weight]["exp_avg"]
    given = torch.zeros(4)
    optimizer.state[model[3].bias]["exp_avg"] = given
    train(model, optimizer, range(3, 5))
    old.mul_(0.5)
    with pytest.raises(RuntimeError, match="changed in place after the step"):
        train(model, optimizer, range(5, 6))
    assert optimizer.committed_step == 5
    given.mul_(0.5)
    with pytest.raises(RuntimeError, match="changed in place after the step"):
        optimizer.state_dict()
    train(model, optimizer, range(5, 6))
    assert optimizer.committed_step == 6


def test_an_entry_of_a_parameter_without_one():
    """Built key by key, as some port state from elsewhere."""
    pairs = []
    for package in (optstate, torch.optim):
        model = small_model()
        optimizer = package.AdamW(model.parameters(), lr=0.01)
        for parameter in model.parameters():
            entry = optimizer.state[parameter]
            entry["step"] = torch.tensor(7.0)
            entry["exp_avg"] = torch.full_like(parameter, 0.01)
            entry["exp_avg_sq"] = torch.full_like(parameter, 0.02)
        pairs.append((model, optimizer))
    assert continue_both(pairs, 0) < 1e-5
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(16, 8)
    with pytest.raises(ValueError, match="has no step, exp_avg_sq"):
        train(model, optimizer, range(1))
    assert optimizer.committed_step == 0


def test_what_cannot_begin_anew_alone_is_refused():
    """NAdam's product goes with its step; Adagrad's sum is that of initial_accumulator_value."""
    (model, optimizer), _ = both("NAdam")
    optimizer.state[model[0].weight]["step"].zero_()
    with pytest.raises(RuntimeError, match="its step is 0"):
        train(model, optimizer, range(3, 4))
    del optimizer.state[model[0].weight]
    train(model, optimizer, range(3, 4))
    model = small_model()
    optimizer = optstate.Adagrad(model.parameters())
    optimizer.state[model[0].weight]["sum"].fill_(0.5)
    with pytest.raises(RuntimeError, match="its step is 0"):
        train(model, optimizer, range(1))
    assert optimizer.committed_step == 0


def test_writes_within_a_step_are_refused():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), accumulate=True)
    train(model, optimizer, range(2))
    loss_of(model, 2).backward()
    optimizer.accumulate_step()
    optimizer.state[model[0].weight]["exp_avg"].zero_()
    loss_of(model, 3).backward()
    with pytest.raises(RuntimeError, match="optimizer.state was changed within a step"):
        optimizer.step()
    optimizer.abort_step()
    optimizer.step()
    assert optimizer.committed_step == 3


def _scale_on_ranks(connection, rank, endpoint):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, endpoint=endpoint)
    train(model, optimizer, range(3))
    scale_in_loop(optimizer, model)
    del optimizer.state[model[3].bias]
    train(model, optimizer, range(3, 6))
    return [parameter.detach().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_writes_on_ranks(daemon, wire):
    model = small_model()
    reference = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, reference, range(3))
    scale_in_loop(reference, model)
    del reference.state[model[3].bias]
    train(model, reference, range(3, 6))
    for values in run(_scale_on_ranks, 2, getattr(daemon, wire)):
        for value, parameter in zip(values, model.parameters()):
            assert torch.allclose(torch.tensor(value), parameter, atol=1e-5)


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
    from optstate import _torch_state_edits

    monkeypatch.setattr(_torch_state_edits, "_READ_BYTES", 1000)
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


def test_an_8_bit_jobs_other_arrays_stay_as_they_are():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, state_dtype="dynamic8")
    train(model, optimizer, range(3))
    before = optimizer.state_dict()["state"]
    optimizer.state[model[0].weight]["exp_avg"].zero_()
    saved = optimizer.state_dict()["state"]
    assert not saved[0]["exp_avg"].any()
    optimizer._served.send_changes(optimizer._served.attachment, optimizer.param_groups)
    after = optimizer.state_dict()["state"]
    for index, entry in before.items():
        for key, value in entry.items():
            if (index, key) != (0, "exp_avg"):
                assert torch.equal(after[index][key], value)
    assert not after[0]["exp_avg"].any()


def test_writes_that_no_step_sends_are_warned_of(job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job)
    train(model, optimizer, range(2))
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(16, 8)
    with pytest.warns(UserWarning, match="the job has not got it"):
        optimizer.close()


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
    """As in a load without one: the parameter is the master, exactly."""
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
    """Of a parameter that was changed in place: its value, in all of its elements."""
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
