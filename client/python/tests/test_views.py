"""Parameters that are the daemon's memory, and behave as any tensor."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle

import numpy as np
import optstate
import pytest
import torch
from changes import (
    OPTIONS,
    by_a_dtype_there_and_back,
    by_other_data,
    in_views,
    served,
    step_of,
    trained,
)
from optstate.session import Session
from training import largest_difference, small_model, train


def test_a_step_writes_nothing_but_what_it_updates(daemon):
    """A parameter without a gradient keeps its graph."""
    model = small_model()
    optimizer = served(model, daemon.shm)
    loss = model[3].weight.square().sum()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    version = model[0].weight._version
    optimizer.step()
    assert model[0].weight._version > version
    loss.backward()
    loss = model[0].weight.square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("leaves", [by_other_data, by_a_dtype_there_and_back, "clone"])
def test_a_change_of_a_parameter_that_leaves_its_view(leaves, daemon):
    def change(model):
        with torch.no_grad():
            model[0].weight[0] = 0.125
        if leaves == "clone":
            model[0].weight.data = model[0].weight.data.clone()
        else:
            leaves(model)

    theirs, _ = trained(
        change, "between steps", lambda model: torch.optim.AdamW(model.parameters(), **OPTIONS)
    )
    ours, optimizer = trained(change, "between steps", lambda model: served(model, daemon.shm))
    assert largest_difference(ours, theirs) < 1e-6
    optimizer.close()


def test_a_write_during_a_step_takes_nothing_back(daemon, monkeypatch):
    """Another thread's: lost, as it may be in torch, but not with what is beside it."""
    ours, theirs = small_model(), small_model()
    optimizer = served(ours, daemon.shm)
    reference = torch.optim.AdamW(theirs.parameters(), **OPTIONS)
    commit = Session.commit

    def writes(*arguments, **options):
        ours[0].bias.data[0] = 5.0
        return commit(*arguments, **options)

    monkeypatch.setattr(Session, "commit", writes)
    for step in range(3):
        step_of(ours, optimizer, step)
        step_of(theirs, reference, step)
        assert largest_difference(ours, theirs) < 1e-6
    optimizer.close()


# Ordinary tensors.


def test_storages_are_the_parameters_own(daemon):
    model = small_model()
    optimizer = served(model, daemon.shm)
    pointers = set()
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        assert storage.nbytes() == parameter.numel() * 4 and parameter.storage_offset() == 0
        assert parameter.data_ptr() % 64 == 0
        pointers.add(storage.data_ptr())
    assert len(pointers) == 6
    optimizer.close()


@pytest.mark.parametrize("how", ["torch.save", "pickle", "deepcopy", "dlpack", "numpy"])
def test_copies_are_copies(how, daemon):
    model = small_model()
    optimizer = served(model, daemon.shm)
    step_of(model, optimizer, 0)
    if how == "torch.save":
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        assert len(buffer.getvalue()) < 40_000
        buffer.seek(0)
        copies = list(torch.load(buffer).values())
    elif how == "pickle":
        copies = list(pickle.loads(pickle.dumps(model)).parameters())
    elif how == "deepcopy":
        copies = list(copy.deepcopy(model).parameters())
    elif how == "dlpack":
        copies = [torch.from_dlpack(each.detach()).clone() for each in model.parameters()]
    else:
        copies = [torch.from_numpy(each.detach().numpy().copy()) for each in model.parameters()]
    before = [each.detach().clone() for each in model.parameters()]
    step_of(model, optimizer, 1)
    for parameter, mine, value in zip(model.parameters(), copies, before):
        assert torch.equal(mine.detach(), value)
        assert not torch.equal(parameter.detach(), value)
    optimizer.close()


def test_aliases_from_before_are_trained_along(daemon):
    """Aliases train along, as in torch: so parameters whose memory others hold are no views."""
    model = small_model()
    held, array = model[0].weight.detach(), model[2].weight.detach().numpy()
    saved = model[3].state_dict()
    optimizer = served(model, daemon.shm)
    for step in range(3):
        step_of(model, optimizer, step)
    assert in_views(optimizer) == {1, 3}
    assert torch.equal(held, model[0].weight)
    assert np.array_equal(array, model[2].weight.detach().numpy())
    assert torch.equal(saved["weight"], model[3].weight)
    optimizer.close()


def test_aliases_from_after_are_trained_along_and_live_longer(daemon):
    model = small_model()
    optimizer = served(model, daemon.shm)
    held = model[0].weight.detach()
    step_of(model, optimizer, 0)
    assert torch.equal(held, model[0].weight)
    optimizer.close()
    value = held.clone()
    del model, optimizer
    assert torch.equal(held, value)


