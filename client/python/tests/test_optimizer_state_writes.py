"""optimizer.state: what is written there is honoured or refused."""

from __future__ import annotations

import gc
from collections import defaultdict

import optstate
import pytest
import torch
from optimizer_pairs import OPTIMIZERS, arrays_of, both, is_close
from ranks import run
from training import largest_difference, loss_of, small_model, train


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
    # The state has changed with the steps: the earlier writes are gone.
    saved, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
    for index, entry in expected.items():
        for key, value in entry.items():
            assert torch.allclose(saved[index][key], value, rtol=1e-3, atol=1e-5), (index, key)


def test_what_is_read_and_written_back_is_not_sent(monkeypatch):
    """Lightning reads and writes back so when it moves state to the device."""
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
    """The change would count in torch, whose tensors live on; here it has no effect."""
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
