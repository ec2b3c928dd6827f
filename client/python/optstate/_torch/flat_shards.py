"""Parameters that are flat pieces of a tensor: of FullyShardedDataParallel (FSDP1), and of trainers
that say so with flat_shard().

A piece is a range of the elements of a global tensor, in the order in which they lie in memory. The
parameter is that piece, one-dimensional, and its gradient arrives reduced.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from optstate.session_spec import ParameterSpec, Shard

# The attribute of a tensor that tells where it lies; None: whole, the same on all ranks. It is a
# tuple of plain values, which torch.load takes with weights_only.
_ATTRIBUTE = "_optstate_flat_shard"
_FSDP_PREFIX = "_fsdp_wrapped_module."


class FlatShard(NamedTuple):
    """Where a piece lies: elements from `begin` on of a tensor of `global_numel`."""

    name: str | None  # of the global tensor; None: what the parameter is called
    global_numel: int
    begin: int


def flat_shard(
    tensor: torch.Tensor, *, global_numel: int, begin: int, name: str | None = None
) -> torch.Tensor:
    """Says that a parameter is this rank's flat piece of a tensor; returns the parameter.

    The parameter has the elements from `begin` on of a tensor of `global_numel` elements, as they
    lie in memory when that tensor is contiguous. All ranks give an optimizer pieces of the same
    tensors in the same order; a rank that has nothing of one gives an empty piece. A range that
    several ranks have is a replica. The gradient of a piece arrives reduced, in `grad`.

    name: of the tensor, the same on all ranks. None: what the parameter is called otherwise.

    TypeError: the parameter is not one-dimensional. ValueError: the piece does not lie within the
    tensor. Not collective: overlaps and gaps are found when an optimizer is constructed.
    """
    where = FlatShard(name, operator.index(global_numel), operator.index(begin))
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dim() != 1:
        raise TypeError(
            f"a flat piece is a tensor of one dimension, not a {type(tensor).__name__} of"
            f" {list(tensor.shape)}: flatten it (view(-1)) before it becomes a parameter"
        )
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError(f"Invalid name: {name!r} (of the tensor that this is a piece of, or None)")
    _check_within(tensor, where, f'the piece of "{name or "a tensor"}"')
    restore_flat_shard(tensor, where)
    return tensor


def flat_shard_of(tensor: torch.Tensor) -> FlatShard | None:
    """Returns where a piece lies; None for a parameter that is none."""
    noted = getattr(tensor, _ATTRIBUTE, None)
    return None if noted is None else FlatShard(*noted)


def restore_flat_shard(tensor: torch.Tensor, where: FlatShard | None) -> None:
    """Notes on a copy of a tensor what was noted on the tensor."""
    if where is not None:
        setattr(tensor, _ATTRIBUTE, tuple(where))


def name_without_fsdp(name: str) -> str:
    """Returns a parameter's name as the model has it that FullyShardedDataParallel wraps."""
    return name.replace(_FSDP_PREFIX, "")


def is_flat_shard(tensor: torch.Tensor) -> bool:
    return getattr(tensor, _ATTRIBUTE, None) is not None


def given_name(tensor: torch.Tensor) -> str | None:
    """Returns the name that flat_shard() was given for the tensor."""
    where = flat_shard_of(tensor)
    return None if where is None else where.name


def lacks_place(tensor: torch.Tensor) -> bool:
    """Returns whether a parameter is FSDP1's, and nothing says which part of the model it is."""
    is_fsdp = hasattr(tensor, "_is_flat_param") or hasattr(tensor, "_fsdp_flattened")
    return is_fsdp and not hasattr(tensor, _ATTRIBUTE)


def note_fsdp_shards(model: torch.nn.Module) -> None:
    """Notes on the parameters of a model that FullyShardedDataParallel has wrapped which parts of
    the model they are. Does nothing for other models."""
    module = sys.modules.get("torch.distributed.fsdp")
    fsdp = getattr(module, "FullyShardedDataParallel", None)
    if fsdp is None:
        return
    for wrapped in fsdp.fsdp_modules(model):
        handle = getattr(wrapped, "_handle", None)
        if handle is not None:
            _note_handle(handle)


def _note_handle(handle: Any) -> None:
    flat = handle.flat_param
    parameters: Sequence[torch.Tensor] | None = flat._params
    if not handle.uses_sharded_strategy:  # NO_SHARD: whole parameters, as under DDP
        for parameter in (flat, *(parameters or ())):
            setattr(parameter, _ATTRIBUTE, None)
    elif parameters is None:  # use_orig_params=False: equal parts of all parameters in a row
        size = flat._sharded_size.numel()
        restore_flat_shard(flat, FlatShard(None, size * handle.world_size, size * handle.rank))
    else:
        for parameter, numel, part in zip(parameters, flat._numels, flat._shard_param_infos):
            begin = part.intra_param_start_idx if part.in_shard else 0
            restore_flat_shard(parameter, FlatShard(None, numel, begin))


def shard_of_flat(tensor: torch.Tensor, where: FlatShard, what: str) -> Shard:
    """Returns the shard that a piece is; its owner is not known yet. TypeError for a parameter that
    is not one-dimensional any more, ValueError for one that does not lie within the tensor."""
    if tensor.dim() != 1:
        raise TypeError(
            f"{what} is {list(tensor.shape)} now, and not the flat piece of a tensor that it was:"
            " FullyShardedDataParallel has gathered it, for summon_full_params() or under no_sync()"
        )
    _check_within(tensor, where, what)
    return Shard(0, (where.global_numel,), (where.begin,), is_flat=True)


def _check_within(tensor: torch.Tensor, where: FlatShard, what: str) -> None:
    if where.begin < 0 or where.begin + tensor.numel() > where.global_numel:
        raise ValueError(
            f"{what} has {tensor.numel()} elements from {where.begin} on, and the tensor has"
            f" {where.global_numel}: it does not lie within"
        )


def check_pieces(pieces: Sequence[ParameterSpec]) -> None:
    """Raises ValueError when pieces of one tensor, each with its owner, overlap or leave a gap."""
    place, before = 0, ""
    by_begin = sorted(
        (each.shard.offset[0], each.numel, each.shard.owner) for each in pieces if each.numel
    )
    (whole,) = pieces[0].shard.global_shape
    for begin, numel, owner in [*by_begin, (whole, 0, -1)]:
        here = "the end" if owner < 0 else f"rank {owner}"
        if begin < place:
            last = min(place, begin + numel) - 1
            _raise_pieces(pieces, f"{before} and {here} both have elements {begin} to {last}")
        if begin > place:
            between = f"between {before or 'the beginning'} and {here}"
            _raise_pieces(pieces, f"no rank has elements {place} to {begin - 1}, {between}")
        place, before = begin + numel, here


def _raise_pieces(pieces: Sequence[ParameterSpec], what: str) -> NoReturn:
    (whole,) = pieces[0].shard.global_shape
    raise ValueError(
        f'of parameter "{pieces[0].name}", of {whole} elements, {what}: the pieces of all ranks of'
        " the job (process_group=) are the tensor, or some are the same on several ranks"
    )
