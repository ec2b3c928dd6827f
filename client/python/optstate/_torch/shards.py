"""Parameters that the ranks have sharded by themselves: DTensors, as fully_shard() and
parallelize_module() make them.

The ranks of a job register one layout, the union of their shards. A rank's own part of the
layout, in the order of its parameters, is what the optimizer works on; see HeldSession.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.weak import WeakIdKeyDictionary

from optstate import errors
from optstate._torch.flat_shards import check_pieces, flat_shard_of, is_flat_shard, shard_of_flat
from optstate._torch.nodes.places import Places
from optstate._torch.ranks import Ranks
from optstate.session_spec import ParameterSpec, Shard


class Layout(NamedTuple):
    """The shards of this node's ranks by group, parameter and owner, and which of them this rank
    holds."""

    parameters: Sequence[ParameterSpec]
    held: Sequence[int]  # of each parameter of this rank, the index of its shard
    # By node, in the order of Places.nodes: the first node whose ranks hold the same shards.
    kinds: Sequence[int]


def is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


def is_shard(tensor: torch.Tensor) -> bool:
    """Returns whether a parameter is a part of a tensor, by what it is or what is noted on it."""
    return is_dtensor(tensor) or is_flat_shard(tensor)


# Rows (by the first dimension) of plain parameters that this node has the state of; other nodes
# have that of the others. By parameter, who noted them, and the rows: the last ones count. See
# nodes/owners.py.
_rows = WeakIdKeyDictionary()


def keep_rows(tensor: torch.Tensor, rows: tuple[int, int] | None, by: object) -> None:
    """Notes that this rank's part of a parameter are its rows [begin, end), none where they are
    equal; None: it is whole."""
    _rows.setdefault(tensor, []).append((by, rows))


def forget_rows(tensor: torch.Tensor, by: object) -> None:
    """Forgets what `by` has noted. What others note, or have noted before, stays: another
    optimizer may have the parameter by now, or again."""
    left = [each for each in _rows.pop(tensor, ()) if each[0] is not by]
    if left:
        _rows[tensor] = left


def rows_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Returns the rows of a parameter that this rank has a part of; None: it is whole."""
    noted = _rows.get(tensor) if _rows else None
    return noted[-1][1] if noted else None


def has_part(tensor: torch.Tensor) -> bool:
    """Returns whether this rank has only a part of a parameter."""
    return is_dtensor(tensor) or rows_of(tensor) is not None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a parameter, in the memory of the parameter: of a DTensor, or of
    a plain one that nodes have shared out; other tensors themselves."""
    if is_dtensor(tensor):
        return tensor._local_tensor
    rows = rows_of(tensor)
    return tensor if rows is None else tensor.detach()[slice(*rows)]


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a plain tensor for a parameter: this rank's part of it."""
    if not has_part(tensor):
        return tensor
    return local_of(tensor).detach().requires_grad_(tensor.requires_grad)


