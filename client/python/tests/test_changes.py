"""Every way to change a weight counts, as in torch: of views and of copies, on every wire."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from changes import (
    CHANGES,
    MOVES,
    OPTIONS,
    by_a_dtype_there_and_back,
    by_load_state_dict_assign,
    by_set,
    by_swapping_an_average,
    data_clamp,
    data_one_element,
    in_views,
    served,
    step_of,
    trained,
)
from training import largest_difference, loss_of, small_model

# How parameters come to the trainer.
WAYS = {
    "views": ("shm", {}),
    "copies": ("shm", {"parameters_as_views": False}),
    "grpc": ("grpc_unix", {}),
}


WHENS = ["before the first step", "between steps", "after backward"]


@pytest.fixture(params=WAYS)
def way(request, daemon, monkeypatch):
    """Makes an optimizer whose parameters come so."""
    endpoint, options = WAYS[request.param]
    # A change found by content brings a warning.
    warnings.filterwarnings("ignore", message=".* without a trace", category=UserWarning)

    def make(model, **more):
        return served(model, getattr(daemon, endpoint), **options, **more)

    make.gives_views = request.param == "views"
    return make


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_every_way_to_change_a_weight(change, when, way):
    theirs, _ = trained(
        change, when, lambda model: torch.optim.AdamW(model.parameters(), **OPTIONS)
    )
    ours, optimizer = trained(change, when, way)
    assert largest_difference(ours, theirs) < 1e-6
    with optimizer:
        if change not in MOVES:
            assert in_views(optimizer) == (set(range(6)) if way.gives_views else set())


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_between_micro_steps_a_change_is_refused_and_not_undone(change, way):
    if change in (
        by_swapping_an_average,
        by_a_dtype_there_and_back,
        by_load_state_dict_assign,
    ):
        pytest.skip("which changes nothing of the optimizer's")
    model = small_model()
    optimizer = way(model, accumulate=True)
    step_of(model, optimizer, 0)
    loss_of(model, 1).backward()
    optimizer.accumulate_step()
    change(model)
    values = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(model, 2).backward()
    with pytest.raises(RuntimeError, match="within a step"):
        optimizer.step()
    for parameter, value in zip(model.parameters(), values):
        assert torch.equal(parameter.detach(), value)
    optimizer.abort_step()
    optimizer.step()
    optimizer.close()


def _on_ranks(connection, rank, endpoint, options, reduction, cases):
    """The values after each of these changes, made at each of these times."""
    found = []
    for change, when in cases:
        model, optimizer = trained(
            change, when, lambda model: served(model, endpoint, reduction=reduction, **options)
        )
        optimizer.close()
        found.append([parameter.detach().numpy().copy() for parameter in model.parameters()])
    return found


def _average_weights(model):
    """Averages as DiLoCo and weight averaging do; a collective leaves no version."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data.div_(dist.get_world_size())
        parameter.data.mul_(0.5)


@pytest.mark.parametrize("reduction", ["trainer", "daemon"])
@pytest.mark.parametrize("way", WAYS)
def test_on_two_ranks(reduction, way, daemon):
    def halve(model):
        for parameter in model.parameters():
            parameter.data.mul_(0.5)

    wire, options = WAYS[way]
    cases = list(itertools.product([*CHANGES, _average_weights], WHENS[:2]))
    # Hooks of backward() send gradients alone: a few changes of each kind are enough.
    few = [data_clamp, data_one_element, by_set, by_load_state_dict_assign, _average_weights]
    cases += [(change, "after backward") for change in few]
    found = ranks.run(_on_ranks, 2, getattr(daemon, wire), options, reduction, cases)
    for number, (change, when) in enumerate(cases):
        model, _ = trained(
            halve if change is _average_weights else change,
            when,
            lambda model: torch.optim.AdamW(model.parameters(), **OPTIONS),
        )
        for values in found:
            for mine, theirs in zip(values[number], model.parameters()):
                difference = (torch.from_numpy(mine) - theirs.detach()).abs().max()
                assert difference < 1e-6, (change, when)


# Changes of copies that torch has no trace of.