def test_an_alias_of_a_view_that_was_left_keeps_its_values(daemon):
    """The alias keeps its values, as in torch, where the parameter trains on elsewhere; the
    others are views again."""
    ours, theirs = small_model(), small_model()
    optimizer = served(ours, daemon.shm)
    reference = torch.optim.AdamW(theirs.parameters(), **OPTIONS)
    for step in range(4):
        if step == 2:
            held = ours[0].weight.data
            value = held.clone()
            for model in (ours, theirs):
                model[0].weight.data = model[0].weight.data.clone()
                model[3].bias.data[0] = 0.5  # of a neighbour, without a trace
        step_of(ours, optimizer, step)
        step_of(theirs, reference, step)
        assert largest_difference(ours, theirs) < 1e-6
    assert torch.equal(held, value)
    assert in_views(optimizer) == set(range(6))
    held.add_(1.0)
    step_of(ours, optimizer, 4)
    step_of(theirs, reference, 4)
    assert largest_difference(ours, theirs) < 1e-6
    optimizer.close()


def test_an_alias_of_a_view_that_was_left_before_a_load(daemon):
    model = small_model()
    optimizer = served(model, daemon.shm)
    step_of(model, optimizer, 0)
    saved = optimizer.state_dict()
    held = model[0].weight.data
    value = held.clone()
    model[0].weight.data = value * 2
    optimizer.upload_parameters()
    step_of(model, optimizer, 1)
    optimizer.load_state_dict(saved)
    step_of(model, optimizer, 2)
    assert torch.equal(held, value)
    optimizer.close()


@pytest.mark.parametrize("kind", ["transposed", "channels_last", "slice", "shared", "subclass"])
def test_other_tensors_are_copied_as_before(kind, daemon):
    class Subclass(torch.nn.Parameter):
        pass

    def made():
        values = torch.linspace(-1, 1, 2 * 3 * 4 * 5).view(2, 3, 4, 5)
        if kind == "transposed":
            return torch.nn.Parameter(values.transpose(0, 1))
        if kind == "channels_last":
            return torch.nn.Parameter(values.contiguous(memory_format=torch.channels_last))
        if kind == "slice":
            return torch.nn.Parameter(torch.cat([values, values])[:2])
        if kind == "shared":
            return torch.nn.Parameter(values).share_memory_()
        return Subclass(values)

    mine, theirs = made(), made()
    optimizer = optstate.AdamW([mine], **OPTIONS, endpoint=daemon.shm)
    reference = torch.optim.AdamW([theirs], **OPTIONS)
    strides = mine.stride()
    for step in range(3):
        for each in (mine, theirs):
            each.grad = torch.full_like(each, 0.1 * step - 0.05)
        with torch.no_grad():
            mine.mul_(0.5)
            theirs.mul_(0.5)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(mine, theirs)
    assert mine.stride() == strides and in_views(optimizer) == set()
    optimizer.close()


def test_tied_parameters(daemon):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = optstate.AdamW(model.named_parameters(), **OPTIONS, endpoint=daemon.shm)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert model[1].weight is model[0].weight
    assert in_views(optimizer) == {0, 1, 2}
    optimizer.close()


def test_functional_call_and_compile_see_the_present_values(daemon):
    model = small_model()
    optimizer = served(model, daemon.shm)
    values = torch.ones(2, 8)
    parameters = dict(model.named_parameters())
    for step in range(2):
        step_of(model, optimizer, step)
        called = torch.func.functional_call(model, parameters, (values,))
        assert torch.equal(called, model(values))
    optimizer.close()


# The ends.


@pytest.mark.parametrize("end", ["close", "delete"])
def test_values_stay(end, daemon, job):
    model = small_model()
    optimizer = served(model, daemon.shm, job=job)
    step_of(model, optimizer, 0)
    values = [each.detach().clone() for each in model.parameters()]
    if end == "close":
        optimizer.close()
    else:
        del optimizer
    other = small_model(seed=1)
    with optstate.AdamW(
        other.named_parameters(), **OPTIONS, job=job, endpoint=daemon.shm
    ) as another:
        for step in range(3):
            step_of(other, another, step)
    for parameter, value in zip(model.parameters(), values):
        assert torch.equal(parameter.detach(), value)
        parameter.data.add_(1.0)
        assert torch.equal(parameter.detach(), value + 1.0)


def test_attaching_again_copies_nothing(daemon, job):
    model = small_model()
    with served(model, daemon.shm, job=job) as optimizer:
        for step in range(3):
            step_of(model, optimizer, step)
    other = small_model(seed=1)
    with served(other, daemon.shm, job=job) as optimizer:
        assert in_views(optimizer) == set(range(6))
        assert largest_difference(model, other) == 0
        step_of(other, optimizer, 3)