def state_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the shape that arrays of a parameter's state have: a DTensor itself, as
    its state is of DTensors, and this rank's rows of a plain parameter."""
    return tensor if is_dtensor(tensor) else stand_in(tensor)


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns this rank's part of a parameter's gradient, which lies as the parameter does."""
    gradient, rows = parameter.grad, rows_of(parameter)
    if gradient is not None and rows is not None:
        return gradient.detach()[slice(*rows)]
    if gradient is None or not is_dtensor(gradient):
        return gradient
    if is_dtensor(parameter) and gradient.placements != parameter.placements:
        # As torch's optimizers do: a gradient may be left to be summed.
        gradient = gradient.detach().redistribute(placements=parameter.placements)
    with torch.no_grad():
        local = gradient.to_local()
    return local.wait() if hasattr(local, "wait") else local


def like_parameter(values: Any, parameter: torch.Tensor) -> Any:
    """Returns an array of a DTensor's state as torch's optimizers have it, a DTensor of the
    parameter's mesh and placements; other values and arrays of other parameters as they are."""
    if not is_dtensor(parameter) or not isinstance(values, torch.Tensor) or not values.dim():
        return values
    if values.shape != local_of(parameter).shape:
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_values(values: Any, parameter: torch.Tensor, what: str) -> Any:
    """Returns this rank's part of an array of state: of a DTensor on the parameter's mesh, of a
    whole tensor, or the part itself. ValueError for a DTensor of another mesh."""
    if not isinstance(values, torch.Tensor):
        return values
    if is_dtensor(values):
        if not is_dtensor(parameter):
            return values.full_tensor()
        if values.device_mesh != parameter.device_mesh:
            raise ValueError(
                f"{what} is a DTensor of another mesh than its parameter: load it with"
                " torch.distributed.checkpoint, which reshards it"
            )
        if values.placements != parameter.placements:
            values = values.redistribute(placements=parameter.placements)
        return local_of(values)
    flat = flat_shard_of(parameter)
    if flat is not None and values.shape == (flat.global_numel,) != parameter.shape:
        return values.narrow(0, flat.begin, parameter.numel())
    if not has_part(parameter) or values.shape != parameter.shape:
        return values
    rows = rows_of(parameter)
    if rows is not None:
        return values.detach()[slice(*rows)]
    local = local_of(parameter)
    if values.shape == local.shape:
        return values
    _, offset = _place_of(parameter, what)
    for dimension, (begin, size) in enumerate(zip(offset, local.shape)):
        values = values.narrow(dimension, min(begin, values.shape[dimension] - size), size)
    return values


def as_dtensor(values: Any, parameter: torch.Tensor, what: str) -> Any:
    """Returns an array of state, given whole or as a DTensor, as like_parameter() does."""
    if rows_of(parameter) is not None:
        return local_values(values, parameter, what)
    if not is_dtensor(parameter) or not isinstance(values, torch.Tensor) or is_dtensor(values):
        return values
    if values.shape != parameter.shape:
        return values
    return like_parameter(local_values(values, parameter, what), parameter)


