"""Finds where the ranks of several nodes want another job than each other.

Each node's daemon compares its own ranks alone. What parts nodes would show at the first step, as
another digest, which does not say why.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from optstate import _native
from optstate._torch.optimizer_info import by_kind
from optstate._torch.ranks import Ranks
from optstate._torch.tensors import DTYPES
from optstate.session_spec import SessionSpec

# Fields of a spec that change what a step does: the keyword that gives each, and the names of its
# numbers.
_SETTINGS: dict[str, tuple[str, Mapping[str, int]]] = {
    "partition": ("partition", {**_native.PARTITIONS, "replicated": _native.REPLICATED}),
    "accumulate": ("accumulate", {}),
    "accumulate_dtype": ("accumulate_dtype", _native.ACCUMULATE_DTYPES),
    "state_format": ("state_dtype", _native.STATE_FORMATS),
    "master_format": ("master", _native.MASTER_FORMATS),
    "loss_scaler": ("loss_scaler", {}),
}

# The names and values that are compared, in order.
Facts = list[tuple[str, str]]


def _facts(spec: SessionSpec) -> Facts:
    facts = [("the optimizer", by_kind(spec.optimizer).name)]
    # Nodes that hold other shards than each other have other parameters; what they are shards of
    # was compared when the ranks told each other of them.
    parameters = spec.parameters if spec.held is None else ()
    if spec.held is None:
        facts.append(("the number of parameters", str(len(parameters))))
    for index, each in enumerate(parameters):
        text = (
            f'"{each.name}" of shape {tuple(each.shape)}, {DTYPES[each.dtype]} with gradients'
            f" {DTYPES[each.gradient_dtype]}, in group {each.group}"
        )
        facts.append((f"parameter {index}", text))
    facts.append(("the number of groups", str(len(spec.group_options))))
    facts += [
        (f"the options of group {index}", _options(spec.optimizer, bits))
        for index, bits in enumerate(spec.group_options)
    ]
    return facts + [
        (keyword, _name_of(getattr(spec, field), names))
        for field, (keyword, names) in _SETTINGS.items()
    ]


def _options(optimizer: int, bits: int) -> str:
    """Returns the names of the options that are set."""
    names = by_kind(optimizer).options
    said = [name for bit, name in enumerate(names) if bits >> bit & 1]
    return " and ".join(said) or f"no {' nor '.join(names)}"


def _name_of(value: Any, names: Mapping[str, int]) -> str:
    """Returns a field's value as the keyword takes it."""
    return next((repr(name) for name, number in names.items() if number == value), str(value))


def _difference(one: Facts, other: Facts) -> tuple[str, str, str]:
    """Returns (what, in one, in the other) of the first difference; there is one."""
    theirs = dict(other)
    for what, value in one:
        if theirs.get(what, "not there") != value:
            return what, value, theirs.get(what, "not there")
    raise AssertionError("the facts are alike")


def find_unlike(ranks: Ranks, nodes: Sequence[str], spec: SessionSpec) -> str | None:
    """Returns the first difference between rank 0's job and another's, on every rank alike.

    nodes: the name of the node, by rank. Collective.
    """
    mine = _facts(spec)
    checksums = ranks.gather_numbers([zlib.crc32(repr(mine).encode())])
    if all(each == checksums[0] for each in checksums):
        return None
    other = next(rank for rank, each in enumerate(checksums) if each != checksums[0])
    found = ranks.gather(mine if ranks.rank in (0, other) else None)
    what, here, there = _difference(found[0], found[other])
    return (
        f'ranks ask for different jobs "{spec.job}". {what}: {here} on rank 0 ({nodes[0]}),'
        f" {there} on rank {other} ({nodes[other]}). Give all ranks the same model and options"
    )
