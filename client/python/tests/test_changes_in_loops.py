"""Ways to change weights that are a part of the training loop, or of the model, as in torch."""

from __future__ import annotations

import warnings

import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from changes import OPTIONS, data_clamp, data_one_element, served, step_of, under_no_grad
from training import largest_difference, loss_of, small_model

WAYS = {
    "views": ("shm", {}),
    "copies": ("shm", {"parameters_as_views": False}),
    "grpc": ("grpc_unix", {}),
}
pytestmark = pytest.mark.filterwarnings("ignore:.* without a trace")


def _follows_torch(way, daemon, train, *, make_model=small_model):
    """train(model, optimizer) leaves the same values with either optimizer."""
    wire, options = WAYS[way]
    ours, theirs = make_model(), make_model()
    train(theirs, torch.optim.AdamW(theirs.parameters(), **OPTIONS))
    with served(ours, getattr(daemon, wire), **options) as optimizer:
        train(ours, optimizer)
    assert largest_difference(ours, theirs) < 1e-6


def _swap(model, values):
    """Exchanges the weights with these, as an EMA's are put in and taken out."""
    for parameter, value in zip(model.parameters(), values):
        own = parameter.detach().clone()
        parameter.data.copy_(value)
        value.copy_(own)


@pytest.mark.parametrize("back", ["before the step", "after the step", "within the forward"])
@pytest.mark.parametrize("way", WAYS)
def test_an_average_that_is_in_for_a_forward(way, back, daemon):
    def train(model, optimizer):
        average = [0.75 * each.detach() for each in model.parameters()]
        for step in range(6):
            optimizer.zero_grad()
            if step in (2, 3, 5):
                _swap(model, average)
                loss = loss_of(model, step)
                if back == "within the forward":
                    _swap(model, average)
                loss.backward()
                if back == "before the step":
                    _swap(model, average)
                optimizer.step()
                if back == "after the step":  # so the step was one of the average
                    _swap(model, average)
            else:
                loss_of(model, step).backward()
                optimizer.step()

    _follows_torch(way, daemon, train)


class _Doubled(torch.nn.Module):
    """A weight that is kept as its half."""

    def forward(self, half):
        return 2 * half

    def right_inverse(self, weight):
        return weight / 2


