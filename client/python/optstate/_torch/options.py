"""Checks and converts the options of optimizers as a user writes them."""

from __future__ import annotations

import math
from typing import Union

import torch

from optstate import _native
from optstate._torch.optimizer_info import as_float

Scalar = Union[float, torch.Tensor]


def limit(value: Scalar | None, name: str) -> float:
    """Returns the value that the C API takes; 0: no clipping."""
    if value is None:
        return 0.0
    limit = as_float(value)
    if not limit >= 0:
        raise ValueError(f"Invalid {name}: {value}")
    return 0.0 if math.isinf(limit) else limit


def checked_norm_type(value: Scalar) -> float:
    """Returns 1, 2 or infinity; ValueError for other values."""
    norm_type = as_float(value)
    if norm_type not in (1.0, 2.0, math.inf):
        raise ValueError(f"Invalid norm_type: {value} (1, 2 or infinity)")
    return norm_type


def state_format(dtype: torch.dtype | str | None) -> str:
    names = {None: "float32", torch.float32: "float32", torch.bfloat16: "bfloat16"}
    name = dtype if isinstance(dtype, str) else names.get(dtype)
    if name not in _native.STATE_FORMATS:
        known = ", ".join(_native.STATE_FORMATS)
        raise ValueError(f"Invalid state_dtype: {dtype!r} (one of {known})")
    return name


def master_format(name: str) -> str:
    if name not in _native.MASTER_FORMATS:
        known = ", ".join(_native.MASTER_FORMATS)
        raise ValueError(f"Invalid master: {name!r} (one of {known})")
    return name