def _place_of(tensor: torch.Tensor, what: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's part of a DTensor, and where it begins. TypeError when
    torch does not say, or the part is not one block."""
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:
        raise TypeError(f"{what} is a DTensor, which optstate supports from torch 2.5 on") from None
    placements = tensor.placements
    if any(each.is_partial() for each in placements):
        raise TypeError(
            f"{what} is a DTensor with a Partial placement, {placements}: no rank has its values."
            " Redistribute it to Shard or Replicate before the optimizer is constructed"
        )
    local = tuple(local_of(tensor).shape)
    try:
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, placements
        )
        shape, offset = tuple(map(int, shape)), tuple(map(int, offset))
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise TypeError(
            f"{what} is a DTensor whose placements {placements} optstate does not support: torch"
            f" does not say where its parts are ({error})"
        ) from error
    if shape != local or len(offset) != len(shape):
        raise TypeError(
            f"{what} is a DTensor of which this rank has {list(local)}, and torch says"
            f" {list(shape)} of {list(tensor.shape)} with placements {placements}: the ranks of"
            " the job (process_group=) must be in the parameter's mesh, and each part one block"
        )
    return shape, offset


def shard_of(tensor: torch.Tensor, what: str) -> Shard:
    """Returns where this rank's part of a parameter is in the whole; the owner is not known yet.

    TypeError for a DTensor or a flat piece that cannot be served.
    """
    flat = flat_shard_of(tensor)
    if flat is not None:
        return shard_of_flat(tensor, flat, what)
    if not is_dtensor(tensor):
        begin = (0,) * tensor.dim()
        rows = rows_of(tensor)
        if rows is not None:  # a part without elements begins where the parameter ends
            begin = (rows[0] if rows[0] < rows[1] else tensor.shape[0], *begin[1:])
        return Shard(0, tuple(tensor.shape), begin)
    shape, offset = _place_of(tensor, what)
    # A part without elements begins where the tensor ends, or anywhere.
    ends = [whole - size for whole, size in zip(tensor.shape, shape)]
    return Shard(0, tuple(tensor.shape), tuple(map(min, offset, ends)))


def describe_layout(tensor: torch.Tensor) -> str:
    """Returns how the ranks share a parameter, as this rank has it, in words."""
    if not is_dtensor(tensor):
        return "whole, and no DTensor"
    mesh = list(tensor.device_mesh.mesh.shape)
    return f"{tuple(tensor.placements)} on a mesh of {mesh}"


def exchange(
    ranks: Ranks,
    places: Places,
    make_mine: Callable[[], Sequence[ParameterSpec]],
    describe: Callable[[int], str],
) -> Layout:
    """Returns the layout of the shards of this node's ranks. Collective: raises on all ranks or
    on none.

    make_mine: returns this rank's parameters, each with its shard. describe: returns how the ranks
    share a parameter, by its place, as this rank has it.

    A shard that several ranks of a node hold is owned by the lowest of them. Owners are ranks of
    their node. ValueError: the ranks have other parameters, or do not hold one whole; it names the
    first rank that differs. UnimplementedError: nodes share shards, and not all of them.
    """
    mine: Sequence[ParameterSpec] = ()
    error: Exception | None = None
    try:
        mine = make_mine()
    except Exception as failure:
        error = failure
    failed = None if error is None else (getattr(error, "code", 2), str(error))
    found = ranks.gather((mine, failed))
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(found):
        if other is not None:
            raise errors.from_status(other[0], f"rank {rank}: {other[1]}")
    everyones = [specs for specs, _ in found]
    for rank, theirs in enumerate(everyones):
        _check_alike(everyones[0], theirs, rank)
    for index, of_ranks in enumerate(zip(*everyones)):
        fault = _find_fault(of_ranks)
        if fault is not None:  # on every rank alike
            _raise_fault(of_ranks, ranks.gather(describe(index)), fault)
    of_nodes = [
        _of_node([everyones[rank] for rank in places.ranks_of(node)]) for node in places.nodes
    ]
    kinds = [of_nodes.index(of_node) for of_node in of_nodes]
    _check_shared(everyones, places, kinds)
    layout, helds = of_nodes[places.node_of[ranks.rank]]
    return Layout(layout, helds[places.local_rank], kinds)


def _place(spec: ParameterSpec) -> tuple:
    """Returns which part of its parameter a shard is."""
    assert spec.shard is not None
    return tuple(spec.shape), tuple(spec.shard.offset)


def key_of(spec: ParameterSpec) -> tuple:
    """Returns what the same part of the same parameter has on every rank; the name comes first."""
    return (spec.name,) if spec.shard is None else (spec.name, *_place(spec))


def _of_node(
    everyones: Sequence[Sequence[ParameterSpec]],
) -> tuple[list[ParameterSpec], list[list[int]]]:
    """Returns the layout of one node's ranks, and what each of them holds."""
    layout: list[ParameterSpec] = []
    helds: list[list[int]] = [[] for _ in everyones]
    for of_ranks in zip(*everyones):
        index_of: dict[tuple, int] = {}
        for rank, spec in enumerate(of_ranks):
            place = _place(spec)
            if place not in index_of:
                index_of[place] = len(layout)
                layout.append(spec._replace(shard=spec.shard._replace(owner=rank)))
            helds[rank].append(index_of[place])
    return layout, helds


def _check_shared(
    everyones: Sequence[Sequence[ParameterSpec]], places: Places, kinds: Sequence[int]
) -> None:
    """Raises UnimplementedError when nodes share a shard that do not share all: such nodes could
    not compare what they have prepared of it, and its norm would count twice."""
    for of_ranks in zip(*everyones):
        node_of: dict[tuple, int] = {}
        for spec, node in zip(of_ranks, places.node_of):
            other = node_of.setdefault(_place(spec), node)
            if spec.numel and kinds[other] != kinds[node]:
                raise errors.UnimplementedError(
                    f'a part of parameter "{spec.name}" lies on {places.nodes[other]} and on'
                    f" {places.nodes[node]}, which hold different parts of other parameters. Nodes"
                    " share all of their shards or none: shard this parameter too (leave no"
                    " parameter out of fully_shard), or lay the mesh so that its replicated"
                    " dimension joins whole nodes, with the shards in the same order on each"
                )


def _facts(spec: ParameterSpec) -> tuple:
    """Returns what is the same on all ranks."""
    of_shard = spec.shard.global_shape, spec.shard.is_flat
    return spec.name, *of_shard, spec.dtype, spec.gradient_dtype, spec.group


def _check_alike(first: Sequence[ParameterSpec], specs: Sequence[ParameterSpec], rank: int) -> None:
    """Raises ValueError when a rank has other parameters than rank 0."""
    for index, (expected, spec) in enumerate(zip(first, specs)):
        if _facts(expected) != _facts(spec):
            _raise_other(
                f'parameter {index} is "{expected.name}" {list(expected.shard.global_shape)} on'
                f' rank 0, and "{spec.name}" {list(spec.shard.global_shape)} (or another dtype or'
                f" group) on rank {rank}"
            )
    if len(first) != len(specs):
        _raise_other(f"rank 0 has {len(first)} parameters, and rank {rank} has {len(specs)}")


def _raise_other(what: str) -> NoReturn:
    raise ValueError(
        f"{what}: the ranks of a job have the same parameters, of which each holds its shards,"
        " perhaps empty ones. Stages of a pipeline are jobs of their own, each with its ranks as"
        " process_group="
    )


def _find_fault(of_ranks: Sequence[ParameterSpec]) -> str | None:
    """Returns why the ranks do not hold a parameter whole; None: they do. Raises ValueError for
    flat pieces that are not a whole tensor."""
    by_place: dict[tuple, ParameterSpec] = {}
    for rank, spec in enumerate(of_ranks):
        assert spec.shard is not None
        by_place.setdefault(_place(spec), spec._replace(shard=spec.shard._replace(owner=rank)))
    shards = list(by_place.values())
    assert shards[0].shard is not None
    if shards[0].shard.is_flat:
        check_pieces(shards)
        return None
    present = sum(spec.numel for spec in shards)
    whole = math.prod(shards[0].shard.global_shape)
    if present != whole:
        return f"hold {present} elements, and it has {whole}"
    if _overlap(shards):
        return "hold some elements in parts of different ranks, and others not at all"
    return None


def _overlap(blocks: Sequence[ParameterSpec]) -> bool:
    """Returns whether two of these parts of one parameter, all different, have an element in
    common."""
    assert blocks[0].shard is not None
    blocks = [each for each in blocks if each.numel]
    places = [_place(each) for each in blocks]
    is_grid = True
    for dim, size in enumerate(blocks[0].shard.global_shape if blocks else ()):
        cuts = sorted({offset[dim] for _, offset in places})
        end_of = dict(zip(cuts, [*cuts[1:], size]))
        is_grid = is_grid and all(
            offset[dim] + shape[dim] == end_of[offset[dim]] for shape, offset in places
        )
    if is_grid:  # as meshes make it: the parts are its cells
        return False
    return any(
        all(a < b + n and b < a + m for a, m, b, n in zip(*one[::-1], *other[::-1]))
        for one, other in itertools.combinations(places, 2)
    )


def _raise_fault(of_ranks: Sequence[ParameterSpec], layouts: Sequence[str], fault: str) -> NoReturn:
    """Raises ValueError about a parameter that the ranks do not hold whole.

    layouts: describe_layout(), by rank.
    """
    name, count = of_ranks[0].name, len(of_ranks)
    what = f'of parameter "{name}" the {count} ranks of the job {fault}'
    other = next((rank for rank, each in enumerate(layouts) if each != layouts[0]), None)
    if other is not None:
        said = [f"rank {i} has {list(of_ranks[i].shape)}, {layouts[i]}" for i in (0, other)]
        what += f". Rank {other} is the first that lays it out otherwise: {'; '.join(said)}"
    raise ValueError(
        f"{what}: all ranks of its mesh train one job together (process_group=), each with a part"
        " that is one block, by the same mesh and placements"
    )


def local_entries(
    entries: Mapping[int, Any], tensors: Sequence[torch.Tensor], name_of: Callable[[int], str]
) -> dict[int, Any]:
    """Returns a checkpoint's entries, by parameter, with this rank's parts of DTensors."""
    found = dict(entries)
    for index, entry in entries.items():
        if entry is not None:
            found[index] = type(entry)(entry)  # a partial one stays one
        for key, value in (entry or {}).items():
            what = f'{key} of parameter "{name_of(index)}"'
            found[index][key] = local_values(value, tensors[index], what)
    return found