def _child_sees(pipe, model):
    pipe.send([parameter.detach().numpy() for parameter in model.parameters()])
    pipe.recv()
    pipe.send([parameter.detach().numpy() for parameter in model.parameters()])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes_see_what_torch_shows_them(method, daemon):
    """A forked one its parent's values of then; one that is spawned, shared memory."""
    model = small_model()
    optimizer = served(model, daemon.shm)
    step_of(model, optimizer, 0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    context = multiprocessing.get_context(method)
    mine, theirs = context.Pipe()
    child = context.Process(target=_child_sees, args=(theirs, model), daemon=True)
    child.start()
    first = mine.recv()
    step_of(model, optimizer, 1)
    step_of(model, optimizer, 2)
    mine.send(None)
    second = mine.recv()
    child.join()
    expected = before if method == "fork" else list(model.parameters())
    for value, now in zip(second, expected):
        torch.testing.assert_close(torch.from_numpy(value), now.detach(), rtol=0, atol=0)
    theirs_model = small_model()
    reference = torch.optim.AdamW(theirs_model.parameters(), **OPTIONS)
    for step in range(3):
        step_of(theirs_model, reference, step)
    assert largest_difference(model, theirs_model) < 1e-6
    for value, was in zip(first, before):
        assert np.array_equal(value, was.numpy())
    optimizer.close()


def test_it_can_be_turned_off(daemon):
    model = small_model()
    with served(model, daemon.shm, parameters_as_views=False) as optimizer:
        pointers = [each.data_ptr() for each in model.parameters()]
        step_of(model, optimizer, 0)
        assert in_views(optimizer) == set()
        assert pointers == [each.data_ptr() for each in model.parameters()]


def test_results_are_those_of_copies(daemon):
    def run(**options):
        model = small_model()
        with served(model, daemon.shm, max_norm=0.1, **options) as optimizer:
            train(model, optimizer, range(6))
        return model

    assert largest_difference(run(), run(parameters_as_views=False)) == 0


def test_a_parameter_file_that_is_removed_is_used_on(own_daemon, job):
    """The file is the job's until the last process that has it open ends."""
    ours, theirs = small_model(), small_model()
    reference = torch.optim.AdamW(theirs.parameters(), **OPTIONS)
    with served(ours, own_daemon.shm, job=job) as optimizer:
        for step in range(4):
            if step == 2:
                folder = own_daemon.directory / "state" / "jobs" / job
                [path] = folder.rglob("parameters*")
                path.unlink()
                ours[0].weight.data.mul_(0.5)
                theirs[0].weight.data.mul_(0.5)
            step_of(ours, optimizer, step)
            step_of(theirs, reference, step)
        assert in_views(optimizer) == set(range(6))
    assert largest_difference(ours, theirs) < 1e-6


@pytest.mark.parametrize(
    "wire, options, gives_views",
    [("shm", {}, True), ("shm", {"parameters_as_views": False}, False), ("grpc_unix", {}, False)],
)
def test_memory(wire, options, gives_views, daemon, job):
    model = small_model()
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    options = {**options, "job": job}
    with served(model, getattr(daemon, wire), **options) as optimizer:
        use = optimizer.memory()
        assert (use.views, use.copies) == ((size, 0) if gives_views else (0, size))
        assert use.parameters == use.gradients == size
        assert 2 * size <= use.state < 2 * size + 2**18  # in whole tiles
        assert use.replaced == 0
        step_of(model, optimizer, 0)
    other = small_model(seed=1)
    with served(other, getattr(daemon, wire), **options) as optimizer:
        assert optimizer.memory().replaced == size
        step_of(other, optimizer, 1)
        assert optimizer.memory().replaced == 0


def test_memory_without_a_daemon(own_daemon):
    with served(small_model(), own_daemon.shm, job="left") as optimizer:
        own_daemon.stop_gently()
        with pytest.raises(optstate.UnavailableError, match="optctl describe job left: "):
            optimizer.memory()


@pytest.mark.parametrize("how", ["add_param_group", "thaw", "made again", "taken over"])
def test_views_are_views_again(how, daemon, job):
    model = small_model()
    options = {"endpoint": daemon.shm, "job": job}
    if how == "thaw":
        model[3].bias.requires_grad_(False)
    named = list(model.named_parameters())
    if how == "add_param_group":
        named.pop()
    optimizer = former = optstate.AdamW(named, **OPTIONS, **options)
    step_of(model, optimizer, 0)
    if how == "add_param_group":
        optimizer.add_param_group({"params": [("3.bias", model[3].bias)]})
    elif how == "thaw":
        model[3].bias.requires_grad_(True)
    else:
        if how == "made again":
            optimizer.close()
        optimizer = optstate.AdamW(named, **OPTIONS, **options)
    step_of(model, optimizer, 1)
    assert in_views(optimizer) == set(range(6))
    del former
    optimizer.close()


def test_a_model_whose_file_is_mapped(daemon, tmp_path):
    model = small_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.load_state_dict(torch.load(tmp_path / "model.pt", mmap=True), assign=True)
    with served(model, daemon.shm) as optimizer:
        assert in_views(optimizer) == set(range(6))
