"""state_dict and in-place edits: both ways with torch's, and nothing lost."""

from __future__ import annotations

import copy
import io
import warnings

import optstate
import pytest
import torch
import torch.multiprocessing
from training import largest_difference, loss_of, small_model, train

CLASSES = {"Adam": (optstate.Adam, torch.optim.Adam), "AdamW": (optstate.AdamW, torch.optim.AdamW)}


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", list(CLASSES))
def test_state_dict_is_torchs(name, amsgrad):
    ours_class, torch_class = CLASSES[name]
    ours, torchs = small_model(), small_model()
    optimizer = ours_class(ours.named_parameters(), amsgrad=amsgrad)
    reference = torch_class(torchs.named_parameters(), amsgrad=amsgrad)
    ours[0].bias.requires_grad_(False)  # never updated: no state
    torchs[0].bias.requires_grad_(False)
    assert optimizer.state_dict() == reference.state_dict()  # before the first step
    train(ours, optimizer, range(5))
    train(torchs, reference, range(5))
    mine, theirs = optimizer.state_dict(), reference.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert list(mine["state"]) == list(theirs["state"])
    for index, entry in theirs["state"].items():
        assert mine["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            found = mine["state"][index][key]
            assert (found.dtype, found.shape, found.device) == (
                value.dtype,
                value.shape,
                value.device,
            )
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", list(CLASSES))
def test_checkpoints_load_both_ways(name, amsgrad):
    """Train, save, load into the other, train on: as one run without a break."""
    ours_class, torch_class = CLASSES[name]
    whole = small_model()
    train(whole, torch_class(whole.parameters(), lr=0.01, amsgrad=amsgrad), range(30))
    model, optimizer_class = small_model(), ours_class
    saved = None
    for start in (0, 10, 20):
        optimizer = optimizer_class(model.parameters(), lr=0.5, amsgrad=amsgrad)
        if saved is None:
            optimizer.param_groups[0]["lr"] = 0.01
        else:
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.01
        train(model, optimizer, range(start, start + 10))
        saved = through_a_file(optimizer.state_dict())
        model = copy.deepcopy(model)
        optimizer_class = torch_class if optimizer_class is ours_class else ours_class
    assert largest_difference(model, whole) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_checkpoint_of_ours_loses_nothing(dtype):
    model = small_model(dtype=dtype)
    optimizer = optstate.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(10))
    other = copy.deepcopy(model)
    loaded = optstate.AdamW(other.parameters())
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, optimizer, range(10, 20))
    train(other, loaded, range(10, 20))
    assert largest_difference(model, other) == 0


def _send_moments(optimizer, queue):
    entries = optimizer.state_dict()["state"].values()
    queue.put([(entry["step"].item(), entry["exp_avg"].tolist()) for entry in entries])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_is_started_with_an_optimizer(method):
    """The process has the state as of its start, in an optimizer of its own."""
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    context = torch.multiprocessing.get_context(method)
    for first in (0, 2):
        train(model, optimizer, range(first, first + 2))
        queue = context.SimpleQueue()
        process = context.Process(target=_send_moments, args=(optimizer, queue))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        expected = optimizer.state_dict()["state"].values()
        expected = [(entry["step"].item(), entry["exp_avg"].tolist()) for entry in expected]
        assert queue.get() == expected
    copy.deepcopy(optimizer)
    assert optimizer._served.handed_over is not None  # the children's
    train(model, optimizer, range(4, 5))
    assert optimizer._served.handed_over is None


def test_a_16_bit_parameter_that_went_on_without_its_master_does_not_jump_back():
    model = small_model(dtype=torch.bfloat16)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(5))
    reference = torch.optim.AdamW(model.parameters())
    optimizer.close()
    reference.load_state_dict(optimizer_state(optimizer))
    train(model, reference, range(5, 10))
    before = copy.deepcopy(model)
    again = optstate.AdamW(model.parameters())
    again.load_state_dict(reference.state_dict())
    assert largest_difference(model, before) == 0
    train(model, again, range(10, 12))


def optimizer_state(closed):
    """The state as of closing, taken by a second optimizer that re-did the run."""
    model = small_model(dtype=torch.bfloat16)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(5))
    assert closed.committed_step == optimizer.committed_step == 5
    return optimizer.state_dict()


