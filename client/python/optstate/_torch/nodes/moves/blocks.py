"""Parts of parameters as jobs have them, and what two jobs have in common of a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from optstate.session_spec import ParameterSpec, Shard

# Where two blocks overlap, in each of them.
Overlap = tuple[tuple[slice, ...], tuple[slice, ...]]


class Block(NamedTuple):
    """A job's part of a parameter: one block of its elements, perhaps all, perhaps none."""

    name: str  # of the parameter; empty: of what only names the job's part in a run
    owner: int  # the rank of its node, in a job that ranks attach to
    spec: ParameterSpec  # as the layout of the job that has it

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.spec.shape)

    @property
    def offset(self) -> tuple[int, ...]:
        shard = self.spec.shard
        return (0,) * len(self.shape) if shard is None else tuple(shard.offset)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The parameter's shape; without elements where only other nodes have them."""
        shard = self.spec.shard
        return self.shape if shard is None else tuple(shard.global_shape)

    @property
    def facts(self) -> tuple[int, int, int]:
        """Returns what is the same of all parts of a parameter."""
        return self.spec.dtype, self.spec.gradient_dtype, self.spec.group

    def overlap(self, other: Block) -> Overlap | None:
        """Returns the slices of this block, and of the other one, that both have; None: nothing."""
        of_mine, of_theirs = [], []
        for at, size, there, their_size in zip(self.offset, self.shape, other.offset, other.shape):
            begin, end = max(at, there), min(at + size, there + their_size)
            if begin >= end:
                return None
            of_mine.append(slice(begin - at, end - at))
            of_theirs.append(slice(begin - there, end - there))
        return tuple(of_mine), tuple(of_theirs)


def numel_of(overlap: Overlap) -> int:
    return math.prod(each.stop - each.start for each in overlap[0])


def block_of(spec: ParameterSpec, *, names_part: bool = False) -> Block:
    """Returns a parameter of this rank's layout. names_part: it is the one that parts.py adds."""
    owner = 0 if spec.shard is None else spec.shard.owner
    return Block("" if names_part else spec.name, owner, spec)


def in_parcel(block: Block) -> ParameterSpec:
    """Returns how a job of one rank has the block: its name says which rank's it was."""
    shard = Shard(0, block.whole_shape, block.offset)
    return block.spec._replace(name=f"{block.name}#{block.owner}", shard=shard)


class Region(NamedTuple):
    """A block with elements, and where it is: the number of the job, its place in the layout."""

    source: int
    index: int
    block: Block


class Regions:
    """All parts of parameters that some jobs have together, each once."""

    def __init__(self, jobs: Iterable[Sequence[Block]]) -> None:
        self._by_name: dict[str, dict[tuple, Region]] = {}
        self._wholes: dict[str, tuple[int, ...]] = {}
        self._empty: dict[str, Region] = {}
        for source, blocks in enumerate(jobs):
            for index, block in enumerate(blocks):
                if not block.name:
                    continue
                of_name = self._by_name.setdefault(block.name, {})
                if math.prod(block.whole_shape) > math.prod(self._wholes.get(block.name, (0,))):
                    self._wholes[block.name] = block.whole_shape
                else:
                    self._wholes.setdefault(block.name, block.whole_shape)
                region = Region(source, index, block)
                if block.spec.numel:
                    # The first job that has it gives it.
                    of_name.setdefault((block.offset, block.shape), region)
                else:
                    self._empty.setdefault(block.name, region)

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def of(self, name: str) -> list[Region]:
        return list(self._by_name.get(name, {}).values())

    def with_numbers_of(self, block: Block) -> list[Region]:
        """Returns the parts that have the numbers of a block, such as its step count."""
        found = self.of(block.name)
        if block.spec.numel:
            return [each for each in found if each.block.overlap(block) is not None]
        if not found and block.name in self._empty:
            return [self._empty[block.name]]
        return found

    def whole_shape(self, name: str) -> tuple[int, ...]:
        return self._wholes[name]

    def lacking(self) -> list[str]:
        """Returns names of parameters of which not all elements are here."""
        return [
            name
            for name, regions in self._by_name.items()
            if sum(each.block.spec.numel for each in regions.values())
            < math.prod(self._wholes[name])
        ]

    def covers(self, block: Block) -> bool:
        """Returns whether every element of a block is here."""
        found = (region.block.overlap(block) for region in self.of(block.name))
        return sum(map(numel_of, filter(None, found))) == block.spec.numel
