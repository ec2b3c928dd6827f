"""Moves the state of a job to the nodes and ranks that go on with it, before they attach."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Sequence

from optstate import errors
from optstate._torch.nodes import resolution
from optstate._torch.nodes.agreement import ROUNDS_MAX, NodeAgreement
from optstate._torch.nodes.copied_state import Numbers
from optstate._torch.nodes.moves.blocks import Block, Regions, block_of
from optstate._torch.nodes.moves.choosing import Choice, Refused, choose
from optstate._torch.nodes.moves.deletion import delete_left
from optstate._torch.nodes.moves.holdings import HeldJob, Holding, find_holding, note_job_of
from optstate._torch.nodes.moves.new_job import NewJob
from optstate._torch.nodes.moves.parcelling import (
    Wish,
    check_alike,
    check_movable,
    make_durable,
    make_parcels,
)
from optstate._torch.nodes.moves.reading import Assembly, Reader, by_name, groups_of, numbers_for
from optstate._torch.nodes.moves.scales import check_scales
from optstate._torch.nodes.part_names import Part, part_of
from optstate._torch.nodes.places import Places
from optstate._torch.nodes.positions import position_of
from optstate._torch.nodes.resolution import Position, Step
from optstate._torch.nodes.without_others import settled_without_others
from optstate._torch.ranks import Ranks
from optstate.session_spec import ParameterSpec, SessionSpec

logger = logging.getLogger("optstate")

# Loads that a job has finished which was made of parcels, on every node.
_LOADS_OF_MADE = 1


class Mover:
    """The ranks that go on with a job, and how its state gets to them.

    Threads: one at a time. Collective: all methods, and all raise on all ranks or on none.
    """

    def __init__(self, ranks: Ranks, places: Places, agreement: NodeAgreement) -> None:
        self._ranks = ranks
        self._places = places
        self._agreement = agreement
        self._choice: Choice | None = None
        self._settles_later = False
        self._look: Callable[[], list[Holding]] = list
        # By node, jobs that are of no use once the state is where it is to be.
        self._leftovers: Sequence[Sequence[str]] = ()

    def find(
        self,
        address: SessionSpec,
        expected: Sequence[Part | None],
        wanted: Sequence[ParameterSpec] | None,
        *,
        settles_later: bool,
    ) -> str | None:
        """Finds where the job's state is; returns the run that it is of, or is going to be of;
        None: there is none yet.

        address: of the job on this node. expected: each node's part, whatever the run. wanted: this
        node's layout; None: whole parameters. settles_later: jobs that take their steps together
        settle them, after this and before the state moves.

        FailedPreconditionError: parts of it are missing, or jobs do not belong together.
        """
        self._agreement.moves_state = True
        self._settles_later = settles_later
        blocks = None if wanted is None else list(map(block_of, wanted))
        mine = expected[self._places.node_of[self._places.rank]]

        def look() -> list[Holding]:
            return self._agreement.on_first(
                lambda: find_holding(
                    address.endpoint, address.job, address.connect_timeout_s, mine, blocks
                )
            )

        self._look = look
        for _ in range(ROUNDS_MAX):
            found = look()
            choice = self._choose(address.job, found)
            if choice is None:
                return next((each.job.run for each in found if each.job and each.job.part), None)
            if settles_later or not self._settle(address, found, choice):
                break
        else:
            raise errors.AbortedError(
                f'the nodes of job "{address.job}" do not settle: other ranks still take steps'
            )
        note = note_job_of(address.job)
        self._leftovers = [(*each.leftovers, *([note] if each.note else [])) for each in found]
        if choice.stays and not choice.debris and not any(self._leftovers):
            return choice.run
        self._choice = choice
        self._agreement.moving = self
        if choice.stays or choice.is_local:
            return choice.run
        return self._ranks.from_first(secrets.token_hex(8))

    def position_before(self, spec: SessionSpec) -> tuple[Position | None, int]:
        """Returns how far a part of the state is that this node has, and its number; None: the
        node has none, or one of which other nodes say it."""
        choice = self._choice
        assert choice is not None
        here = self._places.node_of[self._places.rank]
        are_parcels = all(each.held.mark is not None for each in choice.sources)
        for node, held in choice.sources:
            if node != here:
                continue
            if held.mark is None:
                return position_of(spec), 0 if held.part is None else held.part.number
            if are_parcels:
                # Where the job begins that is made of it. Nothing is prepared of it, and how its
                # last step was taken is not known any more.
                step = Step(held.mark.step, 0)
                position = Position(step, loads_finished=_LOADS_OF_MADE)
                return position, held.mark.part.number
        return None, 0

    def _choose(self, job: str, found: Sequence[Holding]) -> Choice | None:
        nodes = self._places.nodes
        try:
            return choose(job, nodes, found, len(nodes))
        except Refused as refused:
            raise errors.FailedPreconditionError(str(refused)) from None

    def _settle(self, address: SessionSpec, found: Sequence[Holding], choice: Choice) -> bool:
        """Brings the jobs that the state is in to one step; returns whether one has changed."""
        if choice.stays or any(each.held.mark is not None for each in choice.sources):
            return False
        names = [self._places.nodes[each.node] for each in choice.sources]
        kinds = [0 if each.held.part is None else each.held.part.number for each in choice.sources]
        positions = [each.held.position for each in choice.sources]
        try:
            verdicts = resolution.resolve(positions, names, kinds)
        except resolution.Unresolvable as error:
            raise errors.FailedPreconditionError(f'job "{address.job}": {error}') from None
        if all(each.held.part is None for each in choice.sources):  # it was on one node
            verdicts = settled_without_others(
                address.job, verdicts, positions, says=self._ranks.rank == 0
            )
        if not verdicts:
            return False
        by_node = {choice.sources[place].node: verdict for place, verdict in verdicts.items()}
        of_nodes = [each.job.position if each.job else None for each in found]
        self._agreement.bring(address, of_nodes, by_node)
        return True

    def _settled(self, job: str) -> Choice:
        """Returns the choice at the step at which the state moves."""
        former = self._choice
        assert former is not None
        if not self._settles_later:
            return former
        choice = self._choose(job, self._look())
        if choice is None or not choice.is_of(former):
            raise errors.AbortedError(
                f'the state of job "{job}" has changed while its ranks attached: end other scripts'
                " that use the job, and start the ranks again"
            )
        return choice

    def move(self, spec: SessionSpec) -> None:
        """Brings the state to these nodes and ranks, if it is not there yet."""
        choice = self._settled(spec.job)
        here = self._places.node_of[self._places.rank]
        is_first = self._places.rank == self._places.first_rank
        mine = [each.held for each in choice.sources if each.node == here and is_first]
        if not choice.stays:
            check_movable(spec, [each.held for each in choice.sources])
        self._delete(spec, [each.held.job for each in choice.debris if each.node == here])
        if not choice.stays:
            self._carry(spec, choice, mine)
        leftovers = {*self._leftovers[here]}
        if not choice.stays and part_of([spec.parameters[0].name]) is None:
            leftovers.add(note_job_of(spec.job))
        self._delete(spec, sorted(leftovers))

    def _carry(self, spec: SessionSpec, choice: Choice, mine: Sequence[HeldJob]) -> None:
        """Makes this node's job of the state. mine: what this node has of it."""
        blocks = [
            block_of(each, names_part=index == 0 and part_of([each.name]) is not None)
            for index, each in enumerate(spec.parameters)
        ]
        parcels = list(mine)
        if not choice.is_local:
            parcels = self._make_parcels(spec, choice, blocks, mine)
        self._make_job(spec, choice.step, blocks, parcels)
        self._delete(spec, [each.job for each in parcels])

    def _delete(self, spec: SessionSpec, jobs: Sequence[str]) -> None:
        """Deletes jobs of this node. Returns when all nodes have deleted theirs."""

        def delete() -> None:
            for each in jobs:
                delete_left(spec, each)

        self._agreement.on_first(delete)

    def _make_parcels(
        self,
        spec: SessionSpec,
        choice: Choice,
        blocks: Sequence[Block],
        sources: Sequence[HeldJob],
    ) -> list[HeldJob]:
        """Moves the state into a parcel on each node, and deletes what it was in."""
        part = part_of([spec.parameters[0].name])
        if part is None:
            part = Part(self._ranks.from_first(secrets.token_hex(8)), 1, 1)
        found = self._ranks.gather((part, tuple(each for each in blocks if each.name)))
        wishes = [Wish(node, *found[rank]) for node, rank in enumerate(self._places.first_ranks)]
        if self._places.rank == self._places.first_rank:
            logger.info(
                'the state of job "%s" moves to %d nodes, at step %d',
                spec.job,
                len(wishes),
                choice.step,
            )
        self._agreement.on_first(lambda: make_durable(spec, sources))
        made = make_parcels(
            self._ranks,
            self._places,
            spec,
            choice.sources,
            wishes,
            step=choice.step,
            run=choice.run,
        )
        # All parcels are whole: from here on they are the state.
        self._delete(spec, [each.job for each in sources])
        return made

    def _make_job(
        self, spec: SessionSpec, step: int, blocks: Sequence[Block], parcels: Sequence[HeldJob]
    ) -> None:
        """Makes this node's job of parcels that it has; returns when all nodes have made theirs."""
        job: list[NewJob] = []
        try:
            numbers = self._agreement.on_first(lambda: _load(spec, blocks, parcels, job))
            self._begin_at(spec, step, job, numbers[self._places.node_of[self._places.rank]])
        except BaseException:
            for each in job:
                each.undo()
            if job:
                logger.warning(
                    'the state of job "%s" is in "%s" on this node, and the job is made of it when'
                    " the ranks start again",
                    spec.job,
                    parcels[0].job,
                )
            raise
        finally:
            for each in job:
                each.close()

    def _begin_at(
        self, spec: SessionSpec, step: int, job: Sequence[NewJob], numbers: Numbers
    ) -> None:
        """Has this node's job begin at a step, which makes it whole, and durable if it is to be."""
        error: Exception | None = None
        try:
            for each in job:
                each.begin_at(step, _LOADS_OF_MADE)
                _check_place(spec, each, step, numbers)
                each.make_durable()
                each.keep()
        except Exception as failure:
            error = failure
        self._ranks.agree(error)