@pytest.mark.parametrize("way", WAYS)
def test_a_live_parametrization_that_is_assigned_to(way, daemon):
    """The assignment goes through right_inverse to the parameter behind it."""

    def make_model():
        model = small_model()
        torch.nn.utils.parametrize.register_parametrization(model[0], "weight", _Doubled())
        return model

    def train(model, optimizer):
        for step in range(6):
            if step in (0, 2, 3, 5):
                model[0].weight = torch.linspace(-1, 1, 128).view(16, 8) / (step + 1)
            step_of(model, optimizer, step)

    _follows_torch(way, daemon, train, make_model=make_model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_old_weight_norm_whose_length_is_clamped(way, daemon):
    def make_model():
        model = small_model()
        torch.nn.utils.weight_norm(model[0])
        return model

    def train(model, optimizer):
        for step in range(6):
            step_of(model, optimizer, step)
            model[0].weight_g.data.clamp_(max=0.5)

    _follows_torch(way, daemon, train, make_model=make_model)


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model(way, daemon):
    def train(model, optimizer):
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(6):
            if step in (2, 3):
                data_clamp(model)
            if step == 4:
                under_no_grad(model)
            optimizer.zero_grad()
            loss_of(compiled, step).backward()
            if step == 5:
                data_one_element(model)
            optimizer.step()

    _follows_torch(way, daemon, train)


# On two ranks.


def broadcast(model):
    """One rank's weights become all ranks'."""
    for parameter in model.parameters():
        parameter.data.mul_(0.5).add_(dist.get_rank())
        dist.broadcast(parameter, 0)


def mean_of_parameters(model):
    """The collective is of the parameter itself."""
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
        dist.all_reduce(parameter)
        parameter.data /= dist.get_world_size()


def _halved_on_all(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


COLLECTIVES = [broadcast, mean_of_parameters]
TIMES = ["between steps", "after backward"]


def _with_collectives(connection, rank, endpoint, options):
    found = []
    for collective in COLLECTIVES:
        for when in TIMES:
            model = small_model()
            with served(model, endpoint, **options) as optimizer:
                _train_with(collective, when, model, optimizer)
            found.append([each.detach().numpy().copy() for each in model.parameters()])
    return found


def _train_with(change, when, model, optimizer):
    for step in range(5):
        if when == "between steps" and step in (0, 2, 3):
            change(model)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if when == "after backward" and step in (0, 2, 3):
            change(model)
        optimizer.step()


@pytest.mark.parametrize("reduction", ["trainer", "daemon"])
@pytest.mark.parametrize("way", WAYS)
def test_collectives_of_the_parameters(way, reduction, daemon):
    wire, options = WAYS[way]
    options = {**options, "reduction": reduction}
    expected = []
    for when in TIMES:
        model = small_model()
        reference = torch.optim.AdamW(model.parameters(), **OPTIONS)
        _train_with(_halved_on_all, when, model, reference)
        expected.append([each.detach() for each in model.parameters()])
    for found in ranks.run(_with_collectives, 2, getattr(daemon, wire), options):
        for number, values in enumerate(found):
            for mine, theirs in zip(values, expected[number % len(TIMES)]):
                assert (torch.from_numpy(mine) - theirs).abs().max() < 1e-6, number


def _between_micro_steps(connection, rank, endpoint, options, changers):
    """Ranks below `changers` change a weight between the micro-steps of a step."""
    said = []
    warnings.simplefilter("ignore")
    for change in (data_clamp, under_no_grad):
        model = small_model()
        optimizer = served(model, endpoint, accumulate=True, **options)
        step_of(model, optimizer, 0)
        loss_of(model, 1).backward()
        optimizer.accumulate_step()
        dist.barrier()  # who raises drops sums that the other might still wait for
        if rank < changers:
            change(model)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        loss_of(model, 2).backward()
        try:
            optimizer.step()
            said.append("taken")
        except (RuntimeError, optstate.OptstateError) as error:
            said.append(f"{type(error).__name__}: {error}")
            for parameter, value in zip(model.parameters(), values):
                assert torch.equal(parameter.detach(), value)  # not undone
        optimizer.abort_step()
        dist.barrier()
        if rank < changers:  # the other rank makes the change too
            changed = [each.detach().numpy() for each in model.parameters()]
        else:
            changed = None
        box = [changed]
        dist.broadcast_object_list(box, 0)
        for parameter, value in zip(model.parameters(), box[0]):
            parameter.data.copy_(torch.from_numpy(value))
        step_of(model, optimizer, 3)
        said.append([each.detach().numpy().copy() for each in model.parameters()])
        optimizer.close()
    return said


# With reduction="trainer" a rank that has not changed anything awaits the other, which may take
# its step again.
@pytest.mark.parametrize("reduction, changers", [("trainer", 2), ("daemon", 2), ("daemon", 1)])
@pytest.mark.parametrize("way", WAYS)
def test_between_micro_steps_of_two_ranks(way, reduction, changers, daemon):
    """Whoever changes is refused, and nothing is undone on either rank."""
    wire, options = WAYS[way]
    options = {**options, "reduction": reduction, "step_timeout": 60}
    one, other = ranks.run(_between_micro_steps, 2, getattr(daemon, wire), options, changers)
    for number in (0, 2):
        assert "within a step" in one[number]
        if changers == 2:
            assert "within a step" in other[number]
        else:
            assert other[number].startswith("AbortedError"), other[number]
        for mine, theirs in zip(one[number + 1], other[number + 1]):
            assert (mine == theirs).all()
