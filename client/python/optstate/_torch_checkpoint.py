"""State of parameters in torch.optim's words: step, exp_avg, exp_avg_sq, ...

torch keeps moments in the parameter's dtype; the daemon keeps them, and a
master of each parameter, in fp32. So that nothing is lost on the way to a
checkpoint and back, moments stay fp32 (torch casts them when it loads them) and
a parameter of 16 bits has one entry more, "master_param", which torch carries
along and does not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optstate import _native
from optstate._torch_binding import TensorBinding

StateEntry = dict[str, Any]

_MOMENTS = {"exp_avg": _native.EXP_AVG, "exp_avg_sq": _native.EXP_AVG_SQ}
_MAX = ("max_exp_avg_sq", _native.MAX_EXP_AVG_SQ)
MASTER_PARAM = "master_param"
KEYS = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", MASTER_PARAM)


def _like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """On the parameter's device and in its strides, as torch keeps its state."""
    if parameter.is_cpu and parameter.is_contiguous():
        return values
    laid_out = torch.empty_like(parameter, dtype=values.dtype, requires_grad=False)
    return laid_out.copy_(values)


def _step_tensor(step_count: int, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """What torch keeps: a 0-dim float tensor, in host memory unless fused."""
    if group.get("fused") or group.get("capturable"):
        return torch.tensor(float(step_count), dtype=torch.float32, device=parameter.device)
    is_double = torch.get_default_dtype() is torch.float64
    return torch.tensor(float(step_count), dtype=torch.float64 if is_double else torch.float32)


def fetch_entries(
    binding: TensorBinding,
    indices: Sequence[int],
    tensors: Sequence[tuple[torch.Tensor, dict[str, Any]]],
) -> list[StateEntry | None]:
    """State of parameters, `tensors` being each with its group; None, as in torch, for
    one that was never updated."""
    counts = binding.fetch_step_counts(indices)
    wanted: list[tuple[int, int]] = []
    for index, count, (parameter, group) in zip(indices, counts, tensors):
        if count != 0:
            wanted += [(which, index) for which in _arrays_of(parameter, group).values()]
    arrays = iter(binding.fetch_arrays(wanted))
    entries: list[StateEntry | None] = []
    for count, (parameter, group) in zip(counts, tensors):
        entry: StateEntry | None = None
        if count != 0:
            entry = {"step": _step_tensor(count, parameter, group)}
            for key in _arrays_of(parameter, group):
                entry[key] = _like(next(arrays), parameter)
        entries.append(entry)
    return entries


def _arrays_of(parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, int]:
    arrays = dict(_MOMENTS)
    if group["amsgrad"]:
        key, state_array = _MAX
        arrays[key] = state_array
    if parameter.dtype is not torch.float32:
        arrays[MASTER_PARAM] = _native.MASTER
    return arrays


def check_entry(
    entry: StateEntry, name: str, parameter: torch.Tensor, group: dict[str, Any]
) -> None:
    """Raises ValueError when an entry of a checkpoint does not fit."""
    keys = ["exp_avg", "exp_avg_sq"]
    if group["amsgrad"]:
        keys.append("max_exp_avg_sq")
    missing = [key for key in ["step", *keys] if key not in entry]
    if missing:
        raise ValueError(f'loaded state of parameter "{name}" has no {", ".join(missing)}')
    if MASTER_PARAM in entry:
        keys.append(MASTER_PARAM)
    for key in keys:
        values = entry[key]
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            raise ValueError(f'loaded {key} of parameter "{name}" is not a floating point tensor')
        if values.shape != parameter.shape:
            raise ValueError(
                f'loaded {key} of parameter "{name}" has shape {list(values.shape)},'
                f" but the parameter has {list(parameter.shape)}"
            )
    step_count = float(entry["step"])
    if step_count < 0 or step_count != int(step_count):
        raise ValueError(f'loaded step of parameter "{name}" is {step_count}')


def load_entry(
    binding: TensorBinding,
    index: int,
    entry: StateEntry | None,
    parameter: torch.Tensor,
    group: dict[str, Any],
) -> None:
    """Sends one parameter's state; without an entry it starts anew, as in torch."""
    if entry is None:
        zeros = torch.zeros(parameter.shape, dtype=torch.float32)
        entry = {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros, "max_exp_avg_sq": zeros}
    for key, state_array in _MOMENTS.items():
        binding.load_array(state_array, index, entry[key])
    if group["amsgrad"]:
        key, state_array = _MAX
        binding.load_array(state_array, index, entry[key])
    binding.load_step_count(index, int(entry["step"]))
    if MASTER_PARAM in entry:
        binding.load_array(_native.MASTER, index, _fitting_master(entry[MASTER_PARAM], parameter))


def _fitting_master(master: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The master where it rounds to the parameter, the parameter elsewhere.

    A parameter that went on without its master (in torch.optim) must not jump
    back to it.
    """
    values = parameter.detach()
    master = master.to(device=values.device, dtype=torch.float32)
    return torch.where(master.to(values.dtype) == values, master, values.float())
