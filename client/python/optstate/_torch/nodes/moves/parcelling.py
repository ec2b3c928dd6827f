"""Brings state from the jobs that have it into parcels on other nodes, by the trainer's process
group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from optstate import _native, errors
from optstate._torch.names import quoted
from optstate._torch.nodes.copied_state import Numbers, Wanted, with_scaler
from optstate._torch.nodes.moves.blocks import Block, Regions, in_parcel
from optstate._torch.nodes.moves.choosing import Source
from optstate._torch.nodes.moves.durability import durability_asked, set_durability
from optstate._torch.nodes.moves.holdings import HeldJob, Mark, last_step_of, parcel_of
from optstate._torch.nodes.moves.new_job import NewJob
from optstate._torch.nodes.moves.reading import (
    Assembly,
    Piece,
    Reader,
    by_name,
    groups_of,
    numbers_for,
    parcel_storage,
)
from optstate._torch.nodes.moves.scales import check_scales
from optstate._torch.nodes.part_names import Part
from optstate._torch.nodes.places import Places
from optstate._torch.nodes.resolution import Position, Step
from optstate._torch.ranks import Ranks
from optstate.session_spec import SessionSpec

_IN_MEMORY = ("", "PLACEMENT_HOST", "PLACEMENT_UNSPECIFIED")


class Wish(NamedTuple):
    """A parcel that is to be: on which node, which part, and its blocks."""

    node: int
    part: Part
    blocks: tuple[Block, ...]  # those that only name a part left out


def check_movable(spec: SessionSpec, sources: Sequence[HeldJob]) -> None:
    """Raises, on every rank alike, when the state cannot move bit for bit, or not safely."""
    if not durability_asked(spec.storage) and any(each.durability for each in sources):
        raise errors.FailedPreconditionError(
            f'job "{spec.job}" has durable steps, and the one that its state is to move into would'
            " not: say durability= again, and placement= if the job has one"
        )
    if spec.storage.placement <= 1 and any(each.placement not in _IN_MEMORY for each in sources):
        raise errors.FailedPreconditionError(
            f'job "{spec.job}" lies on disk, and the one that its state is to move into would not:'
            ' say placement="nvme" (or "auto"), and host_budget= if it had one'
        )


def make_durable(spec: SessionSpec, held: Sequence[HeldJob]) -> None:
    """Makes the present step of a durable job that is on one node durable there: only by its last
    step it is known again when it has come from the disk."""
    for each in held:
        if each.durability and each.mark is None and each.part is None:
            set_durability(spec, each.durability, each.step)


def check_alike(
    job: str, sources: Regions, blocks: Sequence[Block], held: Sequence[HeldJob]
) -> None:
    """Raises FailedPreconditionError when the ranks want other parameters than there are.

    held: the jobs of the sources. blocks: all that the ranks want.
    """
    there = {name: sources.whole_shape(name) for name in sources.names}
    wanted = Regions([blocks])
    here = {name: wanted.whole_shape(name) for name in wanted.names}
    for one, other, what in ((there, here, "the script lacks"), (here, there, "the job lacks")):
        lacking = [name for name in one if name not in other]
        if lacking:
            raise errors.FailedPreconditionError(
                f'job "{job}" was to move to other nodes or ranks, and {what} its parameters'
                f" {quoted(lacking)}: give the optimizer the job's parameters, by the names that"
                " the job has"
            )
    facts = {each.name: each.facts for of_job in held for each in of_job.blocks if each.name}
    for block in blocks:
        name = block.name
        if facts[name] != block.facts or there[name] != here[name] or not sources.covers(block):
            raise errors.FailedPreconditionError(
                f'job "{job}" was to move to other nodes or ranks, and has parameter "{name}" as'
                f" {list(there[name])}, and the script as {list(here[name])}, or of another dtype,"
                " in another group, or cut otherwise: give the optimizer the job's parameters"
            )


def make_parcels(
    ranks: Ranks,
    places: Places,
    spec: SessionSpec,
    sources: Sequence[Source],
    wishes: Sequence[Wish],
    *,
    step: int,
    run: str,
) -> list[HeldJob]:
    """Makes all parcels whole, or raises on all ranks. Collective.

    Returns those of this node, on its first rank. When it raises, some parcels may be whole, and
    the next ranks remove them. run: what they are made of.
    """
    held = [each.held for each in sources]
    regions = Regions(each.blocks for each in held)
    blocks = [block for wish in wishes for block in wish.blocks]
    check_alike(spec.job, regions, blocks, held)
    check_scales(spec, regions, blocks)
    carrier = _Carrier(ranks, places, spec, sources, wishes)
    try:
        return carrier.carry(regions, step, run)
    except BaseException:
        carrier.undo()
        raise
    finally:
        carrier.close()


class _Carrier:
    """The work of this rank while parcels are made: it reads jobs of its node, and makes parcels.

    Threads: one at a time.
    """

    def __init__(
        self,
        ranks: Ranks,
        places: Places,
        spec: SessionSpec,
        sources: Sequence[Source],
        wishes: Sequence[Wish],
    ) -> None:
        self._ranks = ranks
        self._first_ranks = places.first_ranks
        self._spec = spec
        self._sources = sources
        self._wishes = wishes
        here = places.node_of[places.rank] if places.rank == places.first_rank else -1
        self._mine = [each for each in wishes if each.node == here]
        self._my_blocks = [by_name(each.blocks) for each in self._mine]
        self._wanted: dict[str, list[tuple[int, Block]]] = {}  # with the node
        for wish in wishes:
            for block in wish.blocks:
                self._wanted.setdefault(block.name, []).append((wish.node, block))
        self._my_sources = [i for i, each in enumerate(sources) if each.node == here]
        self._readers: dict[int, Reader] = {}
        self._made: list[tuple[Wish, Mark, NewJob]] = []
        self._error: Exception | None = None

    def carry(self, regions: Regions, step: int, run: str) -> list[HeldJob]:
        numbers = self._open_readers()
        self._begin(numbers, step, run)
        names = list(dict.fromkeys(each.name for wish in self._wishes for each in wish.blocks))
        for group, pieces in groups_of(self._spec, names, regions):
            self._carry_group(group, pieces)
        self._ranks.agree(self._error)
        try:
            for wish, _, parcel in self._made:
                found = numbers_for(self._spec, wish.blocks, regions, numbers)
                parcel.finish_load(_behind_mark(found))
        except Exception as failure:
            self._error = failure
        self._ranks.agree(self._error)
        # When one is whole, all others are there: else nobody could tell, where some of them are
        # missing, whether they were whole.
        try:
            for _, _, parcel in self._made:
                parcel.keep()  # from here on another rank may have learnt that it is whole
                parcel.load_nothing()
        except Exception as failure:
            self._error = failure
        self._ranks.agree(self._error)
        return [self._held(wish, mark) for wish, mark, _ in self._made]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        for _, _, parcel in self._made:
            parcel.close()

    def undo(self) -> None:
        for _, _, parcel in self._made:
            parcel.undo()

    def _open_readers(self) -> dict[int, Numbers]:
        mine: dict[int, Numbers] = {}
        try:
            for index in self._my_sources:
                self._readers[index] = Reader(self._sources[index].held, self._spec)
                mine[index] = self._readers[index].numbers()
        except Exception as failure:
            self._error = failure
        self._ranks.agree(self._error)
        numbers: dict[int, Numbers] = {}
        for of_rank in self._ranks.gather(mine):
            numbers.update(of_rank)
        return numbers

    def _begin(self, numbers: dict[int, Numbers], step: int, run: str) -> None:
        try:
            scaler = next(iter(numbers.values())).scaler
            with_scaler(self._spec, scaler)  # raises if the job could not be made of it
            comes_back = _last_step(self._sources), _durable_steps(self._sources)
            for wish in self._mine:
                mark = Mark(wish.part, step, run, scaler, *comes_back)
                parcel = NewJob(self._spec_of(wish, mark))
                self._made.append((wish, mark, parcel))
                parcel.begin()
        except Exception as failure:
            self._error = failure
        self._ranks.agree(self._error)

    def _spec_of(self, wish: Wish, mark: Mark) -> SessionSpec:
        return dataclasses.replace(
            self._spec,
            job=parcel_of(self._spec.job, wish.part),
            parameters=(mark.spec, *map(in_parcel, wish.blocks)),
            held=None,
            rank=0,
            world_size=1,
            local_world_size=1,
            partition=_native.PARTITIONS["local"],
            two_phase=False,
            accumulate=False,
            loss_scaler=None,
            loss_scaler_state=None,
            storage=parcel_storage(self._spec),
            speculative=False,
            change_detection=0,
        )

    def _held(self, wish: Wish, mark: Mark) -> HeldJob:
        """Returns the parcel as another rank would find it."""
        spec = self._spec_of(wish, mark)
        blocks = [Block("", 0, mark.spec)]
        blocks += [Block(b.name, b.owner, s) for b, s in zip(wish.blocks, spec.parameters[1:])]
        return HeldJob(
            job=spec.job,
            part=None,
            mark=mark,
            position=Position(Step(0, 0), loads_finished=2),
            run=mark.part.run,
            world_size=1,
            partition=spec.partition,
            placement="",
            durability=durability_asked(spec.storage),
            blocks=tuple(blocks),
        )

    def _carry_group(self, names: Sequence[str], pieces: Sequence[Piece]) -> None:
        assemblies: list[Assembly] = []
        try:
            if self._error is None:
                assemblies = [Assembly(self._spec, each, names) for each in self._my_blocks]
        except Exception as failure:
            self._error = failure
        for piece in pieces:
            node = self._sources[piece.source].node
            flat: torch.Tensor | None = None
            try:
                if self._error is None and piece.source in self._readers:
                    flat = self._readers[piece.source].fetch(piece.wanted)
            except Exception as failure:
                self._error = failure
            if self._receivers(piece) - {node}:
                self._ranks.agree(self._error)  # also about the pieces before
                if flat is None:
                    flat = torch.empty(piece.numel, dtype=torch.float32, device="cpu")
                self._ranks.replicate(flat, self._first_ranks[node])
            try:
                if self._error is None and flat is not None:
                    for assembly in assemblies:
                        assembly.take(piece, flat)
            except Exception as failure:
                self._error = failure
        try:
            if self._error is None:
                for assembly, (_, _, parcel) in zip(assemblies, self._made):
                    parcel.take(_behind(assembly.pieces()))
        except Exception as failure:
            self._error = failure

    def _receivers(self, piece: Piece) -> set[int]:
        """Returns the nodes that need something of a piece."""
        return {
            node
            for theirs in piece.blocks
            for node, block in self._wanted.get(theirs.name, ())
            if theirs.overlap(block) is not None
        }


def _last_step(sources: Sequence[Source]) -> str:
    """Returns what tells a job whose layout does not name its run, when it was restored from disk
    meanwhile; empty: there is none."""
    [held] = [each.held for each in sources] if len(sources) == 1 else [None]
    if held is None or held.part is not None or held.mark is not None:
        return ""
    return last_step_of(held.position)


def _durable_steps(sources: Sequence[Source]) -> tuple[int, ...]:
    """Returns the steps at which durable jobs are when their daemons have lost their memory."""
    held = [each.held for each in sources if each.held.mark is None and each.held.durability]
    return tuple(sorted({each.position.durable_step for each in held}))


def _behind(pieces: Sequence[tuple[Wanted, torch.Tensor]]) -> list[tuple[Wanted, torch.Tensor]]:
    """Returns arrays as the parcel counts parameters, whose first one is its mark."""
    return [((array, index + 1, shape), values) for (array, index, shape), values in pieces]


def _behind_mark(numbers: Numbers) -> Numbers:
    scalars = (0.0, *numbers.scalars) if numbers.scalars else ()
    return Numbers([0, *numbers.step_counts], scalars, numbers.scaler)
