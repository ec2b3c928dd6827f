"""Every way to change a weight counts, as in torch: of views and of copies, on every wire."""

from __future__ import annotations

import warnings

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
    by_load_state_dict,
    by_load_state_dict_assign,
    by_numpy,
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


@pytest.fixture(params=WAYS)
def way(request, daemon, monkeypatch):
    """Makes an optimizer whose parameters come so."""
    endpoint, options = WAYS[request.param]
    # What is found by content is warned of.
    warnings.filterwarnings("ignore", message=".* without a trace", category=UserWarning)

    def make(model, **more):
        return served(model, getattr(daemon, endpoint), **options, **more)

    make.gives_views = request.param == "views"
    return make


@pytest.mark.parametrize("when", ["before the first step", "between steps"])
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


def _on_ranks(connection, rank, endpoint, options, change, reduction):
    model = small_model()
    optimizer = served(model, endpoint, reduction=reduction, **options)
    for step in range(4):
        if step in (1, 3):
            change(model)
        step_of(model, optimizer, step)
    return [parameter.detach().numpy() for parameter in model.parameters()]


def _average_weights(model):
    """As DiLoCo and weight averaging do; a collective leaves no version."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data.div_(dist.get_world_size())
        parameter.data.mul_(0.5)


@pytest.mark.parametrize("reduction", ["trainer", "daemon"])
@pytest.mark.parametrize("change", [data_clamp, by_numpy, _average_weights, by_load_state_dict])
@pytest.mark.parametrize("way", WAYS)
def test_on_two_ranks(change, reduction, way, daemon):
    def halve(model):
        for parameter in model.parameters():
            parameter.data.mul_(0.5)

    model = small_model()
    reference = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for step in range(4):
        if step in (1, 3):
            (halve if change is _average_weights else change)(model)
        step_of(model, reference, step)
    wire, options = WAYS[way]
    found = ranks.run(_on_ranks, 2, getattr(daemon, wire), options, change, reduction)
    for values in found:
        for mine, theirs in zip(values, model.parameters()):
            torch.testing.assert_close(torch.from_numpy(mine), theirs.detach())


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
