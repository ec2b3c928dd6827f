"""One rank's session with a job, without torch: the part that bindings share."""

from __future__ import annotations

import array
import ctypes
import dataclasses
import os
import threading
import weakref
from typing import Any, Callable, NamedTuple

from optstate import _native, errors
from optstate._interrupt import Interrupt
from optstate.job_position import NodesNorm, native_verdict
from optstate.session_spec import LossScalerState, SessionSpec, options_of


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """The outcome of one step.

    ``gradient_norm`` is the L2 norm of all unscaled gradients of the step over
    all ranks, before clipping; ``clip_coefficient`` is 1 when nothing was
    clipped. ``applied`` is False when the step was skipped because of
    ``found_inf``. ``update_ns`` is the time of the update in the daemon.
    ``loss_scale`` is the factor for the next loss; 0 without a LossScaler.
    ``durable_step`` is the last step that survives a reboot; 0: none does.
    ``prepared``: the step is not taken yet, and this is what it will do; ``digest``
    identifies what was prepared on each of several nodes.
    """

    step: int
    applied: bool
    found_inf: bool
    gradient_norm: float
    clip_coefficient: float
    update_ns: int
    loss_scale: float = 0.0
    durable_step: int = 0
    prepared: bool = False
    digest: int = 0


class Piece(NamedTuple):
    """Elements [begin, begin + numel) of a parameter, owned by this rank."""

    parameter: int
    begin: int
    numel: int


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _leave_sessions_to_parent() -> None:
    """Closes the connections in a forked child, without sending anything on them.

    Otherwise the daemon would consider a rank alive as long as a worker of its
    data loader is.
    """
    for session in list(_open_sessions):
        session._abandon()


os.register_at_fork(after_in_child=_leave_sessions_to_parent)


