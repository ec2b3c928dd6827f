"""Chooses which rank pushes which gradients, and refuses what cannot be had with that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optstate import _native, errors
from optstate._torch.flat_shards import is_flat_shard
from optstate._torch.layout import optimizer_info, parameter_specs
from optstate._torch.settings import Settings
from optstate._torch.shards import is_shard
from optstate.session_spec import ParameterSpec

# Optimizers whose updates use more of a parameter than the element that they update.
NEED_WHOLE = ("lamb", "adafactor", "muon")


def partition_of(settings: Settings, *, is_sharded: bool) -> int:
    """Returns the C API's number of the partition."""
    if is_sharded:
        return _native.PARTITIONS["local"]
    if settings.reduction == "daemon":
        return _native.REPLICATED
    return _native.PARTITIONS[settings.partition or "greedy"]


def check_overlap(settings: Settings) -> None:
    """Raises ValueError when several ranks cannot push gradients during backward()."""
    if settings.overlap and settings.reduction != "daemon":
        raise ValueError(
            'overlap=True with several ranks needs reduction="daemon": a gradient that is'
            " pushed during backward() is not reduced yet"
        )


def check_same_keyword(name: str, asked: Sequence[str | None]) -> None:
    """Raises ValueError, on every rank alike, when ranks give a keyword other values."""
    for rank, each in enumerate(asked):
        if each != asked[0]:
            raise ValueError(
                f"rank {rank} has {name}={each!r}, and rank 0 {name}={asked[0]!r}: give all ranks"
                " of the job the same"
            )


def shard_specs(
    param_groups: Sequence[dict[str, Any]],
    names: Sequence[str],
    settings: Settings,
    *,
    shares_out: bool,
) -> list[ParameterSpec]:
    """Returns this rank's parameters with their shards.

    shares_out: nodes share out the parameters that are whole.

    ValueError for settings that shards exclude, errors.UnimplementedError for an optimizer that
    needs whole parameters, TypeError for a parameter that cannot be served.
    """
    which = "parameters that are sharded (DTensors, as of fully_shard, or flat pieces)"
    tensors = [tensor for group in param_groups for tensor in group["params"]]
    is_cut = any(map(is_shard, tensors))
    if settings.reduction != "trainer" and (is_cut or settings.reduction == "daemon"):
        keyword, value = settings.reduction_as_given
        raise ValueError(
            f"{keyword}={value} cannot be had with {which}, whose gradients arrive reduced: leave"
            f" {keyword} out"
        )
    if settings.partition not in (None, "local") and (is_cut or not shares_out):
        raise ValueError(
            f"partition={settings.partition!r} cannot be had with {which}: each rank pushes the"
            ' gradients of its own shards. Leave partition out, or say "local"'
        )
    if settings.overlap:
        raise ValueError(
            f"overlap=True cannot be had with {which}, whose gradients are reduced during"
            " backward() and pushed by step(): leave overlap out"
        )
    specs = parameter_specs(param_groups, names, sharded=True)
    info = optimizer_info(param_groups, settings.optimizer)
    if info.name in NEED_WHOLE:
        for spec, tensor in zip(specs, tensors):
            is_whole = not spec.numel or tuple(spec.shape) == tuple(spec.shard.global_shape)
            # A flat piece has lost its shape, also when it is not cut.
            if not is_whole or is_flat_shard(tensor):
                if shares_out and not is_shard(tensor):
                    raise errors.UnimplementedError(
                        f'partition="contiguous" cuts parameter "{spec.name}", and an update of'
                        f" {info.name} needs it whole (a norm, row sums or a matrix product over"
                        ' all of it): say partition="greedy"'
                    )
                raise errors.UnimplementedError(
                    f'parameter "{spec.name}" is sharded, and an update of {info.name} needs it'
                    " whole (a norm, row sums or a matrix product over all of it). Take an"
                    " optimizer that updates each element by itself, as AdamW, or shard nothing"
                    " (DistributedDataParallel)"
                )
    return specs
