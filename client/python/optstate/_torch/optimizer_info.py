"""The optimizers that the library reports: kinds, hyperparameters, state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from optstate import _native
from optstate._torch.device.backends import backend_of, to_list

# Optimizers that update no element without the rest of its parameter; devices have no kernels of
# them.
WHOLE_PARAMETER_OPTIMIZERS = frozenset({"adafactor", "lamb", "muon"})

_ADJUST_LR = {None: 0, "original": 0, "match_rms_adamw": 1, "spectral_unclamped": 2}


@dataclasses.dataclass(frozen=True)
class OptimizerInfo:
    """One optimizer. Names are torch's; an element of a tuple is named like "betas.0"."""

    kind: int
    name: str
    hyperparams: Sequence[str]
    defaults: Sequence[float]
    # (name, bit of the option that adds the array; 0: always there), in the daemon's order.
    state_arrays: Sequence[tuple[str, int]]
    options: Sequence[str]  # bit k of a group's options
    scalar: str | None  # a number per parameter

    def option_bits(self, group: dict[str, Any]) -> int:
        """Returns the options of a param group that are fixed at registration, as bits."""
        return sum(1 << k for k, name in enumerate(self.options) if group[name])

    def arrays_of(
        self, group: dict[str, Any], shape: Sequence[int]
    ) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Returns, by name, the daemon's number and the shape of each state array that a
        parameter of this shape has in the group."""
        return self.arrays_with(self.option_bits(group), shape)

    def arrays_with(
        self, bits: int, shape: Sequence[int]
    ) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Does arrays_of() for a group that was registered with these options."""
        shapes = {
            name: (_native.STATE_0 + k, self._shape_of(name, tuple(shape)))
            for k, (name, option) in enumerate(self.state_arrays)
            if option == 0 or bits & option
        }
        return {name: (k, found) for name, (k, found) in shapes.items() if found is not None}

    def _shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns torch's shape of a state array; None: parameters of this shape have none."""
        if self.name != "adafactor":
            return shape
        if len(shape) < 2:
            return shape if name == "variance" else None
        rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        return {"row_var": rows, "col_var": columns}.get(name)


def as_float(value: Any) -> float:
    """Converts a number, a flag or a 1-element tensor."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    return float(value.item() if backend_of(value) is None else to_list(value.reshape(())))


@functools.cache
def infos() -> dict[str, OptimizerInfo]:
    """Returns the optimizers by name, in the library's order."""
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
    """Returns the optimizer of a kind that the library knows."""
    return next(info for info in infos().values() if info.kind == kind)


_FLAGS = ("maximize", "nesterov", "decoupled_weight_decay")
# The names that torch's errors use for hyperparameters, where these differ from the keys.
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


# (minimum, exclusive maximum) of values for which the daemon computes what torch does. Other
# hyperparameters may be any finite number.
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
            raise KeyError(key)  # torch reads it in every step, and raises too
        return default  # older torch, or an option that this class does not have
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
    if name != "eps.0":  # Adafactor's eps.0 may be None: the epsilon of the dtype
        raise ValueError(f"Invalid {name}: None")
    return -1.0


def hyperparams_of(
    info: OptimizerInfo,
    group: dict[str, Any],
    index: int,
    required: Collection[str] = (),
    fixed: Mapping[str, float] = MappingProxyType({}),
) -> list[float]:
    """Returns a param group's values in the daemon's order, for a step.

    torch checks ranges in its constructors alone, so a group or a scheduler may bring values
    outside them, such as a learning rate below 0. ValueError, in torch's words, for NaN,
    infinity, and values outside _RANGES. required: keys whose absence from the group is a
    KeyError. fixed: values given to the constructor, which override those of groups.
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
    """Checks what torch's constructors check, in their words, for optimizers that torch lacks."""
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
    """Returns the group's own limit for the norm of its gradients; 0: none."""
    value = group.get("max_norm")
    if value is None:
        return 0.0
    value = as_float(value)
    if not value >= 0:
        raise ValueError(f"Invalid max_norm: {value} (param_groups[{index}])")
    return 0.0 if math.isinf(value) else value
