"""The copy of a job that the first rank of a node makes; copying.py says which, and of what."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import torch

from optstate import _native, errors
from optstate._torch.nodes.copied_state import (
    Numbers,
    Piece,
    checked,
    load_numbers,
    split,
    with_scaler,
)
from optstate._torch.nodes.copy_note import (
    CopyNote,
    delete_job,
    has_nothing,
    made_at,
    read_note,
    remove_note,
    write_note,
)
from optstate._torch.nodes.eight_bits import restore_scales
from optstate._torch.nodes.positions import position_of
from optstate._torch.state.arrays import ArrayTransfer
from optstate.session import Session
from optstate.session_spec import SessionSpec


class NewCopy:
    """A copy that is being made: begin(), take() each piece, finish_load(), check() until nothing
    is left, end(). undo() at any time instead.

    It is at step 0 until its bits have been compared, and with end() where the job is.
    Threads: one at a time.
    """

    def __init__(self, spec: SessionSpec, note: CopyNote, numbers: Numbers) -> None:
        """spec: of this rank's session, which the copy is made without. note: its aim.

        UnimplementedError: nobody says where the loss scaler of the job is."""
        # Ranks of which none is attached may have other numbers of them than the job.
        alone = dataclasses.replace(spec, rank=0, world_size=1, local_world_size=1, two_phase=False)
        self._spec = with_scaler(alone, numbers.scaler)
        self._note = note
        self._numbers = numbers
        self._session: Session | None = None
        self._has_made = False
        self._made_at: str | None = None
        self._unchecked: Iterator[None] = iter(())

    def begin(self) -> None:
        """Makes the job and its note, and begins to load it.

        FailedPreconditionError: there is such a job by now, or ranks are attached to one that has
        nothing.
        """
        spec = self._spec
        position = position_of(spec)
        if position is not None and has_nothing(position):
            delete_job(spec, spec.job)
        # The one script that makes the job is the one that copies it.
        self._session = Session.open(spec)
        if not self._session.created:
            raise errors.FailedPreconditionError(
                f'job "{spec.job}" was made by another script while it was to be copied to this'
                " node: end that one, and start the ranks of all nodes again"
            )
        self._has_made = True
        self._write_note()
        self._arrays = ArrayTransfer(self._session, self._spec.parameters)
        self._session.begin_load()

    def _write_note(self) -> None:
        self._made_at = made_at(self._spec)
        if self._made_at is None:
            raise errors.UnavailableError(
                f'job "{self._spec.job}" was deleted while it was copied to this node: start the'
                " ranks again"
            )
        self._note = self._note._replace(made_at=self._made_at)
        remove_note(self._spec)  # about a copy that is gone
        write_note(self._spec, self._note)

    def take(self, piece: Piece, flat: torch.Tensor) -> None:
        """Loads a piece; flat has its arrays one after the other, and is changed."""
        has_codes = self._spec.state_format == _native.STATE_FORMATS["dynamic8"]
        for (array, index, _), value in zip(piece, split(piece, flat)):
            if has_codes and array != _native.MASTER:
                restore_scales(value)
            self._arrays.load_array(array, index, value)
        self._arrays.flush_loads()

    def finish_load(self, sums: Sequence[int]) -> None:
        """Makes what was loaded the job's state. sums: of the arrays' bits, in the order of
        pieces_of(), where they came from."""
        load_numbers(self._arrays, self._numbers)
        self._arrays.flush_loads()
        self._attached().finish_load()
        self._unchecked = checked(self._arrays, self._spec, self._numbers, sums)

    def check(self, within_s: float) -> int:
        """Compares the state with its sums, for about this time; returns whether some is left.

        DataLossError: it has other bits.
        """
        until = time.monotonic() + within_s
        for _ in self._unchecked:
            if time.monotonic() >= until:
                return 1
        return 0

    def end(self) -> None:
        """Has the copy begin at the step of the job, by a load of nothing, and leaves it, which is
        whole then.

        DataLossError: it is not where the job is. UnimplementedError: this node's daemon is too old
        for jobs that begin so."""
        session = self._attached()
        session.begin_load()
        session.finish_load_at(self._note.step, self._note.loads_finished)
        if self._numbers.scaler is not None:
            found = session.loss_scaler_state()
            if found != self._numbers.scaler:
                raise errors.DataLossError(
                    f'the loss scaler of the copy of job "{self._spec.job}" is at {found}, that of'
                    f" the job at {self._numbers.scaler}: the copy is removed"
                )
        self.close()

    def undo(self) -> None:
        """Removes what was made of the copy, as far as its daemon answers; the note has the next
        trainer remove the rest. What another script has made meanwhile stays."""
        with contextlib.suppress(errors.OptstateError):
            self.close()
            if not self._has_made:
                return
            if self._made_at is None or made_at(self._spec) == self._made_at:
                delete_job(self._spec, self._spec.job)
            if read_note(self._spec) == self._note:
                remove_note(self._spec)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def _attached(self) -> Session:
        assert self._session is not None
        return self._session
