"""Moves the state of a job to the nodes and ranks that go on with it, before they attach."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Sequence

from optstate import errors
from optstate._torch.nodes import resolution
from optstate._torch.nodes.agreement import NodeAgreement
from optstate._torch.nodes.copied_state import Numbers
from optstate._torch.nodes.moves.blocks import Block, Regions, block_of
from optstate._torch.nodes.moves.choosing import Choice, Refused, choose
from optstate._torch.nodes.moves.deletion import delete_left
from optstate._torch.nodes.moves.holdings import HeldJob, Holding, find_holding
from optstate._torch.nodes.moves.new_job import NewJob
from optstate._torch.nodes.moves.parcelling import Wish, check_alike, check_movable, make_parcels
from optstate._torch.nodes.moves.reading import Assembly, Reader, by_name, groups_of, numbers_for
from optstate._torch.nodes.part_names import Part, part_of
from optstate._torch.nodes.places import Places
from optstate._torch.ranks import Ranks
from optstate.session_spec import ParameterSpec, SessionSpec

logger = logging.getLogger("optstate")

# Rounds of questions and verdicts, before nodes that never settle are an error.
_ROUNDS_MAX = 8
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

    def find(
        self,
        address: SessionSpec,
        expected: Sequence[Part | None],
        wanted: Sequence[ParameterSpec] | None,
        refusal: str | None,
    ) -> str | None:
        """Finds where the job's state is; returns the run that it is of, or is going to be of;
        None: there is none yet.

        address: of the job on this node. expected: each node's part, whatever the run. wanted: this
        node's layout; None: whole parameters. refusal: why state cannot move, if it cannot.

        FailedPreconditionError: parts of it are missing, or jobs do not belong together.
        """
        self._agreement.moves_state = True
        blocks = None if wanted is None else list(map(block_of, wanted))
        mine = expected[self._places.node_of[self._places.rank]]
        for _ in range(_ROUNDS_MAX):
            found = self._agreement.on_first(
                lambda: find_holding(
                    address.endpoint, address.job, address.connect_timeout_s, mine, blocks
                )
            )
            choice = self._choose(address.job, found)
            if choice is None:
                return next((each.job.run for each in found if each.job and each.job.part), None)
            if not self._settle(address, found, choice):
                break
        else:
            raise errors.AbortedError(
                f'the nodes of job "{address.job}" do not settle: other ranks still take steps'
            )
        if choice.stays and not choice.debris:
            return choice.run
        if refusal is not None:
            raise errors.UnimplementedError(
                f'job "{address.job}" was on other nodes or ranks ({self._said(found)}), and its'
                f" state does not move to these: {refusal}"
            )
        self._choice = choice
        self._agreement.before_settling = self._move
        if choice.stays or choice.is_local:
            return choice.run
        return self._ranks.from_first(secrets.token_hex(8))

    def _said(self, found: Sequence[Holding]) -> str:
        return "; ".join(f"{name}: {each}" for name, each in zip(self._places.nodes, found))

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
        if not verdicts:
            return False
        by_node = {choice.sources[place].node: verdict for place, verdict in verdicts.items()}
        of_nodes = [each.job.position if each.job else None for each in found]
        self._agreement.bring(address, of_nodes, by_node)
        return True

    def _move(self, spec: SessionSpec) -> None:
        choice = self._choice
        assert choice is not None
        here = self._places.node_of[self._places.rank]
        is_first = self._places.rank == self._places.first_rank
        mine = [each.held for each in choice.sources if each.node == here and is_first]
        if not choice.stays:
            check_movable(spec, [each.held for each in choice.sources])
        self._delete(spec, [each.held for each in choice.debris if each.node == here])
        if choice.stays:
            return
        blocks = [
            block_of(each, names_part=index == 0 and part_of([each.name]) is not None)
            for index, each in enumerate(spec.parameters)
        ]
        if not choice.is_local:
            mine = self._make_parcels(spec, choice, blocks, mine)
        self._make_job(spec, choice.step, blocks, mine)
        self._delete(spec, mine)

    def _delete(self, spec: SessionSpec, jobs: Sequence[HeldJob]) -> None:
        """Deletes jobs of this node. Returns when all nodes have deleted theirs."""

        def delete() -> None:
            for each in jobs:
                delete_left(spec, each.job)

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
        self._delete(spec, sources)
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
        """Has this node's job begin at a step, which makes it whole."""
        error: Exception | None = None
        try:
            for each in job:
                each.begin_at(step, _LOADS_OF_MADE)
                _check_place(spec, each, step, numbers)
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
        numbers = numbers_for(spec, blocks, regions, of_parcels)
        made.append(NewJob(_of_all_ranks(spec)))
        made[0].begin(numbers.scaler)
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
    if job.committed_step != step:
        raise errors.DataLossError(
            f'job "{spec.job}" is at step {job.committed_step} after it was moved, and was at'
            f" {step}: the job is removed"
        )
