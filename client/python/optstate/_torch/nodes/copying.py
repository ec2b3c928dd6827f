"""Gives a node that has no job the state of the others' job: a node was replaced, lost its memory,
or was added.

Nodes of one job that hold the same (across_nodes="replicated") are copies of each other, so any of
them can give another one all that it has. Daemons do not talk to each other: a rank fetches the
state, the trainer's process group broadcasts it piece by piece, and a rank of the new node loads
it. Nothing is kept of it in files or in this process but a piece.

A load does not change the number of a job's step, by which nodes tell steps apart. So the copy
takes that many steps, each skipped, before it is whole: some ten microseconds each.

A trainer that is killed in between leaves a copy that is half made, which the note beside it tells
(copy_note.py). The next one removes it and begins again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence

import torch

from optstate import _native, errors
from optstate._torch.nodes.copied_state import (
    Numbers,
    Piece,
    check_copied,
    fetch_numbers_of,
    join,
    load_numbers,
    numel_of,
    pieces_of,
    split,
    sums_of,
)
from optstate._torch.nodes.copy_note import (
    Copy,
    CopyNote,
    as_copied,
    delete_job,
    job_of_note,
    meaning_of,
    read_note,
    remove_note,
    write_note,
)
from optstate._torch.nodes.idle_steps import hyperparams as _hyperparams
from optstate._torch.nodes.idle_steps import last_steps as _last_steps
from optstate._torch.nodes.idle_steps import with_idle_scaler
from optstate._torch.nodes.places import Places
from optstate._torch.nodes.positions import position_of
from optstate._torch.nodes.resolution import Position
from optstate._torch.ranks import Ranks
from optstate._torch.state.arrays import ArrayTransfer
from optstate.session import Session
from optstate.session_spec import SessionSpec

logger = logging.getLogger("optstate")

# Seconds after which ranks that wait for a copy's steps hear of them: a collective has a timeout.
_SIGN_OF_LIFE_S = 5.0


def position_on_node(spec: SessionSpec) -> tuple[Position | None, bool]:
    """Returns how far this node's job is, and whether a note says so: it is a whole copy.

    Removes a copy that is half made, and a note that means nothing any more.
    FailedPreconditionError: there is a note beside a job that is no copy.
    """
    note = read_note(spec)
    position = position_of(spec)
    if note is None:
        return position, False
    meaning = meaning_of(note, position)
    if meaning is Copy.WHOLE:
        assert position is not None
        return as_copied(note, position), True
    if meaning is Copy.ANOTHER:
        assert position is not None
        raise errors.FailedPreconditionError(
            f'beside job "{spec.job}", which is at step {position.committed.step}, there is a note'
            f' that it is a copy for step {note.step} (job "{job_of_note(spec.job)}"), which it is'
            " not: delete the one of the two that is not wanted (optctl delete job)"
        )
    if meaning is Copy.HALF_MADE:
        logger.warning(
            'job "%s" was being copied to this node when its trainer died: the half made copy is'
            " removed, and the job is copied again",
            spec.job,
        )
        delete_job(spec, spec.job)
        position = None
    remove_note(spec)
    return position, False


def refuse_half_made(spec: SessionSpec) -> None:
    """Raises FailedPreconditionError when this node's job is a copy that is half made: its step is
    not that of its state."""
    note = read_note(spec)
    if note is None or meaning_of(note, position_of(spec)) is not Copy.HALF_MADE:
        return
    raise errors.FailedPreconditionError(
        f'job "{spec.job}" was being copied to this node for step {note.step} when its trainer'
        ' died, and is half made: start the ranks of all nodes with across_nodes="replicated",'
        f" which copies it again, or delete it (optctl delete job {spec.job})"
    )


class _NewCopy:
    """The copy that the first rank of a node makes. Threads: one at a time."""

    def __init__(self, spec: SessionSpec, note: CopyNote, numbers: Numbers) -> None:
        """spec: of this rank's session, which the copy is made without.

        UnimplementedError: no steps bring a loss scaler to where the job's is."""
        # Ranks of which none is attached may have other numbers of them than the job.
        self._spec = dataclasses.replace(
            spec, rank=0, world_size=1, local_world_size=1, two_phase=False
        )
        self._note = note
        self._numbers = numbers
        self._session: Session | None = None
        self._has_noted = self._has_made = False
        self._sums: list[int] = []
        # The last steps, which bring the loss scaler to where the job's is.
        self._last_skipped, self._last_good = _last_steps(spec, numbers.scaler, note.step)
        self._steps_left = note.step
        self._groups = _hyperparams(spec)

    @property
    def _last(self) -> int:
        return self._last_skipped + self._last_good

    def begin(self) -> None:
        """Makes the note and the job, and begins to load it."""
        write_note(self._spec, self._note)
        self._has_noted = True
        spec = with_idle_scaler(self._spec, self._numbers.scaler)
        self._session = Session.open(spec)
        if not self._session.created:
            raise errors.FailedPreconditionError(
                f'job "{spec.job}" was made by another script while it was to be copied to this'
                " node: end that one, and start the ranks of all nodes again"
            )
        self._has_made = True
        self._arrays = ArrayTransfer(self._session, self._spec.parameters)
        self._session.begin_load()

    def take(self, piece: Piece, flat: torch.Tensor) -> None:
        """Loads a piece; flat has its arrays one after the other."""
        values = split(piece, flat)
        for (array, index, _), value in zip(piece, values):
            self._arrays.load_array(array, index, value)
        self._arrays.flush_loads()
        self._sums += sums_of(values)

    def finish_load(self) -> None:
        """Makes what was loaded the job's state, once its bits are those of the job."""
        session = self._attached()
        load_numbers(self._arrays, self._numbers)
        self._arrays.flush_loads()
        session.finish_load()
        check_copied(self._arrays, self._spec, self._numbers, self._sums)
        for _ in range(self._note.loads_finished - 1):
            session.begin_load()
            session.finish_load()

    def take_steps(self, within_s: float) -> int:
        """Takes steps for about this time; returns how many are left."""
        until = time.monotonic() + within_s
        while self._steps_left and time.monotonic() < until:
            if self._steps_left == self._last and self._numbers.scaler is not None:
                self._scale_as_the_job()
            session = self._attached()
            is_good = self._steps_left <= self._last_good
            session.commit(session.committed_step + 1, self._groups, found_inf=not is_good)
            self._steps_left -= 1
        return self._steps_left

    def end(self) -> None:
        """Leaves the copy, which is whole.

        DataLossError: it is not where the job is."""
        session = self._attached()
        if self._last and self._numbers.scaler is not None:
            found = session.loss_scaler_state()
            if found != self._numbers.scaler:
                raise errors.DataLossError(
                    f'the loss scaler of the copy of job "{self._spec.job}" is at {found}, that of'
                    f" the job at {self._numbers.scaler}: the copy is removed"
                )
        assert session.committed_step == self._note.step
        self.close()

    def undo(self) -> None:
        """Removes what was made of the copy, as far as its daemon answers; the note has the next
        trainer remove the rest."""
        with contextlib.suppress(errors.OptstateError):
            self.close()
            if self._has_made:
                delete_job(self._spec, self._spec.job)
            if self._has_noted:
                remove_note(self._spec)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def _attached(self) -> Session:
        assert self._session is not None
        return self._session

    def _scale_as_the_job(self) -> None:
        """Attaches with the job's own loss scaler, which keeps the scale that the copy has."""
        self.close()
        self._session = Session.open(dataclasses.replace(self._spec, loss_scaler_state=None))


