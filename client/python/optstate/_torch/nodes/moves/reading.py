"""Reads jobs whose state moves, and puts the parts together that another job needs of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from optstate import _native, errors
from optstate._storage import Storage
from optstate._torch.nodes.copied_state import Numbers, Wanted, fetch_numbers_of
from optstate._torch.nodes.moves.blocks import Block, Regions
from optstate._torch.nodes.moves.durability import as_it_is, as_of_loads
from optstate._torch.nodes.moves.holdings import HeldJob
from optstate._torch.optimizer_info import by_kind
from optstate._torch.state.arrays import ArrayTransfer
from optstate.session import Session
from optstate.session_spec import SessionSpec

# Elements that are on their way at a time, each 4 bytes. A larger array is alone on its way.
_PIECE_ELEMENTS = 16 << 20


def spec_of(held: HeldJob, spec: SessionSpec) -> SessionSpec:
    """Returns the spec of a session that reads a job, as rank 0. spec: of this rank."""
    return dataclasses.replace(
        spec,
        job=held.job,
        parameters=tuple(each.spec for each in held.blocks),
        held=None,
        rank=0,
        world_size=held.world_size,
        local_world_size=held.world_size,
        partition=held.partition,
        two_phase=held.part is not None,
        accumulate=spec.accumulate and held.mark is None,
        loss_scaler=spec.loss_scaler if held.mark is None else None,
        loss_scaler_state=None,
        storage=spec.storage if held.mark is None else as_it_is(parcel_storage(spec)),
        speculative=False,
        change_detection=0,
    )


def parcel_storage(spec: SessionSpec) -> Storage:
    """Returns where a parcel of the job lies: as the job, and on no device. It takes no steps, and
    that of a durable job is durable when it is whole."""
    return as_of_loads(spec.storage)._replace(
        has_offload_fraction=False, offload_fraction=0.0, device_budget_bytes=0
    )


class Reader:
    """A session that reads a job. Threads: one at a time."""

    def __init__(self, held: HeldJob, spec: SessionSpec) -> None:
        self._held = held
        self._spec = spec_of(held, spec)
        self._session = Session.open(self._spec)
        self._arrays = ArrayTransfer(self._session, self._spec.parameters)

    def numbers(self) -> Numbers:
        if self._held.mark is not None:
            scaler = self._held.mark.scaler
        else:
            its = self._spec.loss_scaler
            is_dynamic = its is not None and its.dynamic
            scaler = self._session.loss_scaler_state() if is_dynamic else None
        return fetch_numbers_of(self._arrays, self._spec, scaler)

    def fetch(self, wanted: Sequence[Wanted]) -> torch.Tensor:
        """Returns the arrays, one after the other."""
        return torch.cat([each.reshape(-1) for each in self._arrays.fetch_arrays(wanted)])

    def close(self) -> None:
        self._session.close()


def arrays_of(spec: SessionSpec, block: Block) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the numbers and shapes of the arrays that a job has of a block with elements."""
    if not block.spec.numel:
        return []
    bits = spec.group_options[block.spec.group]
    found = by_kind(spec.optimizer).arrays_with(bits, block.shape)
    return [(_native.MASTER, block.shape), *found.values()]


class Piece(NamedTuple):
    """The arrays that go from one job to others at a time, which lie one after the other."""

    source: int
    wanted: tuple[Wanted, ...]
    blocks: tuple[Block, ...]  # of each array

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for _, _, shape in self.wanted)


def groups_of(
    spec: SessionSpec, names: Sequence[str], regions: Regions
) -> Iterator[tuple[list[str], list[Piece]]]:
    """Returns parameters, in order, and the pieces of their state by source: as many as are on
    their way at a time."""

    def pieces_of(group: Sequence[str]) -> list[Piece]:
        found: dict[int, tuple[list[Wanted], list[Block]]] = {}
        for name in group:
            for region in regions.of(name):
                wanted, blocks = found.setdefault(region.source, ([], []))
                for array, shape in arrays_of(spec, region.block):
                    wanted.append((array, region.index, shape))
                    blocks.append(region.block)
        return [Piece(source, tuple(w), tuple(b)) for source, (w, b) in sorted(found.items())]

    group: list[str] = []
    elements = 0
    for name in names:
        of_name = sum(
            math.prod(shape)
            for region in regions.of(name)
            for _, shape in arrays_of(spec, region.block)
        )
        if group and elements + of_name > _PIECE_ELEMENTS:
            yield group, pieces_of(group)
            group, elements = [], 0
        group.append(name)
        elements += of_name
    if group:
        yield group, pieces_of(group)


