"""State of parameters in torch.optim's words: step, exp_avg, momentum_buffer, ...

torch keeps moments in the parameter's dtype; the daemon keeps them, and a
master of each parameter, in fp32. So that nothing is lost on the way to a
checkpoint and back, moments stay fp32 (torch casts them when it loads them) and
a parameter of 16 bits has one entry more, "master_param", which torch carries
along and does not use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from optstate import _native
from optstate._optimizers import OptimizerInfo
from optstate._torch_arrays import ArrayTransfer

StateEntry = dict[str, Any]

MASTER_PARAM = "master_param"


def keys_of(info: OptimizerInfo) -> list[str]:
    """All that an entry of this optimizer may have."""
    scalar = [info.scalar] if info.scalar else []
    return ["step", *scalar, *(name for name, _ in info.state_arrays), MASTER_PARAM]


def _like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """On the parameter's device and in its strides, as torch keeps its state."""
    if parameter.is_cpu and parameter.is_contiguous():
        return values
    laid_out = torch.empty_like(parameter, dtype=values.dtype, requires_grad=False)
    return laid_out.copy_(values)


def _number(value: float, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """What torch keeps: a 0-dim float tensor, in host memory unless fused."""
    if group.get("fused") or group.get("capturable"):
        return torch.tensor(float(value), dtype=torch.float32, device=parameter.device)
    is_double = torch.get_default_dtype() is torch.float64
    dtype = torch.float64 if is_double else torch.float32
    return torch.tensor(float(value), dtype=dtype, device="cpu")


def fetch_entries(
    arrays: ArrayTransfer,
    info: OptimizerInfo,
    indices: Sequence[int],
    tensors: Sequence[tuple[torch.Tensor, dict[str, Any]]],
) -> list[StateEntry | None]:
    """State of parameters, `tensors` being each with its group; for one that was never
    updated None or, as in torch, what Adagrad begins with."""
    counts = arrays.fetch_step_counts(indices)
    scalars = arrays.fetch_scalars(indices) if info.scalar else [0.0] * len(counts)
    wanted: list[tuple[int, int, tuple[int, ...]]] = []
    for index, count, (parameter, group) in zip(indices, counts, tensors):
        if count != 0:
            found = _arrays_of(info, parameter, group).values()
            wanted += [(which, index, shape) for which, shape in found]
    fetched = iter(arrays.fetch_arrays(wanted))
    entries: list[StateEntry | None] = []
    for count, scalar, (parameter, group) in zip(counts, scalars, tensors):
        entry: StateEntry | None = None
        if count != 0:
            entry = {"step": _number(count, parameter, group)}
            if info.scalar:
                entry[info.scalar] = _number(scalar, parameter, group)
            for key in _arrays_of(info, parameter, group):
                values = next(fetched)
                same = values.shape == parameter.shape
                entry[key] = _like(values, parameter) if same else values.to(parameter.device)
        elif info.name == "adagrad":
            entry = _adagrad_start(parameter, group)
        entries.append(entry)
    return entries


def _adagrad_start(parameter: torch.Tensor, group: dict[str, Any]) -> StateEntry:
    """torch's Adagrad has state from its constructor on, and cannot step without."""
    start = torch.full_like(
        parameter, group["initial_accumulator_value"], dtype=torch.float32, requires_grad=False
    )
    return {"step": _number(0, parameter, group), "sum": start}


def _arrays_of(
    info: OptimizerInfo, parameter: torch.Tensor, group: dict[str, Any]
) -> dict[str, tuple[int, tuple[int, ...]]]:
    arrays = info.arrays_of(group, parameter.shape)
    if parameter.dtype is not torch.float32:
        arrays[MASTER_PARAM] = (_native.MASTER, tuple(parameter.shape))
    return arrays


# torch's SGD and Muon, and lion-pytorch, count no steps, and need none but to know
# whether there was one.
_WITHOUT_STEP = ("sgd", "lion", "muon")


# Up to which torch's float64 counts without gaps.
_STEP_MAX = 2**53


def _step_of(info: OptimizerInfo, entry: StateEntry) -> float | None:
    if "step" not in entry and info.name in _WITHOUT_STEP:
        return float(any(entry.get(name) is not None for name, _ in info.state_arrays))
    return float(entry["step"]) if "step" in entry else None


def last_step_of(entries: dict[int, StateEntry | None]) -> int | None:
    """The most steps of a parameter in a checkpoint; None when one does not say."""
    present = [entry for entry in entries.values() if entry is not None]
    if not all("step" in entry for entry in present):
        return None
    return int(max((float(entry["step"]) for entry in present), default=0))


def complete_groups(
    torch_class: type[torch.optim.Optimizer],
    groups: Sequence[dict[str, Any]],
    present: Sequence[dict[str, Any]],
    defaults: dict[str, Any],
) -> None:
    """Gives loaded groups the options that torch did not have (yet) when they were saved.

    Raises ValueError when one lacks an option that it always had.
    """
    bare = torch_class.__new__(torch_class)  # torch fills them in while it unpickles
    bare.__setstate__(
        {"defaults": dict(defaults), "state": defaultdict(dict), "param_groups": groups}
    )
    for index, (group, now) in enumerate(zip(groups, present)):
        # torch's own constructors do not all put it into the defaults.
        for key, value in (("differentiable", False), ("max_norm", now.get("max_norm"))):
            if key in now:
                group.setdefault(key, value)
        missing = [key for key in defaults if key in now and key not in group]
        if missing:
            raise ValueError(f"loaded param_groups[{index}] has no {', '.join(missing)}")


def check_entry(
    info: OptimizerInfo,
    entry: StateEntry,
    name: str,
    parameter: torch.Tensor,
    group: dict[str, Any],
) -> None:
    """Raises ValueError when an entry of a checkpoint does not fit."""
    step_count = _step_of(info, entry)
    shapes = {name: shape for name, (_, shape) in info.arrays_of(group, parameter.shape).items()}
    keys = [] if step_count == 0 else list(shapes)
    missing = [key for key in keys if entry.get(key) is None]
    if step_count is None:
        missing.insert(0, "step")
    if info.scalar and info.scalar not in entry:
        missing.append(info.scalar)
    if missing:
        raise ValueError(f'loaded state of parameter "{name}" has no {", ".join(missing)}')
    if MASTER_PARAM in entry:
        keys.append(MASTER_PARAM)
        shapes[MASTER_PARAM] = tuple(parameter.shape)
    for key in keys:
        values = entry[key]
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            raise ValueError(f'loaded {key} of parameter "{name}" is not a floating point tensor')
        if values.layout is not torch.strided or values.is_meta:
            raise ValueError(
                f'loaded {key} of parameter "{name}" is sparse or without data, not a dense tensor'
            )
        if tuple(values.shape) != shapes[key]:
            raise ValueError(
                f'loaded {key} of parameter "{name}" has shape {list(values.shape)},'
                f" but the parameter has {list(shapes[key])}"
            )
    is_count = step_count is None or (0 <= step_count <= _STEP_MAX and step_count % 1 == 0)
    if not is_count:
        raise ValueError(f'loaded step of parameter "{name}" is {step_count}')


def load_entry(
    arrays: ArrayTransfer,
    info: OptimizerInfo,
    index: int,
    entry: StateEntry | None,
    parameter: torch.Tensor,
    group: dict[str, Any],
) -> None:
    """Sends one parameter's state; without an entry it starts anew, as in torch."""
    entry = entry or {"step": 0}
    is_new = _step_of(info, entry) == 0  # the daemon begins such arrays itself
    for key, (state_array, shape) in info.arrays_of(group, parameter.shape).items():
        values = None if is_new else entry.get(key)
        if values is None:
            values = torch.zeros(shape, dtype=torch.float32, device="cpu")
        arrays.load_array(state_array, index, values)
    arrays.load_step_count(index, int(_step_of(info, entry) or 0))
    if info.scalar:
        arrays.load_scalar(index, float(entry.get(info.scalar, 0.0)))
    if MASTER_PARAM in entry:
        arrays.load_array(_native.MASTER, index, _fitting_master(entry[MASTER_PARAM], parameter))


def _fitting_master(master: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The master where it rounds to the parameter, the parameter elsewhere.

    A parameter that went on without its master (in torch.optim) must not jump
    back to it.
    """
    values = parameter.detach()
    master = master.to(device=values.device, dtype=torch.float32)
    fits = master.to(values.dtype) == values
    if values.dtype == torch.bfloat16:
        # Half way between two, a split master goes with the one further from 0.
        half_way = (master.view(torch.int32) & 0xFFFF) == 0x8000
        fits |= half_way & ((master.view(torch.int32) + 0x8000).view(torch.float32) == values)
    return torch.where(fits, master, values.float())
