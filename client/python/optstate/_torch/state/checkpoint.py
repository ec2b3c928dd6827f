"""State of parameters under torch.optim's names: step, exp_avg, momentum_buffer, ...

torch keeps moments in the parameter's dtype; the daemon keeps them, and a
master of each parameter, in fp32. To lose nothing on the way to a checkpoint and
back, moments stay fp32 (torch casts them when it loads them) and the entry of a
16-bit parameter has one key more, "master_param", which torch keeps but does not
use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from optstate import _native
from optstate._torch.optimizer_info import OptimizerInfo
from optstate._torch.state.arrays import ArrayTransfer

StateEntry = dict[str, Any]

MASTER_PARAM = "master_param"


def keys_of(info: OptimizerInfo) -> list[str]:
    """Returns all keys that an entry of this optimizer may have."""
    scalar = [info.scalar] if info.scalar else []
    return ["step", *scalar, *(name for name, _ in info.state_arrays), MASTER_PARAM]


def _like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns values on the parameter's device and with its strides, as torch keeps state."""
    if parameter.is_cpu and parameter.is_contiguous():
        return values
    laid_out = torch.empty_like(parameter, dtype=values.dtype, requires_grad=False)
    return laid_out.copy_(values)


def _number(value: float, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Returns the 0-dim float tensor that torch keeps, in host memory unless fused."""
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
    *,
    keys: Collection[str] | None = None,
    is_initialised: bool = False,
) -> list[StateEntry | None]:
    """Returns the state of parameters; `tensors` has each parameter with its group.

    A parameter that was never updated gets None or, as in torch, Adagrad's initial entry.
    keys: names of the wanted arrays; None: all.
    is_initialised: parameters that were never updated get the optimizer's initial entry.
    """
    counts = arrays.fetch_step_counts(indices)
    scalars = arrays.fetch_scalars(indices) if info.scalar else [0.0] * len(counts)
    wanted: list[list[tuple[str, int, tuple[int, ...]]]] = []
    for count, (parameter, group) in zip(counts, tensors):
        found = _arrays_of(info, parameter, group)
        if count == 0:  # the daemon has only a master
            is_shown = is_initialised and parameter.requires_grad
            found = {key: at for key, at in found.items() if is_shown and key == MASTER_PARAM}
        wanted.append([(key, *at) for key, at in found.items() if keys is None or key in keys])
    fetched = iter(
        arrays.fetch_arrays(
            [
                (which, index, shape)
                for index, found in zip(indices, wanted)
                for _, which, shape in found
            ]
        )
    )
    entries: list[StateEntry | None] = []
    for count, scalar, found, (parameter, group) in zip(counts, scalars, wanted, tensors):
        entry = {} if count else _start_of(info, parameter, group, is_initialised)
        if count:
            entry["step"] = _number(count, parameter, group)
            if info.scalar:
                entry[info.scalar] = _number(scalar, parameter, group)
        for key, _, _ in found:
            values = next(fetched)
            same = values.shape == parameter.shape
            entry[key] = _like(values, parameter) if same else values.to(parameter.device)
        entries.append(entry or None)
    return entries


def entry_keys(
    info: OptimizerInfo,
    count: int,
    parameter: torch.Tensor,
    group: dict[str, Any],
    is_initialised: bool,
) -> list[str]:
    """Returns the keys that fetch_entries() gives a parameter after `count` steps; no fetch."""
    if count == 0 and not has_start(info, parameter, is_initialised):
        return []
    scalar = [info.scalar] if info.scalar else []
    keys = ["step", *scalar, *_arrays_of(info, parameter, group)]
    if count == 0 and not is_initialised:
        keys = [key for key in keys if key != MASTER_PARAM]
    return keys


def has_start(info: OptimizerInfo, parameter: torch.Tensor, is_initialised: bool) -> bool:
    """Returns whether a parameter has an entry before its first update."""
    return info.name == "adagrad" or (is_initialised and parameter.requires_grad)


def _start_of(
    info: OptimizerInfo, parameter: torch.Tensor, group: dict[str, Any], is_initialised: bool
) -> StateEntry:
    """Returns the entry before the first step. torch's Adagrad has it from construction on, and
    cannot step without; for other optimizers, torch's distributed checkpoints create it."""
    if not has_start(info, parameter, is_initialised):
        return {}
    entry: StateEntry = {"step": _number(0, parameter, group)}
    if info.scalar:
        entry[info.scalar] = _number(1, parameter, group)
    for key, (_, shape) in info.arrays_of(group, parameter.shape).items():
        value = group["initial_accumulator_value"] if info.name == "adagrad" else 0.0
        if shape == tuple(parameter.shape):
            entry[key] = torch.full_like(parameter, value, dtype=torch.float32, requires_grad=False)
        else:
            entry[key] = torch.full(shape, value, dtype=torch.float32, device=parameter.device)
    return entry


def _arrays_of(
    info: OptimizerInfo, parameter: torch.Tensor, group: dict[str, Any]
) -> dict[str, tuple[int, tuple[int, ...]]]:
    arrays = info.arrays_of(group, parameter.shape)
    if parameter.dtype is not torch.float32:
        arrays[MASTER_PARAM] = (_native.MASTER, tuple(parameter.shape))
    return arrays


# torch's SGD and Muon, and lion-pytorch, do not count steps; the daemon needs to know only
# whether there was one.
WITHOUT_STEP = ("sgd", "lion", "muon")


# The largest step: float64, which torch uses, counts up to here without gaps.
_STEP_MAX = 2**53


def step_of(info: OptimizerInfo, entry: StateEntry) -> float | None:
    if "step" not in entry and info.name in WITHOUT_STEP:
        return float(any(entry.get(name) is not None for name, _ in info.state_arrays))
    return float(entry["step"]) if "step" in entry else None


def last_step_of(entries: dict[int, StateEntry | None]) -> int | None:
    """Returns the highest step of the entries in a checkpoint; None when one has no step."""
    present = [entry for entry in entries.values() if entry is not None]
    if not all("step" in entry for entry in present):
        return None
    return int(max((float(entry["step"]) for entry in present), default=0))


def is_of_another_step(
    info: OptimizerInfo, entries: dict[int, StateEntry | None], step_counts: Sequence[int]
) -> bool:
    """Returns whether state is of a step other than that of these counts; entries may be missing.

    An entry with which its parameter starts anew belongs to no step; an entry that counts no
    steps (torch's SGD) is taken to be of another step.
    """
    steps = {
        index: (step_of(info, entry), "step" in entry)
        for index, entry in entries.items()
        if entry is not None
    }
    return any(
        bool(step) and not (is_counted and step == step_counts[index])
        for index, (step, is_counted) in steps.items()
    )


def complete_groups(
    torch_class: type[torch.optim.Optimizer],
    groups: Sequence[dict[str, Any]],
    present: Sequence[dict[str, Any]],
    defaults: dict[str, Any],
) -> None:
    """Gives loaded groups the options that torch did not have (yet) when they were saved.

    Raises ValueError when a group lacks an option that torch always had.
    """
    bare = torch_class.__new__(torch_class)  # torch fills options in while it unpickles
    bare.__setstate__(
        {"defaults": dict(defaults), "state": defaultdict(dict), "param_groups": groups}
    )
    for index, (group, now) in enumerate(zip(groups, present)):
        # Not all of torch's constructors put "differentiable" into the defaults.
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
    """Raises ValueError when an entry of a checkpoint does not fit its parameter."""
    step_count = step_of(info, entry)
    shapes = {name: shape for name, (_, shape) in info.arrays_of(group, parameter.shape).items()}
    keys = [key for key in shapes if entry.get(key) is not None]
    missing = [] if step_count == 0 else [key for key in shapes if key not in keys]
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
        check_array(entry[key], key, name, shapes[key])
    if step_count is not None:
        check_step(step_count, name)


def check_starts(info: OptimizerInfo, entries: Mapping[str, StateEntry | None]) -> None:
    """Raises ValueError when an entry whose step is 0 has other values than a parameter's
    initial state: the daemon initializes the arrays itself, so the entry's would be lost.

    entries: by the parameters' names.
    """
    sums: set[float] = set()
    for name, entry in entries.items():
        if not entry or step_of(info, entry) != 0:
            continue
        is_start = not info.scalar or float(entry[info.scalar]) == 1
        for key, _ in info.state_arrays:
            values = entry.get(key)
            if not isinstance(values, torch.Tensor) or values.is_meta or not values.numel():
                continue
            if info.name == "adagrad":  # initial_accumulator_value, one for the whole job
                sums.add(float(values.flatten()[0]))
                is_start &= len(sums) == 1 and bool((values == next(iter(sums))).all())
            else:
                is_start &= not bool(values.any())
        if not is_start:
            raise ValueError(
                f'loaded state of parameter "{name}" is not what parameters begin with, but its'
                " step is 0, with which it begins anew: set its step too, or leave its entry out"
            )


def is_absent(value: Any) -> bool:
    """Returns whether an entry's value is None, or the {} that torch's distributed checkpoints
    produce for a key that a flattened checkpoint does not have."""
    return value is None or (isinstance(value, dict) and not value)


def check_step(value: Any, name: str) -> None:
    """Raises ValueError when a value cannot be a parameter's number of steps."""
    step = float(value)
    if not (0 <= step <= _STEP_MAX and step % 1 == 0):
        raise ValueError(f'loaded step of parameter "{name}" is {step}')


def check_array(values: Any, key: str, name: str, shape: tuple[int, ...]) -> None:
    """Raises ValueError when values cannot be a parameter's array of this shape."""
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        raise ValueError(f'loaded {key} of parameter "{name}" is not a floating point tensor')
    if values.layout is not torch.strided or values.is_meta:
        raise ValueError(
            f'loaded {key} of parameter "{name}" is sparse or without data, not a dense tensor'
        )
    if tuple(values.shape) != shape:
        raise ValueError(
            f'loaded {key} of parameter "{name}" has shape {list(values.shape)},'
            f" but the parameter has {list(shape)}"
        )


class PartialEntry(dict):
    """Some keys of an entry: the others stay as they are in the daemon."""


def load_entry(
    arrays: ArrayTransfer,
    info: OptimizerInfo,
    index: int,
    entry: StateEntry | None,
    parameter: torch.Tensor,
    group: dict[str, Any],
) -> None:
    """Sends one parameter's state; a parameter without an entry starts anew, as in torch."""
    is_partial = isinstance(entry, PartialEntry)
    entry = entry or {"step": 0}
    # The daemon initializes the arrays of such a parameter itself.
    is_new = not is_partial and step_of(info, entry) == 0
    for key, (state_array, shape) in info.arrays_of(group, parameter.shape).items():
        if is_partial and key not in entry:
            continue
        values = None if is_new else entry.get(key)
        if values is None:
            values = torch.zeros(shape, dtype=torch.float32, device="cpu")
        arrays.load_array(state_array, index, values)
    if not is_partial or "step" in entry:
        arrays.load_step_count(index, int(step_of(info, entry) or 0))
    if info.scalar and (not is_partial or info.scalar in entry):
        arrays.load_scalar(index, float(entry.get(info.scalar, 0.0)))
    if MASTER_PARAM in entry:
        arrays.load_array(_native.MASTER, index, fitting_master(entry[MASTER_PARAM], parameter))


def fitting_master(master: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns the master where it rounds to the parameter, the parameter elsewhere.

    A parameter that was trained further without its master (in torch.optim) must not
    jump back to the master.
    """
    values = parameter.detach()
    master = master.detach().to(device=values.device, dtype=torch.float32)
    fits = master.to(values.dtype) == values
    if values.dtype == torch.bfloat16:
        # A split master half way between two bfloat16 values belongs to the one further from 0.
        half_way = (master.view(torch.int32) & 0xFFFF) == 0x8000
        fits |= half_way & ((master.view(torch.int32) + 0x8000).view(torch.float32) == values)
    return torch.where(fits, master, values.float())
