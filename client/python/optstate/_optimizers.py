"""What optimizers there are, as the library tells it: kinds, hyperparameters, state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from optstate import _native

_ADJUST_LR = {None: 0, "original": 0, "match_rms_adamw": 1, "spectral_unclamped": 2}


@dataclasses.dataclass(frozen=True)
class OptimizerInfo:
    """One optimizer. Names are torch's; of a tuple's part "betas.0"."""

    kind: int
    name: str
    hyperparams: Sequence[str]
    defaults: Sequence[float]
    # (name, the option bit that brings it, 0: always), in the daemon's order.
    state_arrays: Sequence[tuple[str, int]]
    options: Sequence[str]  # bit k of a group's options
    scalar: str | None  # a number per parameter

    def option_bits(self, group: dict[str, Any]) -> int:
        """What a param group asks for that is fixed at registration."""
        return sum(1 << k for k, name in enumerate(self.options) if group[name])

    def arrays_of(
        self, group: dict[str, Any], shape: Sequence[int]
    ) -> dict[str, tuple[int, tuple[int, ...]]]:
        """The daemon's number and the shape of each state array, by name, of a
        parameter of this shape in the group."""
        bits = self.option_bits(group)
        shapes = {
            name: (_native.STATE_0 + k, self._shape_of(name, tuple(shape)))
            for k, (name, option) in enumerate(self.state_arrays)
            if option == 0 or bits & option
        }
        return {name: (k, found) for name, (k, found) in shapes.items() if found is not None}

    def _shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """As torch shapes it; None: parameters of this shape have none."""
        if self.name != "adafactor":
            return shape
        if len(shape) < 2:
            return shape if name == "variance" else None
        rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        return {"row_var": rows, "col_var": columns}.get(name)


def as_float(value: Any) -> float:
    """A number, a flag or a 1-element tensor."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


@functools.cache
def infos() -> dict[str, OptimizerInfo]:
    """By name, in the library's order."""
    found: dict[str, OptimizerInfo] = {}
    for index in range(1 << 16):
        raw = _native.OptimizerInfo()
        if _native.library().optstate_optimizer(index, raw) != 0:
            break
        hyperparams = [raw.hyperparams[k] for k in range(raw.hyperparam_count)]
        info = OptimizerInfo(
            kind=raw.optimizer,
            name=raw.name.decode(),
            hyperparams=tuple(each.name.decode() for each in hyperparams),
            defaults=tuple(each.default_value for each in hyperparams),
            state_arrays=tuple(
                (raw.state_arrays[k].decode(), raw.state_options[k])
                for k in range(raw.state_array_count)
            ),
            options=tuple(raw.options[k].decode() for k in range(raw.option_count)),
            scalar=raw.scalar.decode() or None,
        )
        found[info.name] = info
    return found


def by_kind(kind: int) -> OptimizerInfo:
    """Of a kind that the library knows."""
    return next(info for info in infos().values() if info.kind == kind)


# Flags, of which torch asks whether they are true, and Adafactor's eps[0].
_MAY_BE_NONE = {"maximize": 0.0, "nesterov": 0.0, "eps.0": -1.0}


def _value(group: dict[str, Any], name: str, default: float) -> float:
    if name == "adjust_lr_fn":
        return float(_ADJUST_LR[group.get(name)])
    key, _, part = name.partition(".")
    if key not in group:
        return default  # older torch, or an option that this class has not
    value = group[key][int(part)] if part else group[key]
    if value is not None:
        return as_float(value)
    if name not in _MAY_BE_NONE:
        raise ValueError(f"Invalid {name}: None")
    return _MAY_BE_NONE[name]


# In torch's order and words.
_CHECKS = (
    ("lr", "learning rate", math.inf),
    ("eps", "epsilon value", math.inf),
    ("betas.0", "beta parameter at index 0", 1.0),
    ("betas.1", "beta parameter at index 1", 1.0),
    ("momentum", "momentum value", math.inf),
    ("alpha", "alpha value", math.inf),
    ("lr_decay", "lr_decay value", math.inf),
    ("momentum_decay", "momentum_decay value", math.inf),
    ("weight_decay", "weight_decay value", math.inf),
)


def hyperparams_of(info: OptimizerInfo, group: dict[str, Any], index: int) -> list[float]:
    """A param group's values in the daemon's order; ValueError, in torch's words."""
    values = [_value(group, *each) for each in zip(info.hyperparams, info.defaults)]
    by_name = dict(zip(info.hyperparams, values))
    for name, called, limit in _CHECKS:
        if name in by_name and not 0.0 <= by_name[name] < limit:
            raise ValueError(f"Invalid {called}: {by_name[name]} (param_groups[{index}])")
    for name, value in by_name.items():
        if not math.isfinite(value):
            raise ValueError(f"Invalid {name}: {value} (param_groups[{index}])")
    return values


def max_norm_of(group: dict[str, Any], index: int) -> float:
    """The group's own limit of its gradients' norm; 0: none."""
    value = group.get("max_norm")
    if value is None:
        return 0.0
    value = as_float(value)
    if not value >= 0:
        raise ValueError(f"Invalid max_norm: {value} (param_groups[{index}])")
    return 0.0 if math.isinf(value) else value
