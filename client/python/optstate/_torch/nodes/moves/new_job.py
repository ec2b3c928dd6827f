"""A job that is made of another's state: a parcel, or the job that ranks go on with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from optstate import _native, errors
from optstate._storage import Storage
from optstate._torch.nodes.copied_state import Numbers, Wanted, numel_of, sums_of, with_scaler
from optstate._torch.nodes.eight_bits import restore_scales
from optstate._torch.nodes.moves.deletion import delete_left
from optstate._torch.nodes.moves.durability import (
    WHILE_MOVING,
    as_of_loads,
    durability_asked,
    set_durability,
)
from optstate._torch.nodes.moves.holdings import address_of, created_run, note_job_of
from optstate._torch.nodes.moves.making_note import MakingNote, write_note
from optstate._torch.nodes.moves.scales import has_scales
from optstate._torch.optimizer_info import by_kind
from optstate._torch.state.arrays import ArrayTransfer
from optstate.session import Session
from optstate.session_spec import SessionSpec

# Elements that are read back at a time.
_CHECKED_ELEMENTS = 16 << 20


class NewJob:
    """The job, with a session of each of its ranks, all of which are in this process: each rank
    loads the parts that it owns, and they end loads together.

    Threads: one at a time; the sessions wait for each other in threads of their own.
    """

    def __init__(self, spec: SessionSpec, *, parcels: str = "") -> None:
        """spec: of rank 0, with the layout of all ranks. parcels: the run of those that the job is
        made of, which a note then says, because its layout does not."""
        self._spec = spec
        self._parcels = parcels
        self._sessions: list[Session] = []
        self._arrays: list[ArrayTransfer] = []
        self._has_made = False  # whether undo() removes it
        self._sums: dict[tuple[int, int], int] = {}
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}

    def begin(self, scaler: Any = None) -> None:
        """Makes the job, and begins to load it. scaler: the state of a dynamic loss scaler, where
        its own begins."""
        self._open(with_scaler(self._spec, scaler))
        if not self._sessions[0].created:
            raise errors.FailedPreconditionError(
                f'job "{self._spec.job}" was made by another script while state was to move into'
                " it: end that one, and start the ranks of all nodes again"
            )
        self._has_made = True
        if self._parcels:
            self._write_note()
        for each in self._sessions:
            each.begin_load()

    def _write_note(self) -> None:
        spec = self._spec
        address = address_of(spec.endpoint, note_job_of(spec.job), spec.connect_timeout_s)
        delete_left(spec, address.job)  # about a job that is gone
        note = MakingNote(self._parcels, created_run(spec))
        durability = as_of_loads(spec.storage).durability
        write_note(address, note, Storage(durability=durability), spec.access)

    def mark_unfinished(self) -> None:
        """Has a durable job be known as one that is being made, also when it has come from its
        disk, until make_durable(). Each load goes to the disk, and is not waited for."""
        if durability_asked(self._spec.storage):
            set_durability(self._spec, WHILE_MOVING, self.committed_step)

    def make_durable(self) -> None:
        """Returns when the step at which a durable job begins is durable, and has others be so as
        the script has asked for."""
        durability = durability_asked(self._spec.storage)
        if durability:
            set_durability(self._spec, durability, self.committed_step)

    def _open(self, spec: SessionSpec) -> None:
        for rank in range(spec.world_size):
            self._sessions.append(Session.open(dataclasses.replace(spec, rank=rank)))
        self._arrays = [ArrayTransfer(each, spec.parameters) for each in self._sessions]

    def _of_owner(self, index: int) -> Iterator[ArrayTransfer]:
        """Returns the ranks that load a parameter; each sends what it owns of one that is not a
        shard."""
        shard = self._spec.parameters[index].shard
        for rank, arrays in enumerate(self._arrays):
            if shard is None or shard.owner == rank:
                yield arrays

    def take(self, pieces: Sequence[tuple[Wanted, torch.Tensor]]) -> None:
        """Loads whole arrays. Values of 8 bits are changed: the daemon encodes them to what they
        were."""
        has_codes = has_scales(self._spec)
        sums = sums_of([values for _, values in pieces])
        for ((array, index, shape), values), total in zip(pieces, sums):
            self._sums[index, array] = total
            self._shapes[index, array] = shape
            if has_codes and array != _native.MASTER:
                restore_scales(values)
            for arrays in self._of_owner(index):
                arrays.load_array(array, index, values)
        for arrays in self._arrays:
            arrays.flush_loads()

    def finish_load(self, numbers: Numbers) -> None:
        """Makes what was loaded the job's state, and compares its bits. DataLossError: they are
        others."""
        has_scalars = by_kind(self._spec.optimizer).scalar is not None
        for index in range(len(self._spec.parameters)):
            for arrays in self._of_owner(index):
                arrays.load_step_count(index, numbers.step_counts[index])
                if has_scalars:
                    arrays.load_scalar(index, numbers.scalars[index])
        for arrays in self._arrays:
            arrays.flush_loads()
        self._on_all(lambda session: session.finish_load())
        self._check(numbers)

    def _check(self, numbers: Numbers) -> None:
        arrays = self._arrays[0]
        everything = range(len(self._spec.parameters))
        found = arrays.fetch_step_counts(everything)
        scalars: list[float] = []
        if by_kind(self._spec.optimizer).scalar is not None:
            scalars = arrays.fetch_scalars(everything)
        if found != list(numbers.step_counts) or scalars != list(numbers.scalars):
            raise errors.DataLossError(
                f'job "{self._spec.job}" has other step counts than were moved into it: it is'
                " removed"
            )
        for wanted in self._in_pieces():
            for (array, index, _), total in zip(wanted, sums_of(arrays.fetch_arrays(wanted))):
                if total != self._sums[index, array]:
                    raise errors.DataLossError(
                        f'job "{self._spec.job}" has other bits than were moved into it in array'
                        f' {array} of parameter "{self._spec.parameters[index].name}": it is'
                        " removed"
                    )

    def _in_pieces(self) -> Iterator[list[Wanted]]:
        piece: list[Wanted] = []
        for (index, array), shape in sorted(self._shapes.items()):
            one = (array, index, shape)
            if piece and numel_of([*piece[-1:], one]) + numel_of(piece[:-1]) > _CHECKED_ELEMENTS:
                yield piece
                piece = []
            piece.append(one)
        if piece:
            yield piece

    def keep(self) -> None:
        """Has undo() leave the job, which is whole: another rank may rely on that already."""
        self._has_made = False

    def load_nothing(self) -> None:
        """Ends another load, without content."""

        def load(session: Session) -> None:
            session.begin_load()
            session.finish_load()

        self._on_all(load)

    def begin_at(self, step: int, loads_finished: int) -> None:
        """Ends another load, without content, by which the job begins at a step after so many
        loads. UnimplementedError: the daemon is too old for that."""

        def load(session: Session) -> None:
            session.begin_load()
            session.finish_load_at(step, loads_finished)

        self._on_all(load)

    @property
    def committed_step(self) -> int:
        return self._sessions[0].committed_step

    @property
    def scaler_state(self) -> Any:
        return self._sessions[0].loss_scaler_state()

    def _on_all(self, what: Callable[[Session], None]) -> None:
        """Does it in all sessions at once, which wait for each other."""
        if len(self._sessions) == 1:
            what(self._sessions[0])
            return
        with ThreadPoolExecutor(len(self._sessions)) as pool:
            for each in [pool.submit(what, session) for session in self._sessions]:
                each.result()

    def close(self) -> None:
        for each in self._sessions:
            each.close()
        self._sessions, self._arrays = [], []

    def undo(self) -> None:
        """Removes what was made and is not to be kept, as far as the daemon answers; the next ranks
        remove the rest."""
        with contextlib.suppress(errors.OptstateError):
            self.close()
            if not self._has_made:
                return
            delete_left(self._spec, self._spec.job)
            if self._parcels:
                delete_left(self._spec, note_job_of(self._spec.job))
