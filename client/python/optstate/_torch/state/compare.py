"""Tells whether a job already has a checkpoint's state, so that a load would change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from optstate import _native
from optstate._torch.optimizer_info import OptimizerInfo
from optstate._torch.shards import local_of
from optstate._torch.state.arrays import ArrayTransfer
from optstate._torch.state.checkpoint import MASTER_PARAM, StateEntry, fitting_master, step_of
from optstate._torch.tensors import in_memory

# Size of the arrays that are fetched at a time for a comparison.
_BATCH_BYTES = 64 << 20

# An array of the job (state array, parameter, shape), and the entry and key to be loaded there.
_Comparison = tuple[int, int, tuple[int, ...], StateEntry, str]


def has_all(
    arrays: ArrayTransfer,
    info: OptimizerInfo,
    tensors: Sequence[tuple[torch.Tensor, dict[str, Any]]],
    entries: Mapping[int, StateEntry | None],
) -> bool:
    """Returns whether the job has these entries, bit for bit as state_dict() would show them.

    tensors: all tensors of the job with their groups, in the job's order. The parameters must
    have the daemon's values. A 16-bit parameter whose entry has no master is expected to be
    its own master. Reads batch by batch, and stops at the first difference.
    """
    indices = range(len(tensors))
    steps = [step_of(info, entries.get(index) or {"step": 0}) for index in indices]
    if steps != arrays.fetch_step_counts(indices):
        return False
    if info.scalar:
        scalars = arrays.fetch_scalars(indices)
        for index, scalar in enumerate(scalars):
            if steps[index] and _fp32((entries[index] or {})[info.scalar]) != _fp32(scalar):
                return False
    batch: list[_Comparison] = []
    size = 0
    for comparison in _comparisons(info, tensors, entries, steps):
        batch.append(comparison)
        size += 4 * tensors[comparison[1]][0].numel()
        if size > _BATCH_BYTES:
            if not _are_equal(arrays, batch, tensors):
                return False
            batch, size = [], 0
    return _are_equal(arrays, batch, tensors)


def _fp32(value: Any) -> float:
    """Rounds a number as state_dict() does."""
    return torch.tensor(float(value), dtype=torch.float32, device="cpu").item()


def _comparisons(
    info: OptimizerInfo,
    tensors: Sequence[tuple[torch.Tensor, dict[str, Any]]],
    entries: Mapping[int, StateEntry | None],
    steps: Sequence[float | None],
) -> Iterator[_Comparison]:
    for index, (tensor, group) in enumerate(tensors):
        entry = entries.get(index) or {}
        if steps[index]:  # else the daemon has no arrays yet
            for key, (state_array, shape) in info.arrays_of(group, tensor.shape).items():
                yield state_array, index, shape, entry, key
        if tensor.dtype is not torch.float32 or MASTER_PARAM in entry:
            yield _native.MASTER, index, tuple(tensor.shape), entry, MASTER_PARAM


def _are_equal(
    arrays: ArrayTransfer,
    batch: Sequence[_Comparison],
    tensors: Sequence[tuple[torch.Tensor, dict[str, Any]]],
) -> bool:
    present = arrays.fetch_arrays([(which, index, shape) for which, index, shape, _, _ in batch])
    for values, (_, index, _, entry, key) in zip(present, batch):
        parameter = tensors[index][0]
        if key != MASTER_PARAM:
            wanted = entry[key]
        elif key in entry:
            wanted = fitting_master(entry[key], parameter)
        else:
            wanted = parameter
        if not same_bits(values, wanted):
            return False
    return True


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors, or this rank's parts of two DTensors, have the same shape and,
    in fp32, the same bits."""
    parts = (local_of(each).detach() for each in (one, other))
    one, other = (in_memory(part.to(torch.float32)) for part in parts)
    return one.shape == other.shape and torch.equal(one.view(torch.int32), other.view(torch.int32))