def _of_all_ranks(spec: SessionSpec) -> SessionSpec:
    """Returns the spec of a job that one process makes for all ranks of its node."""
    return dataclasses.replace(spec, rank=0, held=None, two_phase=False, loss_scaler_state=None)


def _load(
    spec: SessionSpec, blocks: Sequence[Block], parcels: Sequence[HeldJob], made: list[NewJob]
) -> Numbers:
    """Makes a job, and loads into it what parcels have; returns its numbers. made: gets it."""
    readers: list[Reader] = []
    try:
        for each in parcels:
            readers.append(Reader(each, spec))
        regions = Regions(each.blocks for each in parcels)
        of_parcels = {index: reader.numbers() for index, reader in enumerate(readers)}
        named = [each for each in blocks if each.name]
        check_alike(spec.job, regions, named, parcels)
        check_scales(spec, regions, named)
        numbers = numbers_for(spec, blocks, regions, of_parcels)
        is_alone = part_of([spec.parameters[0].name]) is None
        made.append(NewJob(_of_all_ranks(spec), parcels=parcels[0].run if is_alone else ""))
        made[0].begin(numbers.scaler)
        made[0].mark_unfinished()
        names = list(dict.fromkeys(each.name for each in named))
        mine = by_name(blocks)
        for group, pieces in groups_of(spec, names, regions):
            assembly = Assembly(spec, mine, group)
            for piece in pieces:
                assembly.take(piece, readers[piece.source].fetch(piece.wanted))
            made[0].take(assembly.pieces())
        made[0].finish_load(numbers)
        return numbers
    finally:
        for reader in readers:
            reader.close()


def _check_place(spec: SessionSpec, job: NewJob, step: int, numbers: Numbers) -> None:
    if numbers.scaler is not None and job.scaler_state != numbers.scaler:
        raise errors.DataLossError(
            f'the loss scaler of job "{spec.job}" is at {job.scaler_state} after the job was moved,'
            f" and was at {numbers.scaler}: the job is removed"
        )
    # The session says only what it was told.
    position = position_of(spec)
    found = None if position is None else (position.committed.step, position.loads_finished)
    if found != (step, _LOADS_OF_MADE):
        raise errors.DataLossError(
            f'job "{spec.job}" is at another step after it was moved (step and loads: {found}), and'
            f" was at {step}: the job is removed"
        )