class _Reader:
    """Reads the state of the job on a node that has it. Threads: one at a time."""

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec
        self._session = Session.open(spec)
        self._arrays = ArrayTransfer(self._session, spec.parameters)

    def numbers(self) -> Numbers:
        scaler = self._spec.loss_scaler
        is_dynamic = scaler is not None and scaler.dynamic
        state = self._session.loss_scaler_state() if is_dynamic else None
        return fetch_numbers_of(self._arrays, self._spec, state)

    def fetch(self, piece: Piece) -> torch.Tensor:
        return join(self._arrays.fetch_arrays(piece))

    def close(self) -> None:
        self._session.close()


class StateCopies:
    """How the nodes of a replicated job hand its state on.

    Threads: one at a time. Collective, over all ranks: give().
    """

    def __init__(self, ranks: Ranks, places: Places) -> None:
        self._ranks = ranks
        self._places = places
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

    def give(self, spec: SessionSpec, positions: Sequence[Position | None]) -> bool:
        """Copies the job to the nodes that have none, when the others are at one step; returns
        whether there was something to copy. Raises on all ranks, and then leaves no copy."""
        lacking = [node for node, each in enumerate(positions) if each is None]
        holder = next((node for node, each in enumerate(positions) if each is not None), None)
        if not lacking or holder is None or spec.extend:
            return False
        position = positions[holder]
        assert position is not None
        if not position.loads_finished:
            return False  # a new job, whose ranks are going to load
        if spec.state_format == _native.STATE_FORMATS["dynamic8"]:
            raise errors.UnimplementedError(
                f'job "{spec.job}" has state of 8 bits (state_dtype="dynamic8"), and'
                f" {self._places.nodes[lacking[0]]} has no such job: it cannot be copied there bit"
                " for bit, because what 8 bits stand for is rounded to others when it is loaded."
                " Delete the job on all nodes (optctl delete job) and begin it again from a"
                " checkpoint"
            )
        committed = position.committed
        note = CopyNote(
            committed.step, committed.digest, committed.found_inf, position.loads_finished
        )
        here = self._places.node_of[self._places.rank]
        makes = here in lacking and self._places.rank == self._places.first_rank
        if makes:
            logger.info(
                'job "%s" is copied to this node from %s, at step %d',
                spec.job,
                self._places.nodes[holder],
                note.step,
            )
        copy: list[_NewCopy] = []
        try:
            self._give(spec, self._places.first_ranks[holder], note if makes else None, copy)
        except BaseException:
            for each in copy:
                each.undo()
            raise
        return True

    def _give(
        self, spec: SessionSpec, source: int, note: CopyNote | None, made: list[_NewCopy]
    ) -> None:
        """source: the rank that has the state. note: what this rank is to make; None: nothing.
        made: gets what is to be undone when this raises."""
        reader: _Reader | None = None
        numbers: Numbers | None = None
        error: Exception | None = None
        try:
            if self._places.rank == source:
                try:
                    reader = _Reader(spec)
                    numbers = reader.numbers()
                except Exception as failure:
                    error = failure
            self._ranks.agree(error)
            numbers = self._ranks.object_from(numbers, source)
            assert numbers is not None
            if note is not None:
                try:
                    made.append(_NewCopy(spec, note, numbers))
                    made[0].begin()
                except Exception as failure:
                    error = failure
            self._ranks.agree(error)
            self._give_arrays(spec, source, reader, made)
        finally:
            if reader is not None:
                reader.close()
        self._take_steps(made)

    def _give_arrays(
        self,
        spec: SessionSpec,
        source: int,
        reader: _Reader | None,
        made: Sequence[_NewCopy],
    ) -> None:
        error: Exception | None = None
        for piece in pieces_of(spec):
            flat = torch.empty(numel_of(piece), dtype=torch.float32, device="cpu")
            try:
                if reader is not None:
                    flat = reader.fetch(piece)
            except Exception as failure:
                error = failure
            self._ranks.agree(error)  # also about the piece before
            if flat.numel():
                self._ranks.replicate(flat, source)
            try:
                for copy in made:
                    copy.take(piece, flat)
            except Exception as failure:
                error = failure
        self._ranks.agree(error)

    def _take_steps(self, made: Sequence[_NewCopy]) -> None:
        error: Exception | None = None
        try:
            for copy in made:
                copy.finish_load()
        except Exception as failure:
            error = failure
        self._ranks.agree(error)
        is_over = False
        while not is_over:
            left = 0
            try:
                for copy in made:
                    left = copy.take_steps(_SIGN_OF_LIFE_S)
            except Exception as failure:
                error, left = failure, -1
            everyones = [of_rank[0] for of_rank in self._ranks.gather_numbers([left])]
            is_over = min(everyones) < 0 or not any(everyones)
        try:
            for copy in made:
                if error is None:
                    copy.end()
        except Exception as failure:
            error = failure
        self._ranks.agree(error)
