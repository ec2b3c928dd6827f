"""A job knows its parameters by names; without any, by their places alone."""

from __future__ import annotations

import copy
import pickle
import warnings

import optstate
import pytest
import torch
from training import small_model, train

PLACES = "parameters that have no names"


def two(first: float, second: float) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((3,), value)) for value in (first, second)]


def test_a_job_without_names_warns_when_parameters_could_change_places(job):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optstate.SGD(two(1.0, 2.0), job=job).close()
    with pytest.warns(UserWarning, match=f'"{job}" goes on at step 0 with {PLACES}') as warned:
        optstate.SGD(two(2.0, 1.0), job=job).close()
    assert '"0.0" and "0.1" are alike' in str(warned[0].message)
    assert "model=model" in str(warned[0].message)
    assert warned[0].filename == __file__


@pytest.mark.parametrize("how", ["pairs", "model", "shapes", "dtypes", "private"])
def test_nothing_warns_where_parameters_are_told_apart(how, job):
    def construct():
        model = torch.nn.Module()
        model.one, model.other = two(1.0, 2.0)
        parameters = model.parameters()
        if how == "pairs":
            return optstate.SGD(model.named_parameters(), job=job)
        if how == "model":
            return optstate.SGD(parameters, job=job, model=model)
        if how == "shapes":
            return optstate.SGD([model.one, torch.nn.Parameter(torch.ones(4))], job=job)
        if how == "dtypes":
            return optstate.SGD([model.one, model.other.bfloat16().detach()], job=job)
        return optstate.SGD(parameters)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            construct().close()


def test_parameters_that_are_added_have_the_models_names(job):
    """The names are the model's, even when it got the parameters after construction."""
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job, model=model)
    train(model, optimizer, range(2))
    model.head = torch.nn.Linear(3, 2)
    optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.5})
    for parameter in model.head.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    trained = model.head.weight.detach().clone()
    optimizer.close()

    again = small_model(seed=1)
    again.head = torch.nn.Linear(3, 2)
    first = [p for name, p in again.named_parameters() if not name.startswith("head")]
    groups = [{"params": first}, {"params": again.head.parameters(), "lr": 0.5}]
    optimizer = optstate.AdamW(groups, job=job, model=again)
    assert optimizer.committed_step == 3
    assert torch.equal(again.head.weight, trained)


@pytest.mark.parametrize("wrap", [lambda m: m, torch.compile, "module", "both"])
def test_a_wrappers_prefix_is_not_an_attributes_name(wrap, job):
    """A model whose own attribute is called module, beside an equal name."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    def model_of(seed):
        model = torch.nn.Module()
        model.register_parameter("weight", torch.nn.Parameter(torch.full((2,), float(seed))))
        model.module = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.module.weight.fill_(10.0 * seed)
        return model

    model = model_of(1)
    optstate.SGD(model.parameters(), job=job, model=model).close()
    model = model_of(2)
    wraps = {"module": Wrapper, "both": lambda m: Wrapper(torch.compile(Wrapper(m)))}
    wrapped = wraps.get(wrap, wrap)(model) if isinstance(wrap, str) else wrap(model)
    optstate.SGD(wrapped.parameters(), job=job, model=wrapped).close()
    assert model.weight.tolist() == [1.0, 1.0]
    assert model.module.weight.tolist() == [[10.0, 10.0]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_keep_names(copied, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, model=model)
    train(model, optimizer, range(2))
    model, optimizer = copied((model, optimizer))
    optimizer.attach(job)
    train(model, optimizer, range(2, 4))
    optimizer.close()
    again = small_model(seed=1)
    optimizer = optstate.AdamW(again.parameters(), lr=0.01, job=job, model=again)
    assert optimizer.committed_step == 2
    assert all(map(torch.equal, again.parameters(), model.parameters()))