@pytest.mark.parametrize("wrong", [0.999, 1.001])
@pytest.mark.parametrize("whole", [True, False])
def test_a_load_without_a_master_sets_it_to_the_parameter(wrong, whole):
    """Exactly, also where the old master rounds to the same 16 bits."""
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = optstate.SGD([parameter], lr=1.0, momentum=0.9)
    parameter.grad = torch.zeros(4, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.state[parameter]["master_param"] = torch.full((4,), wrong)
    assert optimizer.state_dict()["state"][0]["master_param"][0] == torch.tensor(wrong)
    optimizer.step()
    fetched = optimizer.fetch_state(parameter)
    assert torch.equal(parameter, torch.ones(4, dtype=torch.bfloat16))
    assert torch.equal(fetched["master_param"], torch.full((4,), wrong))
    saved = optimizer.state_dict()
    if whole:
        del saved["state"][0]["master_param"]
    else:  # nothing of the parameter
        saved["state"] = {}
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert torch.equal(optimizer.fetch_state(parameter)["master_param"], torch.ones(4))


def test_state_of_parameters_missing_in_a_checkpoint_starts_anew():
    ours, torchs = small_model(), small_model()
    optimizer = optstate.AdamW(ours.parameters())
    reference = torch.optim.AdamW(torchs.parameters())
    train(ours, optimizer, range(5))
    train(torchs, reference, range(5))
    saved = reference.state_dict()
    del saved["state"][1]
    torchs.load_state_dict(ours.state_dict())
    reference.load_state_dict(saved)
    optimizer.load_state_dict(saved)
    assert 1 not in optimizer.state_dict()["state"]
    train(ours, optimizer, range(5, 8))
    train(torchs, reference, range(5, 8))
    assert largest_difference(ours, torchs) < 1e-5


def test_a_load_that_puts_a_job_back_warns(job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    before = optimizer.state_dict()
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(saved)
    train(model, optimizer, range(3, 5))
    with pytest.warns(UserWarning, match=f'"{job}" has taken 5 steps .* a state of 3'):
        optimizer.load_state_dict(saved)
    assert optimizer.committed_step == 5
    with pytest.warns(UserWarning, match="has taken 3 steps .* a state of 0"):
        optimizer.load_state_dict(before)
    private = optstate.AdamW(model.parameters())
    train(model, private, range(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private.load_state_dict(saved)
        optimizer.load_state_dict(saved)


def test_a_checkpoint_that_does_not_fit_changes_nothing():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    train(model, optimizer, range(3))
    before = optimizer.state_dict()

    def spoiled(change):
        saved = copy.deepcopy(before)
        saved["param_groups"][0]["lr"] = 7.0
        change(saved)
        return saved

    def shape(saved):
        saved["state"][3]["exp_avg"] = torch.zeros(1)

    def key(saved):
        del saved["state"][2]["exp_avg_sq"]

    def kind(saved):
        saved["state"][2]["exp_avg_sq"] = torch.zeros(16, dtype=torch.int32)

    def steps(saved):
        saved["state"][2]["step"] = torch.tensor(-1.0)

    def amsgrad(saved):
        saved["param_groups"][0]["amsgrad"] = True

    def groups(saved):
        saved["param_groups"].append(copy.deepcopy(saved["param_groups"][0]))

    texts = {
        shape: r"exp_avg of parameter \"0.3\" has shape \[1\]",
        key: "has no exp_avg_sq",
        kind: "not a floating point tensor",
        steps: "step of parameter",
        amsgrad: "amsgrad",
        groups: "different number of parameter groups",
    }
    for change, text in texts.items():
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(spoiled(change))
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for index, entry in before["state"].items():
            assert all(torch.equal(after["state"][index][name], entry[name]) for name in entry)
    train(model, optimizer, range(3, 5))


def test_state_dict_hooks():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    train(model, optimizer, range(2))
    heard = []
    optimizer.register_state_dict_pre_hook(lambda each: heard.append("before save"))
    optimizer.register_state_dict_post_hook(
        lambda each, saved: {**saved, "mine": len(saved["state"])}
    )
    optimizer.register_load_state_dict_pre_hook(
        lambda each, saved: heard.append(("before load", saved["state"][0]["exp_avg"].shape))
    )
    optimizer.register_load_state_dict_post_hook(lambda each: heard.append("after load"))
    saved = optimizer.state_dict()
    assert saved["mine"] == 6
    optimizer.load_state_dict(saved)
    assert heard == ["before save", ("before load", torch.Size([16, 8])), "after load"]


def test_state_of_the_users_own_is_kept():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    train(model, optimizer, range(2))
    optimizer.state["note"] = 5
    saved = optimizer.state_dict()
    assert saved["state"]["note"] == 5 and "exp_avg" in saved["state"][0]
    other = optstate.AdamW(small_model().parameters())
    other.load_state_dict(saved)
    assert other.state["note"] == 5 and other.state_dict()["state"]["note"] == 5


def test_loading_leaves_the_given_state_dict_alone():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(2))
    assert saved["param_groups"] == kept["param_groups"]
    assert torch.equal(saved["state"][0]["exp_avg"], kept["state"][0]["exp_avg"])


def test_fetch_state():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    assert optimizer.fetch_state(model[0].weight) == {}
    train(model, optimizer, range(2))
    entry = optimizer.fetch_state(model[0].weight)
    assert entry["step"] == 2 and entry["exp_avg"].shape == (16, 8)
    with pytest.raises(KeyError):
        optimizer.fetch_state(torch.zeros(1))


@pytest.mark.parametrize("edit", ["copy", "load_state_dict", "data", "upload"])
def test_parameters_that_the_trainer_changes(edit):
    """Edits in place count, as in torch, whether autograd sees them or not."""
    ours, torchs = small_model(), small_model()
    optimizer = optstate.AdamW(ours.parameters(), lr=0.01)
    reference = torch.optim.AdamW(torchs.parameters(), lr=0.01)
    train(ours, optimizer, range(3))
    train(torchs, reference, range(3))
    for model in (ours, torchs):
        if edit == "copy":
            with torch.no_grad():
                model[0].weight.mul_(0.5)
                model[3].bias.fill_(1.0)
        elif edit == "load_state_dict":
            model.load_state_dict(small_model(seed=9).state_dict())
        elif edit == "data":
            model[0].weight.data = model[0].weight.data * 0.5
        else:
            model[0].weight.data.mul_(0.5)
    if edit == "upload":  # leaves no trace
        optimizer.upload_parameters()
    train(ours, optimizer, range(3, 6))
    train(torchs, reference, range(3, 6))
    assert largest_difference(ours, torchs) < 1e-5


def test_a_write_of_equal_values_is_no_change(monkeypatch):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    train(model, optimizer, range(2))
    loads = []
    session = optimizer._served.attachment.session
    monkeypatch.setattr(session, "begin_load", lambda: loads.append(1))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    loss_of(model, 0).backward()
    optimizer.step()
    assert not loads


def test_parameters_that_are_replaced_again_and_again():
    """Memory that was freed comes back, and with it the address that was remembered."""

    def run(optimizer_class):
        model = small_model()
        optimizer = optimizer_class(model.parameters(), lr=0.01)
        for step in range(40):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            for _ in range(2):  # the second time, where they were at first
                flat = torch.nn.utils.parameters_to_vector(model.parameters())
                torch.nn.utils.vector_to_parameters(flat.detach() * 0.99, model.parameters())
            optimizer.step()
        return model

    assert largest_difference(run(optstate.SGD), run(torch.optim.SGD)) < 1e-5


def test_what_torch_lacks_in_its_groups_is_kept(job):
    parameters = [torch.nn.Parameter(torch.ones(3, 4)) for _ in range(2)]
    optimizer = optstate.Adafactor([{"params": parameters[:1], "max_norm": 1.0}])
    torchs = torch.optim.Adafactor(parameters[:1])
    optimizer.load_state_dict(torchs.state_dict())
    assert optimizer.param_groups[0]["max_norm"] == 1.0
    # A load gives the defaults a key that the constructor has not.
    optimizer.add_param_group({"params": parameters[1:]})
    torchs.add_param_group({"params": parameters[1:]})
    optimizer.load_state_dict(torchs.state_dict())
    assert [group.get("max_norm") for group in optimizer.param_groups] == [1.0, None]


def test_torchs_distributed_checkpoints_take_no_step():
    """Torch's functions take a step with zeros when an optimizer seems to have no state."""
    from torch.distributed.checkpoint import state_dict as distributed

    def run(optimizer_class):
        model = small_model()
        optimizer = optimizer_class(model.parameters(), lr=0.01)
        saved = None
        for step in range(6):
            train(model, optimizer, range(step, step + 1))
            optimizer.zero_grad()
            if step == 2:
                saved = copy.deepcopy(distributed.get_state_dict(model, optimizer))
            elif step == 4:
                distributed.set_state_dict(
                    model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1]
                )
        assert getattr(optimizer, "committed_step", 6) == 6
        return model

    assert largest_difference(run(optstate.AdamW), run(torch.optim.AdamW)) < 1e-5


def test_state_is_true_when_there_is_some():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    assert not optimizer.state and len(optimizer.state) == 0
    train(model, optimizer, range(1))
    assert optimizer.state and len(optimizer.state) == 6
    other = optstate.AdamW(small_model().parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.committed_step == 0 and other.state
    assert copy.deepcopy(other).state


@pytest.mark.parametrize("what", ["sparse", "meta", "huge step", "nan step"])
def test_state_that_cannot_be_sent_changes_nothing(what):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    entry = saved["state"][2]  # others come before it
    if what == "sparse":
        entry["exp_avg_sq"] = entry["exp_avg_sq"].to_sparse()
    elif what == "meta":
        entry["exp_avg_sq"] = entry["exp_avg_sq"].to("meta")
    else:
        entry["step"] = torch.tensor(1e30 if what == "huge step" else float("nan"))
    with pytest.raises(ValueError, match="exp_avg_sq" if "step" not in what else "step"):
        optimizer.load_state_dict(saved)
    train(model, optimizer, range(2, 4))
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(4))
    assert largest_difference(model, whole) == 0


def test_state_is_in_host_memory_whatever_the_default_device(daemon):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(1))
    expected = optimizer.state_dict()["state"]
    with torch.device("meta"):
        found = optimizer.state_dict()["state"]
        optimizer.load_state_dict(optimizer.state_dict())
        again = optimizer.state_dict()["state"]
    for other in (found, again):
        for index, entry in expected.items():
            for key, value in entry.items():
                assert torch.equal(other[index][key], value)