class Session:
    """An open session; create it with :meth:`open`.

    Threads: safe; a lock admits one call at a time, and a call may block until
    the other ranks participate. Processes: a session belongs to the process that
    opened it. After a fork, the child's copy refuses every call and closing it
    does nothing, so that a data loader's worker cannot use its parent's session
    or end it.
    Memory: addresses of pieces and parameters are valid until :meth:`close`.
    Signals: a handler that raises (Ctrl-C) ends a wait for other ranks or for a
    lost daemon, in the main thread. An interrupted commit stays under way, and
    wait_commit continues it.
    Size: one method for each function of the C API.
    """

    def __init__(self, handle: int, interrupt: Interrupt, parameter_count: int) -> None:
        self._handle: int | None = handle
        self._interrupt = interrupt
        # A signal handler may run within a call, in the thread that holds the lock.
        self._calling = False
        self._close_due = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._library = _native.library()
        self._commit = _native.CommitOptions()
        self._outcome = _native.Outcome()
        self._written = array.array("I", bytes(4 * parameter_count))
        self.pieces: list[Piece] = []
        self._gradient_addresses: dict[int, int] | None = None
        info = self.info()
        self.committed_step: int = info.committed_step
        self.phase: int = info.phase
        self.created = bool(info.created)
        self.loss_scale: float = info.loss_scale
        # Parameters from this index on have no state yet, see v1.AttachReply.
        self.load_required_from: int = info.load_required_from
        self.endpoint: str = info.endpoint.decode()
        self.wire: str = info.wire.decode()
        self._read_pieces(info.piece_count)
        _open_sessions.add(self)

    @classmethod
    def open(cls, spec: SessionSpec) -> Session:
        """Connects, registers the layout and attaches the rank.

        Raises the subclass of OptstateError that says why it failed.
        """
        library = _native.library()
        interrupt = Interrupt()
        options, alive = options_of(spec, interrupt)
        handle = ctypes.c_void_p()
        status = library.optstate_session_open(options, ctypes.byref(handle))
        del alive
        try:
            interrupt.raise_pending()
            _native.check(status)
            assert handle.value is not None
            return cls(handle.value, interrupt, len(spec.parameters))
        except BaseException:
            library.optstate_session_close(handle)
            raise

    @property
    def closed(self) -> bool:
        return self._handle is None

    @property
    def is_forked(self) -> bool:
        """Returns whether the session belongs to a parent process, which alone can use it."""
        return self._pid != os.getpid()

    def refuse_fork(self) -> None:
        if self.is_forked:
            raise errors.FailedPreconditionError(
                f"the session belongs to process {self._pid}; a forked process must attach by"
                " itself"
            )

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        with self._lock:
            self.refuse_fork()
            if self._handle is None:
                raise errors.FailedPreconditionError("the session is closed")
            if self._calling:
                raise errors.FailedPreconditionError(
                    "a signal handler cannot use the session whose call it interrupts"
                )
            try:
                self._calling = True
                status = function(self._handle, *arguments)
            finally:
                self._calling = False
                if self._close_due:
                    self.close()
            self._interrupt.raise_pending()
            _native.check(status)

    def info(self) -> _native.SessionInfo:
        info = _native.SessionInfo()
        self._call(self._library.optstate_session_get_info, info)
        return info

    def _read_pieces(self, count: int) -> None:
        self._piece_count = count
        if count == 0:
            return
        structs = _native.array_of(_native.Piece, count)
        self._call(self._library.optstate_session_pieces, structs, count)
        self.pieces = [Piece(piece.parameter, piece.begin, piece.numel) for piece in structs]

    def gradient_addresses(self) -> dict[int, int]:
        """Returns by parameter where the gradient of this rank's piece is to be written.

        The first call waits for the memory, which is taken after the session is opened, or
        raises ResourceExhaustedError: a write before it could end the process with SIGBUS.
        """
        if self._gradient_addresses is None:
            structs = _native.array_of(_native.PieceWithGradient, self._piece_count)
            if self._piece_count:
                self._call(self._library.optstate_session_pieces, structs, self._piece_count)
            self._gradient_addresses = {piece.parameter: piece.gradient or 0 for piece in structs}
        return self._gradient_addresses

    def parameter(self, parameter: int) -> tuple[int, int]:
        """Returns (address, bytes) of a parameter at the committed step; read-only."""
        data = ctypes.c_void_p()
        size = ctypes.c_size_t()
        self._call(
            self._library.optstate_session_parameter,
            parameter,
            ctypes.byref(data),
            ctypes.byref(size),
        )
        return data.value or 0, size.value

    def map_views(self) -> ctypes.c_void_p:
        """Maps the parameters as memory that may be written; see optstate_views_map."""
        handle = ctypes.c_void_p()
        self._call(self._library.optstate_views_map, ctypes.byref(handle))
        return handle

    def map_gradient_views(self) -> tuple[ctypes.c_void_p, int]:
        """Maps the gradient area once more: the handle, and what is to be added to a piece's
        address; see optstate_gradient_views_map."""
        handle, distance = ctypes.c_void_p(), ctypes.c_int64()
        self._call(
            self._library.optstate_gradient_views_map,
            ctypes.byref(handle),
            ctypes.byref(distance),
        )
        return handle, distance.value

    def find_written(self, views: ctypes.c_void_p) -> list[int]:
        """Returns parameters that differ from the committed step because `views` were written."""
        count = ctypes.c_size_t()
        self._call(
            self._library.optstate_views_find_written,
            views,
            self._written.buffer_info()[0],
            len(self._written),
            ctypes.byref(count),
        )
        return self._written[: count.value].tolist() if count.value else []

    def push(self, step: int, micro_step: int, first: int, count: int) -> None:
        """Declares gradients written into the pieces as those of `step`."""
        self._call(self._library.optstate_push, step, micro_step, first, count)

    def push_gradients(
        self, step: int, micro_step: int, parameters: array.array, gradients: array.array
    ) -> None:
        """Copies and pushes whole contiguous gradients in host memory.

        `parameters`: ascending indices ("I"); `gradients`: addresses ("Q"). A gradient that is
        at its own piece's address is not copied.
        """
        self._call(
            self._library.optstate_push_gradients,
            step,
            micro_step,
            parameters.buffer_info()[0],
            gradients.buffer_info()[0],
            len(parameters),
        )

    def flush(self) -> None:
        """Waits until the pieces may be written again."""
        self._call(self._library.optstate_flush)

    def end_micro_step(self, step: int, micro_step: int) -> None:
        """Waits until the gradients of this micro-step may be overwritten.

        With REPLICATED it also waits for ranks that have not reached this micro-step.
        """
        self._call(self._library.optstate_end_micro_step, step, micro_step)

    def commit(
        self,
        step: int,
        groups: ctypes.Array,
        *,
        grad_scale: float = 1,
        max_norm: float = 0,
        max_value: float = 0,
        norm_type: float = 2,
        found_inf: bool = False,
        awaits_norm: bool = False,
        read: tuple[array.array, array.array, Callable[[Any], Any] | None] | None = None,
    ) -> StepOutcome:
        """Waits until every rank has committed; returns the outcome of the step.

        `read`: arguments of read_parameters(), which takes place if the step is applied, part
        by part, while the daemon still updates other parts; and what is called with a pointer to
        each _native.Part of a parameter whose address is 0, which nobody copies. What it raises
        is raised after the commit.
        """
        with self._lock:
            commit = self._commit
            commit.step = step
            commit.groups = groups
            commit.group_count = len(groups)
            commit.grad_scale = grad_scale
            commit.max_norm = max_norm
            commit.max_value = max_value
            commit.norm_type = norm_type
            commit.found_inf = found_inf
            commit.awaits_norm = awaits_norm
            commit.read_count = 0
            commit.part_ready = _native.PART_READY()
            if read is not None:
                parameters, destinations, ready = read
                commit.read_parameters = parameters.buffer_info()[0]
                commit.read_destinations = destinations.buffer_info()[0]
                commit.read_count = len(parameters)
                if ready is not None:
                    commit.part_ready = _native.PART_READY(self._interrupt.guard(ready))
            self._call(self._library.optstate_commit, commit, self._outcome)
            return self._take_outcome()

    def decide(
        self, step: int, digest: int, verdict: int, norm: NodesNorm | None = None
    ) -> StepOutcome:
        """Takes, drops or clips the step that commit() prepared; see optstate_decide.

        norm: with OPTSTATE_VERDICT_CLIP alone.
        """
        native = native_verdict(step, digest, verdict, norm)
        with self._lock:
            self._call(
                self._library.optstate_decide, ctypes.byref(native), ctypes.byref(self._outcome)
            )
            return self._take_outcome()

    def wait_commit(self) -> StepOutcome:
        """Continues a commit that a signal interrupted."""
        with self._lock:
            self._call(self._library.optstate_commit_wait, self._outcome)
            return self._take_outcome()

    def _take_outcome(self) -> StepOutcome:
        outcome = self.last_outcome
        if outcome.step and not outcome.prepared:
            self.committed_step = outcome.step
            self.loss_scale = outcome.loss_scale
        return outcome

    @property
    def last_outcome(self) -> StepOutcome:
        """The outcome that the library gave last, also if a signal raised then; step 0: none."""
        outcome = self._outcome
        return StepOutcome(
            step=outcome.step,
            applied=bool(outcome.applied),
            found_inf=bool(outcome.found_inf),
            gradient_norm=outcome.gradient_norm,
            clip_coefficient=outcome.clip_coefficient,
            update_ns=outcome.update_ns,
            loss_scale=outcome.loss_scale,
            durable_step=outcome.durable_step,
            prepared=bool(outcome.prepared),
            digest=outcome.digest,
        )

    def refresh(self) -> bool:
        """Updates committed_step, which a signal may have left out of date; returns whether a
        commit is under way."""
        info = self.info()
        self.committed_step = info.committed_step
        self.loss_scale = info.loss_scale
        return bool(info.commit_open)

    def loss_scaler_state(self) -> LossScalerState | None:
        """Returns the state of a dynamic LossScaler; None without one or from an older daemon."""
        info = self.info()
        if not info.hysteresis_left:
            return None
        return LossScalerState(info.loss_scale, info.good_steps, info.hysteresis_left)

    def writes_parameters(self) -> bool:
        """Returns whether the engine writes parameters of the step whose commit was interrupted."""
        writes = ctypes.c_int32()
        self._call(self._library.optstate_writes_parameters, ctypes.byref(writes))
        return bool(writes.value)

    def abort(self, step: int) -> None:
        """Drops what this rank staged of `step`."""
        self._call(self._library.optstate_abort, step)

    def read_parameters(self, parameters: array.array, destinations: array.array) -> None:
        """Copies whole parameters to contiguous host memory: indices ("I"), addresses ("Q")."""
        self._call(
            self._library.optstate_read_parameters,
            parameters.buffer_info()[0],
            destinations.buffer_info()[0],
            len(parameters),
        )

    def find_changed(self, parameters: array.array, copies: array.array) -> list[int]:
        """Returns parameters whose copies, wherever they are now, changed since they were read."""
        count = ctypes.c_size_t()
        self._call(
            self._library.optstate_find_changed,
            parameters.buffer_info()[0],
            copies.buffer_info()[0],
            len(parameters),
            self._written.buffer_info()[0],
            ctypes.byref(count),
        )
        return self._written[: count.value].tolist() if count.value else []

    def note_copies(self, parameters: array.array) -> None:
        """Notes that the trainer's copies of these parameters hold the present values."""
        self._call(self._library.optstate_note_copies, parameters.buffer_info()[0], len(parameters))

    def begin_load(self, *, same: bool = False) -> None:
        """Begins a load. same: every rank must load everything, with equal values; otherwise
        finish_load() raises."""
        library = self._library
        self._call(library.optstate_begin_same_load if same else library.optstate_begin_load)

    def load(self, state_array: int, parameter: int, dtype: int, address: int) -> None:
        """Sends this rank's pieces of one whole, contiguous array."""
        self._call(self._library.optstate_load, state_array, parameter, dtype, address)

    def load_many(
        self,
        state_arrays: array.array,
        parameters: array.array,
        dtypes: array.array,
        addresses: array.array,
    ) -> None:
        """Does load() for each element of the arrays ("i", "I", "i", "Q")."""
        self._call(
            self._library.optstate_load_many,
            state_arrays.buffer_info()[0],
            parameters.buffer_info()[0],
            dtypes.buffer_info()[0],
            addresses.buffer_info()[0],
            len(parameters),
        )

    def finish_load(self) -> None:
        """Waits until every rank has finished its load."""
        self._call(self._library.optstate_finish_load)

    def finish_load_at(self, step: int, loads_finished: int) -> None:
        """Does finish_load(): the job begins at this step, as another one whose state it has."""
        self._call(self._library.optstate_finish_load_at, step, loads_finished)
        self.committed_step = step

    def fetch(self, state_array: int, parameter: int, address: int, size: int) -> None:
        """Copies one whole array, as fp32 (PARAMETER: in its dtype; STEP_COUNT, SCALAR: 8 bytes),
        to `size` bytes."""
        self._call(self._library.optstate_fetch, state_array, parameter, address, size, None)

    def fetch_many(
        self, state_arrays: array.array, parameters: array.array, addresses: array.array
    ) -> None:
        """Does fetch() for each element of the arrays ("i", "I", "Q"), to memory of its size."""
        self._call(
            self._library.optstate_fetch_many,
            state_arrays.buffer_info()[0],
            parameters.buffer_info()[0],
            addresses.buffer_info()[0],
            len(parameters),
            None,
        )

    def prefetch(self, parameters: array.array) -> None:
        """Says that these parameters ("I") are going to be fetched; see optstate_prefetch."""
        self._call(self._library.optstate_prefetch, parameters.buffer_info()[0], len(parameters))

    def release(self, parameters: array.array) -> None:
        """Says that these parameters ("I") are not going to be fetched any more."""
        self._call(self._library.optstate_release, parameters.buffer_info()[0], len(parameters))

    def _abandon(self) -> None:
        # The lock may have been held by a thread that the child does not have.
        self._lock = threading.RLock()
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.optstate_session_close(handle)  # the library detects the fork

    def close(self) -> None:
        """Detaches the rank. Idempotent; does nothing in a forked child.

        Called by a signal handler that interrupts a call, it closes when that call returns.
        """
        if self.is_forked:
            return
        with self._lock:
            if self._calling:
                self._close_due = True
                return
            handle, self._handle = self._handle, None
            if handle is not None:
                self._library.optstate_session_close(handle)
                self._interrupt.raise_pending()


def fetch_numbers(session: Session, state_array: int, count: int) -> list[float]:
    """Fetches one number for each of the first `count` parameters of a session's layout, whichever
    rank holds them."""
    numbers = (ctypes.c_double * count)()
    begin = ctypes.addressof(numbers)
    Session.fetch_many(  # a subclass may count parameters otherwise
        session,
        array.array("i", [state_array]) * count,
        array.array("I", range(count)),
        array.array("Q", range(begin, begin + 8 * count, 8)),
    )
    return list(numbers)