@pytest.mark.parametrize("detect_changes", ["exact", "sample"])
def test_a_traceless_change_is_warned_of_once(detect_changes, daemon):
    model = small_model()
    with served(model, daemon.grpc_unix, detect_changes=detect_changes) as optimizer:
        step_of(model, optimizer, 0)
        data_clamp(model)
        with pytest.warns(UserWarning, match='"0.weight" and 5 others were changed without a tr'):
            step_of(model, optimizer, 1)
        data_clamp(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step_of(model, optimizer, 2)


def test_a_change_with_a_trace_is_not_warned_of(daemon):
    model = small_model()
    with served(model, daemon.grpc_unix) as optimizer:
        step_of(model, optimizer, 0)
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step_of(model, optimizer, 1)
            step_of(model, optimizer, 2)


def test_detection_can_be_turned_off(daemon):
    """Then the next step undoes what left no trace, in silence: that is what off means."""
    changed, left_alone = small_model(), small_model()
    for model in (changed, left_alone):
        with served(model, daemon.grpc_unix, detect_changes="off") as optimizer:
            step_of(model, optimizer, 0)
            if model is changed:
                optimizer.zero_grad()
                loss_of(model, 1).backward()
                data_one_element(model)
                optimizer.step()
            else:
                step_of(model, optimizer, 1)
    assert largest_difference(changed, left_alone) == 0


def test_an_unknown_detection_is_refused(daemon):
    with pytest.raises(ValueError, match="Invalid detect_changes: 'fast' .one of off, sample, exa"):
        served(small_model(), daemon.grpc_unix, detect_changes="fast")


def channels_last_model():
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    return torch.nn.Sequential(convolution, torch.nn.Flatten(), torch.nn.Linear(32, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", ["element", "permutation", "rows", "load"])
@pytest.mark.filterwarnings("ignore:.* without a trace")
def test_tensors_that_torch_copies(change, dtype, daemon):
    """Other strides, as of CUDA: sums are taken by torch, where the tensors are."""
    values = {}
    for kind in (None, "shm", "grpc_unix"):
        model = channels_last_model().to(dtype)
        options = {"lr": 0.01, "momentum": 0.9}
        if kind is None:
            optimizer = torch.optim.SGD(model.parameters(), **options)
        else:
            optimizer = optstate.SGD(
                model.parameters(), endpoint=getattr(daemon, kind), master="split", **options
            )
        for step in range(6):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(3, 4, 4, 4, generator=generator).to(dtype)
            model(batch).float().square().mean().backward()
            if step in (2, 3, 5):
                weight = model[0].weight.data
                if change == "element":
                    weight[3, 1, 2, 0] += 0.25
                elif change == "permutation":
                    weight.copy_(weight.flip(0).clone())
                elif change == "rows":
                    weight[[1, 2]] = weight[[2, 1]].clone()
                elif change == "load":  # which is noted as well
                    model[2].weight.detach().mul_(0.5)
            optimizer.step()
        values[kind] = torch.cat([each.detach().flatten().float() for each in model.parameters()])
        if kind is not None:
            optimizer.close()
    tolerance = 1e-6 if dtype is torch.float32 else 0.02
    assert torch.equal(values["shm"], values["grpc_unix"])
    assert (values["shm"] - values[None]).abs().max() < tolerance


# The reference for a parameter's content when the parameter has moved.


def in_another_dtype_and_back(model):
    dtype = model[0].weight.dtype
    model.double().to(dtype)


def in_place_again(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def in_other_strides_and_back(model):
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.t().contiguous().t()
    step_without_gradients(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def step_without_gradients(model):
    model.optimizer.zero_grad()
    model.optimizer.step()


def held_view(model):
    model.held = model[3].weight.data
    model[3].weight.data = model[3].weight.data.clone()


LEAVES = {
    "to and fro": in_another_dtype_and_back,
    "clone": in_place_again,
    "shared": lambda model: model.share_memory(),
    "other strides": in_other_strides_and_back,
    "a view is held": held_view,
}


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:.* without a trace")
def test_after_leaving_the_view_without_a_step_that_copies(leaves, changes, dtype, way, job):
    """A change counts in a job that is attached to again, whose digests were taken before."""
    models = []
    for is_ours in (True, False):
        model = small_model(dtype=dtype)
        make = way if is_ours else (lambda model, **_: torch.optim.SGD(model.parameters(), lr=0.1))
        if is_ours:
            options = {"job": job, "kind": optstate.SGD, "lr": 0.1}
            with make(model, **options) as optimizer:
                step_of(model, optimizer, 0)
            optimizer = make(model, **options)
        else:
            optimizer = make(model)
            step_of(model, optimizer, 0)
        model.optimizer = optimizer
        LEAVES[leaves](model)
        step_without_gradients(model)
        if is_ours:
            before = optimizer.state_dict()["state"]
        if changes:
            model[0].weight.data.clamp_(-0.1, 0.1)
        step_without_gradients(model)
        if is_ours and not changes:
            assert same_entries(optimizer.state_dict()["state"], before)  # masters are kept
        step_of(model, optimizer, 1)
        models.append(model)
        if is_ours:
            optimizer.close()
    assert largest_difference(*models) < (1e-6 if dtype is torch.float32 else 0.01)


def same_entries(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[index][key]))
        for index, entry in one.items()
        for key, value in entry.items()
        if value is not None
    )


def _one_rank_moves(connection, rank, endpoint, options):
    model = small_model()
    optimizer = served(model, endpoint, **options)
    step_of(model, optimizer, 0)
    if rank == 0:
        model.double().float()
    step_without_gradients_of(model, optimizer)
    for step in range(1, 4):
        step_of(model, optimizer, step)
    return [parameter.detach().numpy() for parameter in model.parameters()]


def step_without_gradients_of(model, optimizer):
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_alone_moves_its_model(way, daemon):
    wire, options = WAYS[way]
    one, other = ranks.run(_one_rank_moves, 2, getattr(daemon, wire), options)
    for mine, theirs in zip(one, other):
        assert (mine == theirs).all()


@pytest.mark.parametrize("change", ["negated", "rolled"])
@pytest.mark.filterwarnings("ignore:.* without a trace")
def test_changes_that_keep_the_sums_of_rows_and_columns(change, daemon):
    """Such changes of tensors that torch copies are found."""

    def balanced():
        signs = torch.ones(64, 64)
        signs[::2] *= -1
        signs[:, ::2] *= -1
        return torch.nn.Parameter((signs * 0.05).t())

    def run(make):
        parameter = balanced()
        optimizer = make([parameter])
        for step in range(3):
            parameter.grad = torch.zeros_like(parameter)
            if step == 1 and change == "negated":
                parameter.data.neg_()
            elif step == 1:
                parameter.data.copy_(parameter.data.roll((1, 1), (0, 1)))
            optimizer.step()
        return parameter.detach()

    ours = run(lambda each: optstate.SGD(each, lr=0.1, endpoint=daemon.grpc_unix))
    assert torch.equal(ours, run(lambda each: torch.optim.SGD(each, lr=0.1)))


@pytest.mark.parametrize(
    "make", [torch.from_numpy, lambda array: torch.frombuffer(array, dtype=torch.float32)]
)
def test_memory_that_somebody_else_allocated_stays_the_parameters(make, daemon):
    array = np.linspace(-1, 1, 8, dtype=np.float32)
    parameter = torch.nn.Parameter(make(array))
    with optstate.SGD([parameter], lr=0.5, endpoint=daemon.shm) as optimizer:
        parameter.grad = torch.ones(8)
        optimizer.step()
        assert np.array_equal(array, np.linspace(-1, 1, 8, dtype=np.float32) - 0.5)
        array[:] = 2
        with pytest.warns(UserWarning, match="without a trace"):
            optimizer.step()
        assert (parameter == 1.5).all()


@pytest.mark.parametrize("write", ["load_state_dict", "data"])
def test_what_is_written_after_an_interrupted_step_stays(write, way, monkeypatch):
    """The step is taken; weights that are put back between are put back."""
    model = small_model()
    optimizer = way(model, kind=optstate.SGD, lr=0.5)
    commit = optstate.session.Session.commit

    def interrupted(self, *arguments, **how):
        commit(self, *arguments, **how)
        raise KeyboardInterrupt

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with monkeypatch.context() as patched:
        patched.setattr(optstate.session.Session, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    if write == "data":
        for parameter in model.parameters():
            parameter.data.fill_(0.125)
    else:
        saved = {name: torch.full_like(each, 0.125) for name, each in model.state_dict().items()}
        model.load_state_dict(saved)
    assert optimizer.committed_step == 1
    for parameter in model.parameters():
        assert (parameter == 0.125).all()
    optimizer.step()
    for parameter in model.parameters():
        assert (parameter == 0.125 - 0.5).all()
    optimizer.close()


def test_an_optimizer_between_forward_and_backward(way):
    model = small_model()
    loss = loss_of(model, 0)
    with way(model) as optimizer:
        loss.backward()
        optimizer.step()
