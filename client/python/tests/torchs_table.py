"""torch's own table of its optimizers and their options (optim_db), of those that we serve.

The modules that import this skip where torch ships without it.
"""

from __future__ import annotations

import inspect
import sys
import types

import optstate
import pytest
import torch
from training import gradients, parameters_of, set_gradients

SERVED = ("Adafactor", "Adagrad", "Adam", "AdamW", "Muon", "NAdam", "RAdam", "RMSprop", "SGD")
# A tile and a bit, matrices, an odd tail, one element and a scalar.
SHAPES = [[4099], [64, 65], [], [3, 5, 7], [1], [17]]
STEPS_MAX = 20  # of a run that is compared
MATRICES = [[64, 65], [65, 64], [8, 3], [3, 8]]  # Muon takes nothing else


def _table() -> list:
    if "expecttest" not in sys.modules:  # wanted by a module on the way, not used here
        stub = types.ModuleType("expecttest")
        stub.TestCase = object
        sys.modules["expecttest"] = stub
    helpers = pytest.importorskip("torch.testing._internal.common_optimizers")
    return [info for info in helpers.optim_db if info.optim_cls.__name__ in SERVED]


INFOS = {info.optim_cls.__name__: info for info in _table()}
# Every set of options that torch tests, by optimizer; without torch's global flags.
INPUTS = [
    pytest.param(name, given.kwargs, id=f"{name}-{given.desc.replace(' ', '_')}")
    for name, info in INFOS.items()
    for given in info.optim_inputs_func(device="cpu")
]


def ours(name: str) -> type:
    return getattr(optstate, name)


def torchs(name: str) -> type[torch.optim.Optimizer]:
    return INFOS[name].optim_cls


def shapes_of(name: str) -> list:
    return MATRICES if name == "Muon" else SHAPES


def parameters_for(name: str, seed: int, dtype: torch.dtype = torch.float32) -> list:
    return parameters_of(shapes_of(name), seed, dtype)


def copied(parameters: list, dtype: torch.dtype | None = None) -> list:
    """Returns equal values in parameters of their own."""
    return [torch.nn.Parameter(each.detach().clone().to(dtype)) for each in parameters]


def takes(name: str, option: str) -> bool:
    """Returns whether torch's constructor has the option."""
    return option in inspect.signature(torchs(name)).parameters


def default_of(name: str, option: str) -> object:
    return inspect.signature(torchs(name)).parameters[option].default


def take_steps(name: str, runs: list, seed: int, steps: int, missing: float = 0.2) -> None:
    """Takes equal steps with every (optimizer, parameters) of `runs`.

    The last parameter's gradients are small, so that eps counts.
    """
    for values in gradients(shapes_of(name), seed, steps, missing):
        if values[-1] is not None:
            values[-1].mul_(1e-6)
        for optimizer, parameters in runs:
            own = [None if value is None else value.clone() for value in values]
            set_gradients(parameters, own)
            optimizer.step()


def assert_follows(
    mine: list, theirs: list, start: list, of_way: float, exact: list | None = None
) -> None:
    """Two runs of the same steps are nowhere further apart than `of_way` of the way that the
    parameter's furthest element went, an ulp of the element for each of STEPS_MAX steps and,
    where a run of torch's in float64 is given, twice torch's own largest error against it."""
    for index, (one, other, begin) in enumerate(zip(mine, theirs, start)):
        one, other, begin = (each.detach().double() for each in (one, other, begin))
        way = torch.maximum((one - begin).abs().max(), (other - begin).abs().max())
        size = torch.maximum(other.abs(), begin.abs())
        allowed = of_way * way + STEPS_MAX * 2**-23 * size
        if exact is not None:
            allowed = allowed + 2 * (other - exact[index].detach()).abs().max()
        excess = ((one - other).abs() - allowed).max()
        assert excess <= 0, f"parameter {index}: {excess:.3e} too far"