def by_name(blocks: Sequence[Block]) -> dict[str, list[tuple[int, Block]]]:
    """Returns the blocks of each parameter, with their places in the layout."""
    found: dict[str, list[tuple[int, Block]]] = {}
    for index, block in enumerate(blocks):
        if block.name:
            found.setdefault(block.name, []).append((index, block))
    return found


class Assembly:
    """The arrays that one job needs of a group of parameters, while their pieces come."""

    def __init__(
        self,
        spec: SessionSpec,
        blocks: Mapping[str, Sequence[tuple[int, Block]]],
        names: Sequence[str],
    ) -> None:
        """blocks: of the job's layout, as by_name() has them; those with these names are put
        together."""
        self._blocks = blocks
        self._arrays: dict[tuple[int, int], torch.Tensor] = {}
        for name in names:
            for index, block in blocks.get(name, ()):
                for array, shape in arrays_of(spec, block):
                    values = torch.empty(shape, dtype=torch.float32, device="cpu")
                    self._arrays[index, array] = values

    def take(self, piece: Piece, flat: torch.Tensor) -> None:
        """Copies what the job needs of a piece."""
        parts = flat.split([math.prod(shape) for _, _, shape in piece.wanted])
        for (array, _, shape), theirs, values in zip(piece.wanted, piece.blocks, parts):
            for index, block in self._blocks.get(theirs.name, ()):
                mine, both = self._arrays.get((index, array)), theirs.overlap(block)
                if mine is None or both is None:
                    continue
                if shape == theirs.shape:
                    from_theirs, into_mine = both
                    mine[into_mine].copy_(values.view(shape)[from_theirs])
                elif mine.shape == shape:  # of a parameter that is whole in both
                    mine.copy_(values.view(shape))
                else:
                    raise errors.UnimplementedError(
                        f'an array of parameter "{block.name}" is not of single elements, and the'
                        " parameter is cut otherwise than it was"
                    )

    def pieces(self) -> list[tuple[Wanted, torch.Tensor]]:
        return [
            ((array, index, tuple(values.shape)), values)
            for (index, array), values in self._arrays.items()
        ]


def numbers_for(
    spec: SessionSpec,
    blocks: Sequence[Block],
    regions: Regions,
    numbers: Mapping[int, Numbers],
) -> Numbers:
    """Returns the numbers of a job that has these blocks. numbers: by source.

    FailedPreconditionError: parts of one parameter differ in them."""
    has_scalars = by_kind(spec.optimizer).scalar is not None
    scalers = {each.scaler for each in numbers.values()}
    if len(scalers) > 1:
        raise errors.FailedPreconditionError(
            f'the parts of job "{spec.job}" have loss scalers at other places'
            f" ({', '.join(map(str, scalers))}): delete the job on all nodes (optctl delete job)"
            " and begin it again from a checkpoint"
        )
    steps, scalars = [], []
    for block in blocks:
        of_block = {
            (
                numbers[region.source].step_counts[region.index],
                numbers[region.source].scalars[region.index] if has_scalars else 0.0,
            )
            for region in regions.with_numbers_of(block)
        }
        if len(of_block) > 1:
            raise errors.FailedPreconditionError(
                f'parts of parameter "{block.name}" of job "{spec.job}" have taken different'
                f" numbers of steps ({sorted(count for count, _ in of_block)}): delete the job on"
                " all nodes (optctl delete job) and begin it again from a checkpoint"
            )
        step, scalar = next(iter(of_block), (0, 0.0))
        steps.append(step)
        scalars.append(scalar)
    return Numbers(steps, scalars if has_scalars else (), next(iter(scalers), None))
