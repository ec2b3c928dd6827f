"""Gives a node that has no job the state of the others' job: a node was replaced, lost its memory,
or was added.

Nodes of one job that hold the same (across_nodes="replicated") are copies of each other, so any of
them can give another one all that it has. Daemons do not talk to each other: a rank fetches the
state, the trainer's process group broadcasts it piece by piece, and a rank of the new node loads
it. Nothing is kept of it in files or in this process but a piece.

Nodes tell steps apart by their numbers. The copy is at step 0 until what it has was read back and
compared; then one more load, without content, has it begin at the step of the job.

A trainer that is killed in between leaves a copy that is half made, which the note beside it tells
(copy_note.py). The next one removes it and begins again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from optstate import _native, errors
from optstate._torch.nodes.copied_state import (
    BROADCAST_ELEMENTS,
    Numbers,
    Piece,
    fetch_numbers_of,
    join,
    numel_of,
    pieces_of,
    sums_of,
)
from optstate._torch.nodes.copy_note import CopyNote, position_on_node, remove_note
from optstate._torch.nodes.moves.deletion import delete_left
from optstate._torch.nodes.new_copy import NewCopy
from optstate._torch.nodes.places import Places
from optstate._torch.nodes.resolution import Position, stale_nodes
from optstate._torch.ranks import Ranks
from optstate._torch.state.arrays import ArrayTransfer
from optstate.session import Session
from optstate.session_spec import SessionSpec

logger = logging.getLogger("optstate")

# Seconds after which ranks that wait for a copy hear of it: a collective has a timeout.
_SIGN_OF_LIFE_S = 5.0


class _Reader:
    """Reads the state of the job on a node that has it. Threads: one at a time."""

    def __init__(self, spec: SessionSpec, note: CopyNote) -> None:
        """FailedPreconditionError: the job is not where the note says, or lacks state."""
        self._spec = spec
        self.sums: list[int] = []  # of all arrays that were fetched
        self._session = Session.open(spec)
        try:
            self._check(note)
        except BaseException:
            self._session.close()
            raise
        self._arrays = ArrayTransfer(self._session, spec.parameters)

    def _check(self, note: CopyNote) -> None:
        session = self._session
        if session.created or session.committed_step != note.step:
            raise errors.FailedPreconditionError(
                f'job "{self._spec.job}" was at step {note.step} and is at step'
                f" {session.committed_step} while it is to be copied to another node: another"
                " script uses it. End that one, and start the ranks of all nodes again"
            )
        if session.phase != _native.PHASE_READY:
            raise errors.FailedPreconditionError(
                f'job "{self._spec.job}" was being extended when its trainer died: it lacks the'
                " state of the new parameters, and cannot be copied to another node. Start ranks on"
                " the nodes that have it alone, which begin with their present values, and then on"
                " all nodes"
            )

    def numbers(self) -> Numbers:
        scaler = self._spec.loss_scaler
        is_dynamic = scaler is not None and scaler.dynamic
        state = self._session.loss_scaler_state() if is_dynamic else None
        return fetch_numbers_of(self._arrays, self._spec, state)

    def fetch(self, piece: Piece) -> torch.Tensor:
        values = self._arrays.fetch_arrays(piece)
        self.sums += sums_of(values)
        return join(values)

    def close(self) -> None:
        self._session.close()


class StateCopies:
    """How the nodes of a replicated job hand its state on.

    Threads: one at a time. Collective, over all ranks: replace_stale(), give(), and each step of
    giving().
    """

    def __init__(self, ranks: Ranks, places: Places, replaces_stale: bool = False) -> None:
        """replaces_stale: a node that lacks steps of the others gets their job in place of its own.
        Nothing in its files says that it is the same run: who names the job does."""
        self._ranks = ranks
        self._places = places
        self._replaces_stale = replaces_stale
        # This node's job has one, if it is a whole copy that has not taken a step yet.
        self._noted: SessionSpec | None = None

    def position(self, spec: SessionSpec) -> Position | None:
        """Does position_on_node(), and remembers whether there is a note."""
        position, is_noted = position_on_node(spec)
        self._noted = spec if is_noted else None
        return position

    def note_step(self) -> None:
        """Notes that all nodes have taken a step together: a copy is a job as the others now."""
        spec, self._noted = self._noted, None
        if spec is None:
            return
        try:
            remove_note(spec)
        except errors.OptstateError as failure:
            # The next attach finds that it means nothing any more.
            logger.info("the note beside the copied job stays for now: %s", failure)

    def replace_stale(self, spec: SessionSpec, positions: Sequence[Position | None]) -> bool:
        """Deletes the job on nodes that lack steps of the others and cannot take them any more, if
        that was asked for and the others can go on; returns whether there was one."""
        stale = stale_nodes(positions) if self._replaces_stale else []
        if not stale:
            return False
        here = self._places.node_of[self._places.rank]
        position = positions[here]
        error: Exception | None = None
        if here in stale and position is not None and self._places.rank == self._places.first_rank:
            logger.warning(
                'job "%s" is at step %d on this node, and other nodes have taken more steps: it is'
                ' deleted here, and copied from them (stale_nodes="replace")',
                spec.job,
                position.committed.step,
            )
            try:
                remove_note(spec)
                delete_left(spec, spec.job)
            except Exception as failure:
                error = failure
        self._ranks.agree(error)
        return True

    def give(self, spec: SessionSpec, positions: Sequence[Position | None]) -> bool:
        """Copies the job to the nodes that have none, when the others are at one step; returns
        whether there was something to copy. Raises on all ranks, and then leaves no copy."""
        work = self.giving(spec, positions)
        if work is None:
            return False
        for _ in work:
            pass
        return True

    def giving(
        self, spec: SessionSpec, positions: Sequence[Position | None]
    ) -> Generator[None, None, None] | None:
        """Does give() step by step, so that ranks of other jobs can be told meanwhile that it goes
        on; None: there is nothing to copy. Closed before its end, it leaves no copy."""
        lacking = [node for node, each in enumerate(positions) if each is None]
        holder = next((node for node, each in enumerate(positions) if each is not None), None)
        if not lacking or holder is None or spec.extend:
            return None
        position = positions[holder]
        assert position is not None
        if not position.loads_finished:
            return None  # a new job, whose ranks are going to load
        committed = position.committed
        note = CopyNote(
            committed.step, committed.digest, committed.found_inf, position.loads_finished, ""
        )
        return self._giving(spec, note, lacking, holder)

    def _giving(
        self, spec: SessionSpec, note: CopyNote, lacking: Sequence[int], holder: int
    ) -> Generator[None, None, None]:
        here = self._places.node_of[self._places.rank]
        makes = here in lacking and self._places.rank == self._places.first_rank
        if makes:
            logger.info(
                'job "%s" is copied to this node from %s, at step %d',
                spec.job,
                self._places.nodes[holder],
                note.step,
            )
        made: list[NewCopy] = []
        try:
            yield from self._copying(spec, note, self._places.first_ranks[holder], makes, made)
        except BaseException:
            for each in made:
                each.undo()
            raise

    def _copying(
        self, spec: SessionSpec, note: CopyNote, source: int, makes: bool, made: list[NewCopy]
    ) -> Iterator[None]:
        """source: the rank that has the state. makes: whether this rank makes a copy. made: gets
        what is to be undone when this raises."""
        reader: _Reader | None = None
        numbers: Numbers | None = None
        error: Exception | None = None
        with contextlib.ExitStack() as closing:
            if self._places.rank == source:
                try:
                    reader = _Reader(spec, note)
                    closing.callback(reader.close)
                    numbers = reader.numbers()
                except Exception as failure:
                    error = failure
            self._ranks.agree(error)
            numbers = self._ranks.object_from(numbers, source)
            assert numbers is not None
            if makes:
                try:
                    made.append(NewCopy(spec, note, numbers))
                    made[0].begin()
                except Exception as failure:
                    error = failure
            self._ranks.agree(error)
            yield
            yield from self._give_arrays(spec, source, reader, made)
            sums = self._ranks.object_from(None if reader is None else reader.sums, source)
        try:
            for copy in made:
                copy.finish_load(sums)
        except Exception as failure:
            error = failure
        self._ranks.agree(error)
        yield from self._all_of(made, NewCopy.check)
        try:
            for copy in made:
                copy.end()
        except Exception as failure:
            error = failure
        self._ranks.agree(error)

    def _give_arrays(
        self,
        spec: SessionSpec,
        source: int,
        reader: _Reader | None,
        made: Sequence[NewCopy],
    ) -> Iterator[None]:
        error: Exception | None = None
        for piece in pieces_of(spec):
            numel = numel_of(piece)
            flat: torch.Tensor | None = None
            try:
                if reader is not None:
                    flat = reader.fetch(piece)
                else:
                    # The ranks that need nothing of it have a part at a time.
                    flat = _memory(numel if made else min(numel, BROADCAST_ELEMENTS))
            except Exception as failure:
                error = failure
            self._ranks.agree(error)  # also about the piece before
            assert flat is not None
            for begin in range(0, numel, BROADCAST_ELEMENTS):
                end = min(begin + BROADCAST_ELEMENTS, numel)
                part = flat[begin:end] if flat.numel() == numel else flat[: end - begin]
                self._ranks.replicate(part, source)
            try:
                for copy in made:
                    copy.take(piece, flat)
            except Exception as failure:
                error = failure
            yield
        self._ranks.agree(error)

    def _all_of(
        self, made: Sequence[NewCopy], work: Callable[[NewCopy, float], int]
    ) -> Iterator[None]:
        """Does this work until every copy says that nothing is left."""
        error: Exception | None = None
        is_over = False
        while not is_over:
            left = 0
            try:
                for copy in made:
                    left = work(copy, _SIGN_OF_LIFE_S)
            except Exception as failure:
                error, left = failure, -1
            everyones = [of_rank[0] for of_rank in self._ranks.gather_numbers([left])]
            is_over = min(everyones) < 0 or not any(everyones)
            yield
        self._ranks.agree(error)


def _memory(numel: int) -> torch.Tensor:
    return torch.empty(numel, dtype=torch.float32, device="cpu")
