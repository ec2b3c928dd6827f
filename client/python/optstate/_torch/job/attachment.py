"""The attachment of an optimizer to its job, opened on all ranks together or on none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Callable

import torch

from optstate import _native, errors
from optstate._torch.collective.error_feedback import ErrorFeedback
from optstate._torch.gradients.pusher import GradientPusher, Gradients
from optstate._torch.job.failed import refuse_failed
from optstate._torch.job.fetching import fetch
from optstate._torch.job.meeting import meet
from optstate._torch.job.opening import Existing, open_together
from optstate._torch.job.partition import partition_of
from optstate._torch.job.registered_options import RegisteredOptions
from optstate._torch.job.session_specs import session_spec
from optstate._torch.layout import optimizer_info, parameter_specs
from optstate._torch.names import quoted
from optstate._torch.nodes.norm_members import NormMembers
from optstate._torch.nodes.together import interrupts_afterwards, raised_on_all
from optstate._torch.offload import OffloadTuner
from optstate._torch.optimizer_info import by_kind
from optstate._torch.parameters.memory import Trained
from optstate._torch.parameters.parameters import Parameters
from optstate._torch.ranks import Ranks
from optstate._torch.settings import Settings
from optstate._torch.shards import key_of, local_entries, stand_in
from optstate._torch.state import checkpoint
from optstate._torch.state.arrays import ArrayTransfer
from optstate.session import StepOutcome
from optstate.session_spec import SessionSpec

ParamGroups = Sequence[dict[str, Any]]

# Number of attempts at a load that is aborted, before the caller gets the error.
_LOADS_MAX = 5


class Attachment:
    """One attached optimizer: its session, its tensors, and the layout that was registered.

    Construction and load() are collective. Threads: one at a time.
    Size: one method for each thing that an optimizer does with its session.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        settings: Settings,
        ranks: Ranks,
        *,
        job: str | None,
        names_by_id: dict[int, str],
        members: NormMembers | None = None,
        duplicates: Collection[int] = (),
        take_over: Callable[[SessionSpec], bool],
        extend: bool = False,
        existing: Existing | None = None,
    ) -> None:
        tensors = [tensor for group in param_groups for tensor in group["params"]]
        self._ranks = ranks
        self.is_private = job is None
        self._trained: Trained | None = None
        met = meet(
            param_groups,
            settings,
            ranks,
            members,
            job=job,
            names_by_id=names_by_id,
            duplicates=duplicates,
        )
        self.job = met.job
        self.places = met.places
        self.is_sharded = met.is_sharded
        # The owners of the parameters that are no shards, by node.
        self.shared_out = met.shared_out
        layout, names = met.layout, met.names
        # On several nodes, or with other jobs, what takes each step on all of them or on none.
        self.nodes = met.agreement if met.takes_steps_together else None

        def make_spec() -> SessionSpec:
            info = optimizer_info(param_groups, settings.optimizer)
            specs = parameter_specs(param_groups, names) if layout is None else layout.parameters
            self._trained = Trained(tensors, names, self.job)
            return session_spec(
                settings,
                self.places,
                job=self.job,
                optimizer=info.kind,
                group_options=[info.option_bits(group) for group in param_groups],
                parameters=specs,
                held=None if layout is None else layout.held,
                partition=partition_of(settings, is_sharded=layout is not None),
                ephemeral=self.is_private,
                extend=extend,
                two_phase=self.nodes is not None,
            )

        self.chose_endpoint = bool(settings.endpoint)
        compares = settings.across_nodes is not None or met.agreement.spans_jobs
        try:
            self.session, self._spec = open_together(
                ranks,
                self.places,
                met.agreement,
                make_spec,
                take_over,
                compares=compares,
                settles=compares and not self.is_private,
                existing=existing,
            )
        except BaseException:
            self._leave_memory()
            raise
        if self.nodes is not None:
            self.nodes.note_layout([spec.name for spec in self._spec.parameters])
        self.info = by_kind(self._spec.optimizer)
        self.options = RegisteredOptions(
            self.info, self._spec.group_options, settings.required, settings.fixed
        )
        # Gradients that the daemon sums are averaged, as in DistributedDataParallel.
        self.gradient_divisor = ranks.world_size if settings.reduction == "daemon" else 1
        # The parameters that this rank has, which are all unless they are sharded.
        specs = self._spec.parameters
        specs = specs if layout is None else [specs[index] for index in layout.held]
        # Each key names the part of a parameter; the parameter's name comes first.
        self.keys: Sequence[tuple] = list(map(key_of, specs))
        alone = ranks.world_size == 1
        detect = settings.detect_changes
        self.parameters = Parameters(self.session, param_groups, specs, detect, is_alone=alone)
        self.parameters.copies.share_device_memory(settings.shares_device_memory)
        self.arrays = ArrayTransfer(self.session, specs)
        self.gradients = GradientPusher(
            self.session,
            tensors,
            specs,
            copies=self.parameters.copies,
            can_take_back=not (settings.reduction == "daemon" and settings.accumulate),
            views=not self.is_sharded and settings.makes_gradient_views(ranks.world_size),
        )
        # True when parameters that were never updated have entries, as after torch's first step.
        self.is_initialised = False
        self.micro_step = 0
        # Parameters without a gradient in all micro-steps of the step so far.
        self.without_gradient: list[int] = []
        # True when a step that failed may have left something staged in the daemon.
        self.must_abort = False
        # True when a step that failed here was committed after all, and step() has not said so yet.
        self.was_taken = False
        # "state" after an interrupted load_state_dict(): the job has its former state, but
        # param_groups and parameters may be the checkpoint's.
        self.broken_load: str | None = None
        # The step whose commit has begun, until its parameters are read back.
        self.committing: int | None = None
        self.feedback = ErrorFeedback()  # of gradients that step() quantises
        # The rank that looks for the fastest offload_fraction of its node's job has one.
        self.tuner = OffloadTuner() if settings.tunes_offload and self._spec.rank == 0 else None

    def map_views(self) -> dict[int, torch.Tensor]:
        """Makes parameters views of the daemon's memory, where possible. Returns the replaced
        tensors by index, with their former memory and values."""
        try:
            return self.parameters.map_views()
        except errors.UnimplementedError as error:
            # Over gRPC, copies are what users expect.
            level = logging.WARNING if self.session.wire == "shm" else logging.INFO
            logging.getLogger("optstate").log(level, "parameters are copied: %s", error)
            return {}

    def _leave_memory(self) -> None:
        if self._trained is not None:
            self._trained.leave()
        if self.shared_out is not None:
            self.shared_out.end()

    def spread(self) -> None:
        """Gives the other nodes the values of parameters that this node's daemon has. Collective
        where nodes have shared them out."""
        if self.shared_out is not None:
            self.shared_out.spread()
            self.parameters.remember()

    def close(self) -> None:
        """Closes the session; parameters keep their values. Idempotent. DataLossError, after
        everything is closed: they could not, because the parameter file was cut short."""
        self.parameters.unlock()
        self.end()

    def end(self) -> None:
        self._leave_memory()
        # Views end first: without this session, the engine may write at any time.
        lost: errors.DataLossError | None = None
        try:
            self.parameters.end()
        except errors.DataLossError as error:
            lost = error
        self.gradients.end()
        self.session.close()
        if lost is not None:
            raise lost

    @property
    def ranks(self) -> Ranks:
        """The ranks that train the job together."""
        return self._ranks

    @property
    def spec(self) -> SessionSpec:
        """The spec that the session was opened with."""
        return self._spec

    @property
    def needs_load(self) -> bool:
        """Returns whether the job, or a part of it, is new and waits for initial parameters."""
        return self.session.phase in (_native.PHASE_EMPTY, _native.PHASE_LOADING)

    @property
    def next_step(self) -> int:
        return self.session.committed_step + 1

    def finish_interrupted(self) -> StepOutcome | None:
        """Completes the step that a signal (Ctrl-C) interrupted, if any."""
        step = self.committing
        if step is None:
            return None
        outcome = None
        if self.session.refresh():
            try:
                outcome = self.take_step(self.session.wait_commit)
            except errors.OptstateError:
                self.committing = None
                raise
        with interrupts_afterwards():  # the others wait for this node's parameters, once
            if self.session.committed_step < step:
                self.must_abort = True  # the step never reached the commit
            else:
                ended = outcome or self.session.last_outcome
                was_seen = ended.step == step and not ended.prepared
                self.feedback.end_step(applied=ended.applied or not was_seen)
                self._read_but_changed()
                self.gradients.forget_pushed()
            self.micro_step, self.committing = 0, None
        return outcome

    def take_step(self, commit: Callable[[], StepOutcome]) -> StepOutcome:
        """Commits a step; on several nodes, on all of them or on none."""
        return commit() if self.nodes is None else self.nodes.take(self.session, commit)

    def _read_but_changed(self) -> None:
        """Reads the parameters of a step whose end the script did not see. What the script has
        written since stays, and is sent before the next step."""
        self.parameters.check_tensors()
        written = self.parameters.written_since.take()
        self.parameters.locate()  # the trainer may have moved parameters since
        self.parameters.read(without_gradient=self.without_gradient)
        self.spread()
        self.parameters.written_since.put_back(written)

    @contextlib.contextmanager
    def values_of_one_step(self) -> Iterator[None]:
        """Wraps a step so that a script that an interrupt diverts, e.g. to save its model, sees
        views of the step before or, when the engine has begun to write them, of the step after.
        What the script writes then stays."""
        try:
            yield
        except errors.OptstateError:
            raise
        except BaseException:
            if self.committing is not None and not self.session.closed:
                if self.parameters.views is not None:
                    self.parameters.views.keep()
                    if self.session.writes_parameters():
                        self.finish_interrupted()
                if self.committing is not None:
                    self.parameters.written_since.note()
            raise

    def note_missing(self, gradients: Gradients) -> None:
        """Records the parameters without a gradient in a micro-step, before the next begins."""
        if self.micro_step == 0:
            self.without_gradient = gradients.missing
        elif self.without_gradient:
            still = set(gradients.missing).intersection(self.without_gradient)
            self.without_gradient = sorted(still)

    @property
    def is_first_rank(self) -> bool:
        return self.ranks.rank == 0

    @property
    def is_embedded(self) -> bool:
        """Returns whether the daemon is a private one, which ends when the trainer does."""
        return "/optstate-embedded-" in self.session.endpoint

    def abort_step(self) -> None:
        """Drops what was pushed of the step that failed. If the step was committed all the
        same, sets was_taken and reads the parameters that it produced."""
        step = self.next_step
        try:
            self.session.abort(step)
        except errors.FailedPreconditionError:
            self.session.refresh()
            if self.session.committed_step < step:
                if self.nodes is None or not self.nodes.is_undecided:
                    raise
                return  # the step raises, on this rank or on all: see NodeAgreement.check_decided()
            with interrupts_afterwards():
                self._read_but_changed()
                self.was_taken = True
        self.parameters.written_since.forget()
        self.gradients.forget_pushed()
        self.must_abort = False

    def taken_outcome(self, **how: Any) -> StepOutcome | None:
        """Returns the outcome of the step for which was_taken is set, by committing it again;
        None when it was committed with other values."""
        self.was_taken = False
        with contextlib.suppress(errors.FailedPreconditionError):
            step = self.session.committed_step
            return self.session.commit(step, self.options.hyperparams, **how)
        return None

    def drop_step(self) -> None:
        """Drops what was pushed of the open step. If the daemon does not answer, must_abort
        makes the next step drop it first."""
        self.micro_step, self.committing = 0, None
        self.gradients.forget_pushed()
        self.must_abort = True
        with contextlib.suppress(errors.OptstateError):
            self.session.abort(self.next_step)
            self.must_abort = False

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Drops what was staged when a step fails, so that the step can be taken again."""
        try:
            with self._without_views_on_error():
                yield
        except (errors.UnavailableError, errors.NotFoundError, errors.DeadlineExceededError):
            # There may be no daemon to abort the step in, and waiting for one takes a while.
            self.micro_step, self.committing = 0, None
            self.must_abort = True
            self.parameters.written_since.note()
            raise
        except errors.OptstateError:
            self.drop_step()
            raise
        except BaseException:
            if self.committing is None:
                self.drop_step()
            raise  # a signal interrupted a commit: finish_interrupted() finds its outcome

    @contextlib.contextmanager
    def _without_views_on_error(self) -> Iterator[None]:
        """Leaves views of gradients when a step fails, which the daemon may still be taking: it
        would read what the script writes next."""
        try:
            yield
        except BaseException:
            self.gradients.leave_views()
            raise

    def check_no_micro_steps(self, what: str) -> None:
        """Raises RuntimeError if micro-steps are pushed, which a load would drop."""
        if self.micro_step:
            raise RuntimeError(
                f"{what} within a step: there are micro-steps pushed. Do it before the first"
                " accumulate_step() or after step(), or call abort_step() and take the step again"
            )

    def load(
        self,
        param_groups: ParamGroups,
        parameters: Iterable[int],
        entries: dict[int, Any] | None = None,
    ) -> None:
        """Sends checkpoint entries, and then the parameters of these indices.

        Every rank loads the same ones, or its own shards of any; FailedPreconditionError, on all
        ranks, when a rank steps instead. The job gets all of it or, when this raises, nothing.
        """
        self.parameters.locate()  # this precedes new values in the daemon
        of_groups = [(tensor, group) for group in param_groups for tensor in group["params"]]
        if self.is_sharded and entries is not None:
            entries = local_entries(entries, [tensor for tensor, _ in of_groups], self.arrays.name)
        tensors = [(stand_in(tensor), group) for tensor, group in of_groups]
        if entries is None and self.broken_load == "state":
            raise RuntimeError(
                "load_state_dict() did not end, so that the job has the state of before, but"
                " param_groups and parameters may be those that were to be loaded: call it again"
                " (with state_dict() to go on with the job's state and parameters)"
            )
        parameters = list(parameters)
        # Other ranks' loads reach the daemon at once; what was pushed in backward() may arrive
        # later, and would be refused.
        if self.gradients.has_pushed:
            self.session.abort(self.next_step)
            self.gradients.forget_pushed()
        if entries is not None:
            self.broken_load = "state"
        with self.undone_on_error(), self._named_on_disagreement(parameters, entries):
            for attempt in range(_LOADS_MAX):
                try:
                    self._load_once(tensors, parameters, entries)
                    break
                except errors.AbortedError:  # the engine crashed, or another rank was lost
                    if attempt + 1 == _LOADS_MAX:
                        raise
        self.broken_load = None
        if entries is not None:
            self.feedback.forget()
        if self.shared_out is not None:
            self.shared_out.forget_state()
        if self.nodes is not None:
            self.nodes.note_load([tensors[index][0] for index in parameters], entries)
        self.parameters.settle()

    def some_rank(self, flag: bool) -> bool:
        """Returns the flag; with shards, of which a rank sees only its own, whether it is set on
        some rank. Collective with shards."""
        return self._ranks.any(flag) if self.is_sharded else flag

    def raised_on_all(self, *, in_load: bool = False) -> contextlib.AbstractContextManager[None]:
        """Raises on all ranks what is raised on one of them. Collective with shards; without, it
        does nothing. in_load: a daemon ends a load on all ranks of its node, so that it is
        collective with shards on several nodes."""
        is_shared = self.is_sharded and (self.places.several or not in_load)
        return raised_on_all(self._ranks if is_shared else None)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Wraps an agreement of the ranks before a load. A rank that steps instead would never
        reach it: the daemon refuses that step, because this rank has begun a load.

        Raises the error of a job that has failed, which would drop its state for the load; on all
        ranks when it has failed on some of several nodes."""
        with raised_on_all(self._ranks if self.places.several else None):
            refuse_failed(self.session, self.job, len(self._spec.parameters))
        if self._ranks.world_size == 1:
            yield
            return
        self.session.begin_load()  # this drops what was pushed
        self.gradients.forget_pushed()
        try:
            yield
        except BaseException:
            self.session.abort(self.next_step)
            raise

    @contextlib.contextmanager
    def _named_on_disagreement(
        self, parameters: Sequence[int], entries: dict[int, Any] | None
    ) -> Iterator[None]:
        """Adds what this rank was loading to the daemon's error that not all ranks load."""
        try:
            yield
        except errors.FailedPreconditionError as refused:
            if self._ranks.world_size == 1:
                raise
            names = [self.arrays.name(index) for index in parameters]
            what = f"parameters {quoted(names)} were changed in place"
            if entries is not None:
                what = "load_state_dict() was called"
            raise errors.FailedPreconditionError(
                f"{refused}; on this rank, {self._ranks.rank}, {what}"
            ) from None

    def _load_once(
        self,
        tensors: Sequence[tuple[torch.Tensor, dict[str, Any]]],
        parameters: Sequence[int],
        entries: dict[int, Any] | None,
    ) -> None:
        self.parameters.copies.settle()  # the load ends with new values in the daemon
        self.session.begin_load(same=self._ranks.world_size > 1)  # drops what was pushed
        self.arrays.drop_loads()
        self.gradients.forget_pushed()
        for index, entry in (entries or {}).items():
            checkpoint.load_entry(self.arrays, self.info, index, entry, *tensors[index])
        for index in parameters:
            # A master in the entry is the parameter with the bits that the parameter lacks.
            if checkpoint.MASTER_PARAM not in ((entries or {}).get(index) or {}):
                self.arrays.load_array(_native.MASTER, index, tensors[index][0].detach())
        self.arrays.flush_loads()
        self.session.finish_load()

    def fetch(
        self, param_groups: ParamGroups, keys: Collection[str] | None = None
    ) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns state by tensor; see fetching.py."""
        return fetch(self, param_groups, keys)
