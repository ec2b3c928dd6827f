"""What optimizers there are, as the library tells it: kinds, hyperparameters, state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
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


_FLAGS = ("maximize", "nesterov", "decoupled_weight_decay")
# As torch calls them in its errors, where that is not their name.
_CALLED = {
    "lr": "learning rate",
    "eps": "epsilon value",
    "betas.0": "beta parameter at index 0",
    "betas.1": "beta parameter at index 1",
    "momentum": "momentum value",
    "alpha": "alpha value",
    "lr_decay": "lr_decay value",
    "momentum_decay": "momentum_decay value",
    "weight_decay": "weight_decay value",
}


# What the daemon computes as torch does, where that is not any number: at least, and below.
_RANGES = {
    "betas.0": (0.0, 1.0),
    "betas.1": (0.0, 1.0),
    "weight_decay": (0.0, math.inf),
    "momentum": (0.0, math.inf),
    "alpha": (0.0, math.inf),
    "beta2_decay": (-math.inf, 5e-324),
}


def _value(group: dict[str, Any], name: str, default: float, required: Collection[str]) -> float:
    key, _, part = name.partition(".")
    if key not in group:
        if key in required:
            raise KeyError(key)  # as torch, which reads it in every step
        return default  # older torch, or an option that this class has not
    value = group[key]
    if name == "adjust_lr_fn":
        if value not in _ADJUST_LR:
            raise ValueError(f"Adjust learning rate function {value} is not supported")
        return float(_ADJUST_LR[value])
    if name in _FLAGS:
        return float(bool(value))
    value = value[int(part)] if part else value
    if value is not None:
        return as_float(value)
    if name != "eps.0":  # Adafactor's: the dtype's own
        raise ValueError(f"Invalid {name}: None")
    return -1.0


def hyperparams_of(
    info: OptimizerInfo,
    group: dict[str, Any],
    index: int,
    required: Collection[str] = (),
    fixed: Mapping[str, float] = MappingProxyType({}),
) -> list[float]:
    """A param group's values in the daemon's order, for a step.

    torch checks ranges in its constructors alone, and so a group or a scheduler may bring
    others: a learning rate below 0. ValueError, in torch's words, for NaN, infinity, and what
    is not in _RANGES. required: keys that a group has lost when it
    has them not: KeyError. fixed: values that are the constructor's, whatever groups say.
    """
    values = []
    for name, default in zip(info.hyperparams, info.defaults):
        value = fixed.get(name)
        if value is None:
            value = _value(group, name, default, required)
        least, limit = _RANGES.get(name, (-math.inf, math.inf))
        if not math.isfinite(value) or not least <= value < limit:
            called = _CALLED.get(name, name)
            raise ValueError(f"Invalid {called}: {value} (param_groups[{index}])")
        values.append(value)
    return values


def check_arguments(lr: Any, betas: tuple[Any, Any], weight_decay: float, eps: float = 0.0) -> None:
    """What torch's constructors check, and in their words, for those that torch has not."""
    if not as_float(lr) >= 0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not eps >= 0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    for index, beta in enumerate(betas):
        if not 0 <= as_float(beta) < 1:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not weight_decay >= 0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")


def max_norm_of(group: dict[str, Any], index: int) -> float:
    """The group's own limit of its gradients' norm; 0: none."""
    value = group.get("max_norm")
    if value is None:
        return 0.0
    value = as_float(value)
    if not value >= 0:
        raise ValueError(f"Invalid max_norm: {value} (param_groups[{index}])")
    return 0.0 if math.isinf(value) else value
