"""Parameters that the script changes."""

from __future__ import annotations

from typing import Any

import torch

from programs.model import random_values
from programs.registry import batch, index, of, operation


@operation(3, index=index, how=of("fill", "scale", "row", "noise", "zero", "copy"), seed=batch)
@torch.no_grad()
def edit(side: Any, index: int, how: str, seed: int) -> None:
    """Edits a parameter in place, under no_grad."""
    parameter = side.parameter(index)
    values = random_values(parameter.shape, seed, parameter.dtype)
    if how == "fill":
        parameter.fill_(0.75)
    elif how == "scale":
        parameter.mul_(0.5)
    elif how == "row" and parameter.dim() and parameter.shape[0]:
        parameter[0] = 0.125
    elif how == "noise":
        parameter.add_(values, alpha=0.25)
    elif how == "zero":
        parameter.zero_()
    elif how == "copy":
        parameter.copy_(values)


@operation(2, index=index, how=of("copy", "element", "clamp", "exchange"), seed=batch)
def edit_data(side: Any, index: int, how: str, seed: int) -> None:
    """Behind autograd's back, which nothing but the content tells."""
    values = side.parameter(index).data
    if how == "copy":
        values.copy_(random_values(values.shape, seed))
    elif how == "element" and values.numel():
        values[tuple(seed % size for size in values.shape)] = 0.375
    elif how == "clamp":
        values.clamp_(-0.25, 0.25)
    elif how == "exchange" and values.dim():  # equal sums
        values.copy_(values.flip(0).clone())


@operation(1, index=index, seed=batch, anew=of(True, False))
def replace_data(side: Any, index: int, seed: int, anew: bool) -> None:
    """Other memory, with the same or other values."""
    parameter = side.parameter(index)
    values = random_values(parameter.shape, seed, parameter.dtype)
    parameter.data = values if anew else parameter.data.clone()


@operation(1.5, index=index)
def freeze(side: Any, index: int) -> None:
    side.parameter(index).requires_grad_(False)


@operation(1.5, index=index)
def unfreeze(side: Any, index: int) -> None:
    side.parameter(index).requires_grad_(True)


@operation(0.5)
def cast_there_and_back(side: Any) -> None:
    """Casts the model to float64 and back, which changes nothing but places."""
    kinds = [each.dtype for each in side.model.distinct()]
    side.model.double()
    for parameter, dtype in zip(side.model.distinct(), kinds):
        parameter.data = parameter.data.to(dtype)
        if parameter.grad is not None:
            parameter.grad = None


@operation(0.3, dtype=of("bfloat16", "float64"))
def cast(side: Any, dtype: str) -> None:
    """Another dtype for good, which optstate refuses."""
    side.optimizer.zero_grad()
    side.model.to(getattr(torch, dtype))


@operation(0.4, one=index, other=index)
def tie_data(side: Any, one: int, other: int) -> None:
    """Two parameters over the same memory, which optstate refuses."""
    to, source = side.parameter(one), side.parameter(other)
    if to is not source and to.shape == source.shape and to.dtype == source.dtype:
        to.data = source.data
