"""The data of one optimizer: its settings, its job, and its progress."""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from optstate import _native, errors
from optstate._torch.collective.error_feedback import ErrorFeedback
from optstate._torch.frozen import groups_to_register, groups_with, is_frozen
from optstate._torch.gradients.hooks import GradientHooks
from optstate._torch.job import beginning
from optstate._torch.job.announcement import announce, warn_if_embedded, warn_of_places
from optstate._torch.job.asleep import Asleep
from optstate._torch.job.attaching import note_holder, open_attachment
from optstate._torch.job.attachment import Attachment
from optstate._torch.job.opening import Existing
from optstate._torch.layout import (
    NamedParameters,
    model_names,
    optimizer_info,
    parameter_names,
    parameter_specs,
    unnamed_alike,
)
from optstate._torch.nodes.norm_members import members_of, refuse_extension
from optstate._torch.nodes.together import raised_on_all
from optstate._torch.options import Scalar
from optstate._torch.parameters.replaced import ReplacedParameters
from optstate._torch.ranks import Ranks
from optstate._torch.settings import Settings
from optstate._torch.shards import like_parameter, local_of, state_like
from optstate._torch.state import checkpoint
from optstate._torch.state.checkpoint import MASTER_PARAM, PartialEntry
from optstate._torch.state.compare import same_bits
from optstate._torch.state_edits import StateEdits
from optstate._torch.state_mapping import ServedState
from optstate._torch.warn import warn
from optstate.session import StepOutcome

CLOSED = "it is closed"


class Served:
    """The object that an optimizer shares with every wrapper and every copy of its __dict__.

    Frameworks make classes that copy the __dict__ of an optimizer, or that forward to
    it by __getattr__ what they do not have themselves. Both find this one object, so
    that a change by one of them is a change for all. It refers to no optimizer, so
    that it ends with the last of them.

    Threads: one at a time, like the optimizer.

    Size: one method for each thing that the optimizer, its hooks and its wrappers ask for;
    the work is in the attachment, the tensors and the edits.
    """

    def __init__(self, settings: Settings, process_group: Any | None = None) -> None:
        self.settings = settings
        self.process_group = process_group
        self.lacks_process_group = False  # True: pickling dropped the process group
        self.norm_group: Any | None = None  # of all jobs that clip by one norm; copies lack it
        self.names_by_id: dict[int, str] = {}
        # The module of model=, which may get parameters that are added later.
        self._model: weakref.ref[torch.nn.Module] | None = None
        self.param_groups: list[dict[str, Any]] = []
        self.state: Any = defaultdict(dict)  # without a job: a mapping as torch's
        self.edits: StateEdits | None = None  # with a job: edits of self.state
        self.replaced: ReplacedParameters | None = None  # by attaching, until the first step
        # Loaded masters that did not fit the parameters; fitting ones may be loaded next.
        self.masters: dict[int, torch.Tensor] = {}
        self.max_norm: Scalar | None = None
        self.max_value: Scalar | None = None
        self.norm_type: float = 2.0
        self.attachment: Attachment | None = None
        # The reason why there is no attachment and the optimizer cannot be used.
        self.detached_because: str | None = None
        self.may_attach = True
        self.asleep: Asleep | None = None  # the job that reload_states() wakes
        self.steps_before = 0  # steps of a private job that went on under another name
        self.outcome: StepOutcome | None = None
        self._join_config: Any = None  # set by torch's Join
        self.says_vetoes = settings.overlaps_with_ddp  # once, about what may undo a step
        self._has_inputs = True  # False: a step that other ranks take
        self._feedback = ErrorFeedback()  # of all attachments
        # State that keeps file descriptors open for a process that is being started.
        self.handed_over: Any = None
        self._finalizer: weakref.finalize | None = None
        self._hooks = GradientHooks()

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for group in self.param_groups for tensor in group["params"]]

    def fix_options(self, defaults: dict[str, Any]) -> None:
        """Notes which options torch's class has, and the values that it takes only from its
        constructor's arguments."""
        key = "initial_accumulator_value"
        fixed = {key: float(defaults[key])} if key in defaults else {}
        self.settings = dataclasses.replace(
            self.settings, required=frozenset(defaults), fixed=fixed
        )

    def fix_start(self, entries: dict[int, Any]) -> None:
        """Adopts the initial sum of a checkpoint whose parameters have not taken a step."""
        attachment = self.attached()
        options = attachment.options
        for entry in entries.values():
            if options.fixed and entry and float(entry["step"]) == 0 and entry["sum"].numel():
                start = float(entry["sum"].flatten()[0])
                options.fixed = {key: start for key in options.fixed}
                self.settings = dataclasses.replace(self.settings, fixed=options.fixed)
                return

    def name_by(self, model: torch.nn.Module | NamedParameters | None) -> None:
        """Takes names of parameters from the module, also for those that are added later."""
        is_module = isinstance(model, torch.nn.Module)
        self._model = weakref.ref(model) if is_module else None
        self.names_by_id = model_names(model)

    def _name_added(self) -> None:
        model = None if self._model is None else self._model()
        # Names that the job has stay as they are.
        self.names_by_id = {**model_names(model), **self.names_by_id}

    def check_usable(self) -> None:
        if self.detached_because is not None:
            kind = RuntimeError if self.asleep is None else errors.FailedPreconditionError
            raise kind(f"the optimizer cannot be used: {self.detached_because}")

    def attached(self) -> Attachment:
        """Returns the attachment; RuntimeError when there is none."""
        if self.attachment is None:
            self._raise_detached()
        self.finish_interrupted(self.attachment)
        return self.attachment

    def _raise_detached(self) -> NoReturn:
        self.check_usable()
        raise RuntimeError(
            "the optimizer is not attached to a job, because it was copied or unpickled: call"
            " attach(), which makes a private job of its state, or attach(job=...)"
        )

    def finish_interrupted(self, attachment: Attachment) -> None:
        outcome = attachment.finish_interrupted()
        if outcome is not None:
            self.note_outcome(outcome)

    def note_outcome(self, outcome: StepOutcome | None) -> None:
        """Keeps the outcome of a step of the job, with its step counted as in committed_step.
        None: the step was taken, and with which outcome is not known."""
        self._feedback.end_step(applied=outcome is None or outcome.applied)
        if outcome is not None:
            outcome = dataclasses.replace(outcome, step=outcome.step + self.steps_before)
        self.outcome = outcome

    def attach(self, job: str | None) -> None:
        """Attaches, loads what the daemon lacks, and reads all back; or leaves nothing open."""
        groups = groups_to_register(self.param_groups, self.names_by_id, self.state)
        self.replaced = self.attach_groups(groups, job)
        self.detached_because = None
        assert self.attachment is not None
        announce(self.attachment, self.replaced.count if self.replaced else 0)

    def attach_groups(
        self,
        groups: Sequence[dict[str, Any]],
        job: str | None,
        extend_with: Sequence[int] | None = None,
        existing: Existing | None = None,
    ) -> ReplacedParameters | None:
        """Attaches with these groups. `extend_with`: the job may get new groups, and these
        parameters are sent; a new job gets all. `existing`: NotFoundError instead of a new job.
        Returns what an existing job replaced."""
        attachment, groups = open_attachment(
            groups,
            self.param_groups,
            self.settings,
            Ranks(self.process_group),
            job=job,
            names_by_id=self.names_by_id,
            extends=extend_with is not None,
            members=members_of(self.norm_group, self.process_group, self.settings, job),
            existing=existing,
        )
        is_new = extend_with is not None
        try:
            with raised_on_all(attachment.nodes):
                if attachment.session.phase == _native.PHASE_FAILED:
                    beginning.raise_failure(attachment)
                tensors = [tensor for group in groups for tensor in group["params"]]
                if extend_with is not None:
                    beginning.check_extended(attachment)
                    new = set(extend_with)
                    held = {i: entry for i, entry in self._held(tensors).items() if i in new}
                    attachment.load(groups, extend_with, held or None)
                elif attachment.needs_load:
                    first = beginning.first_to_load(attachment)
                    is_new = first == 0
                    beginning.check_replicas(attachment, tensors, first)
                    held = {i: entry for i, entry in self._held(tensors).items() if i >= first}
                    attachment.load(groups, range(first, len(tensors)), held)
                replaced = None if is_new else ReplacedParameters(attachment.parameters)
                views = self.settings.views and not attachment.is_sharded
                left = attachment.map_views() if views else {}
                if replaced is not None:
                    replaced.take(left)
                del left
                # A new job already has these parameters, and backward() may need them unchanged.
                everything = range(attachment.parameters.count)
                attachment.parameters.read(without_gradient=everything if is_new else ())
            if not is_new:
                attachment.spread()
            if attachment.nodes is not None:
                attachment.nodes.check_parameters(attachment.keys, attachment.parameters.values)
            if replaced is not None:
                replaced.note_read(attachment.parameters)
        except BaseException:
            attachment.close()
            raise
        in_job = attachment.parameters.index_of
        attachment.parameters.groups.leave_out(
            each for each in self.tensors() if in_job(each) is None
        )
        self._drop_held()
        self.edits = StateEdits(self, attachment, self.state)
        self.state = ServedState(self)
        if not attachment.is_private:
            self.steps_before = 0
            if extend_with is None and not (attachment.session.created or self.asleep):
                warn_of_places(attachment, unnamed_alike(self.param_groups, self.names_by_id))
        self.attachment, attachment.feedback = attachment, self._feedback
        note_holder(self)
        # The finalizer also runs at interpreter exit; closing does nothing in a forked child.
        self._finalizer = weakref.finalize(self, attachment.end)
        tensors = attachment.parameters.tensors
        if self.settings.overlap:
            attachment.gradients.says_lacking_step = self.settings.overlaps_with_ddp
            self._hooks.install(enumerate(tensors), self._push_early)
        elif attachment.gradients.views is not None:
            indices = attachment.gradients.views.indices
            self._hooks.install(((i, tensors[i]) for i in indices), self._make_view)
        warn_if_embedded(attachment)
        return replaced

    def detach(self, because: str, *, may_attach: bool = False) -> None:
        """Leaves the job, without waiting for a step that is under way. Idempotent.

        may_attach: the optimizer has what it needs to attach again. DataLossError, after all is
        done: see Attachment.close().
        """
        lost: errors.DataLossError | None = None
        if self.attachment is not None:
            assert self.edits is not None
            if because == CLOSED and self.edits.has_writes:
                warn(
                    f'optimizer.state of job "{self.attachment.job}" was written, and no step came'
                    " after it to send that: the job has not got it"
                )
            self.steps_before += self.attachment.session.committed_step
            try:
                self.attachment.close()
            except errors.DataLossError as error:
                lost = error
        self.attachment, self.detached_because = None, because
        self.may_attach = may_attach
        self.handed_over = None
        self._hooks.remove()
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
        if lost is not None:
            raise lost

    def present_settings(self) -> Settings:
        """Returns settings for a job that goes on from here, with the present loss scaler."""
        scaler = self.settings.loss_scaler
        if scaler is None or not scaler.dynamic or self.attachment is None:
            return self.settings
        state = self.attachment.session.loss_scaler_state()
        return dataclasses.replace(self.settings, loss_scaler_state=state)

    def has_state(self) -> bool:
        """Returns whether a parameter was updated, or has loaded state."""
        attachment = self.attached()
        return any(attachment.arrays.fetch_step_counts(range(attachment.parameters.count)))

    def torch_keys(self) -> frozenset[str]:
        """Returns the keys of torch's entries of this optimizer; others are the user's own."""
        info = optimizer_info(self.param_groups, self.settings.optimizer)
        return frozenset(checkpoint.keys_of(info))

    def whole_state(self) -> defaultdict[Any, Any]:
        """Fetches all state that torch would have."""
        self.check_usable()
        if self.attachment is None:
            return self.state
        self.finish_interrupted(self.attachment)
        assert self.edits is not None
        state = self.attachment.fetch(self.param_groups)
        # After an interrupted load the parameters may be those that were to be loaded.
        if self.attachment.broken_load is None:
            for index in self.attachment.parameters.written():
                self._replace_master(state, index)
        return defaultdict(dict, self.edits.put_over(state))

    def _replace_master(self, state: dict[Any, Any], index: int) -> None:
        """Replaces the master of a parameter that was changed in place by that of the next step."""
        assert self.attachment is not None
        dtensor = self.attachment.parameters.tensors[index]
        present = state.get(dtensor, {}).get(MASTER_PARAM)
        if present is None or present.shape != state_like(dtensor).shape:
            return
        tensor, present = local_of(dtensor), local_of(present)
        if same_bits(checkpoint.fitting_master(present, tensor), present):
            return  # the parameter was cast, which the next step refuses
        master = checkpoint.fitting_master(self.masters.get(index, tensor), tensor)
        state[dtensor][MASTER_PARAM] = like_parameter(master.cpu().contiguous(), dtensor)

    def go_on_with_job(self) -> None:
        """Gives parameters the job's values again after an interrupted load, like its state."""
        attachment = self.attached()
        with attachment.raised_on_all():
            attachment.parameters.changed()  # raises if parameters share memory by now
            attachment.parameters.locate()
            attachment.parameters.read()
        attachment.spread()
        if self.replaced is not None:
            self.replaced.note_read(attachment.parameters)
        self.masters, attachment.broken_load = {}, None

    def own_state(self) -> defaultdict[Any, Any]:
        """Returns state that the user has added and that is not the daemon's."""
        assert self.edits is not None
        return defaultdict(dict, self.edits.own())

    def send_changes(
        self, attachment: Attachment, groups: Sequence[dict[str, Any]], *, by_content: bool = True
    ) -> None:
        """Sends parameters and state that the trainer has changed in place.

        by_content: see Parameters.changed().
        """
        edits = self.edits
        assert edits is not None
        entries: dict[int, Any] = {}
        changed: Sequence[int] = ()
        error: Exception | None = None
        try:
            entries = {} if edits.is_idle else edits.pending()
            changed = attachment.parameters.changed(by_content=by_content)
        except Exception as failure:
            error = failure
        loads = bool(changed or entries or error) or attachment.broken_load is not None
        if attachment.some_rank(loads):
            with attachment.raised_on_all():
                if error is not None:
                    raise error
            what = "optimizer.state was changed" if entries else "parameters were changed in place"
            attachment.check_no_micro_steps(what)
            if changed and self.replaced is not None and self.replaced.left_out:
                warn(
                    f'job "{attachment.job}" goes on with its own state (resume="job"), but'
                    f" {len(changed)} parameters were changed since: if a checkpoint's model was"
                    " loaded, they are of another step than their state"
                )
            for index in self.masters.keys() & changed:
                entries.setdefault(index, PartialEntry({MASTER_PARAM: self.masters[index]}))
            with attachment.raised_on_all(in_load=True):
                attachment.load(groups, changed, entries or None)
        self.masters = {}
        edits.forget()

    def _held(self, tensors: Sequence[torch.Tensor]) -> dict[int, dict[str, Any]]:
        """Returns the state of an unpickled optimizer, which is here and not in a daemon."""
        return {
            index: self.state[tensor]
            for index, tensor in enumerate(tensors)
            if "step" in self.state.get(tensor, ())
        }

    def _drop_held(self) -> None:
        keys = self.torch_keys()
        for tensor in [key for key in self.state if isinstance(key, torch.Tensor)]:
            for key in keys:
                self.state[tensor].pop(key, None)
            if not self.state[tensor]:
                del self.state[tensor]

    def _push_early(self, index: int) -> None:
        attachment = self.attachment
        if attachment is None or attachment.committing is not None or attachment.must_abort:
            return  # step() pushes the gradient
        if attachment.session.is_forked:
            return  # a forked child only computes
        with attachment.undone_on_error():
            attachment.gradients.push_early(attachment.next_step, attachment.micro_step, index)

    def _make_view(self, index: int) -> None:
        attachment = self.attachment
        if attachment is None or attachment.committing is not None or attachment.must_abort:
            return  # the daemon may still read the gradient area
        views = attachment.gradients.views
        if views is not None and not attachment.session.is_forked:
            views.take(index)

    def add_group(self, old: Attachment) -> None:
        """Extends the job by the last of param_groups, without its frozen parameters."""
        last = len(self.param_groups) - 1
        new = self.param_groups[last:]
        if old.parameters.groups.left_out or any(map(is_frozen, new[0]["params"])):
            names = {**self.names_by_id, **old.parameters.names_by_id()}
            new = groups_with(
                self.param_groups, names, lambda each: not is_frozen(each), only={last}
            )
        if new:
            self._extend(old, self.param_groups[:-1], new, "add_param_group()")
        else:
            old.parameters.groups.leave_out(self.param_groups[last]["params"])

    def thaw(self, tensors: Sequence[torch.Tensor]) -> Attachment:
        """Extends the job by parameters that were frozen; returns the new attachment."""
        old = self.attached()
        wanted = set(map(id, tensors))
        # The job's names come first: a place name may date from before groups changed places.
        names = {**self.names_by_id, **old.parameters.names_by_id()}
        new = groups_with(self.param_groups, names, lambda each: id(each) in wanted)
        new = [group for group in new if group["params"]]
        self._extend(old, self.param_groups, new, "giving a frozen parameter a gradient")
        return self.attached()

    def _extend(
        self,
        old: Attachment,
        old_groups: Sequence[dict[str, Any]],
        new_groups: Sequence[dict[str, Any]],
        what: str,
    ) -> None:
        """Closes the session and opens another with the new groups behind those of the job."""
        refuse_extension(old.nodes, what)
        self.finish_interrupted(old)
        old.check_no_micro_steps(what)
        ranks = Ranks(self.process_group)
        groups, sums, changed = list(old_groups), {}, []
        new = [tensor for group in new_groups for tensor in group["params"]]
        count = old.parameters.count
        error: Exception | None = None
        self._name_added()
        try:  # the old session is still open
            # The job keeps its order of groups, from which the list's may differ.
            old_groups = list(old.parameters.groups.in_order(old_groups))
            old.parameters.check_tensors()
            old.options.check_groups(old_groups)
            groups = [*old_groups, *new_groups]
            names = parameter_names(groups, self.names_by_id)
            specs = parameter_specs(groups, names, sharded=old.is_sharded)
            if ranks.world_size > 1:
                sums = beginning.sums_of(specs[count:], new)
            changed = old.parameters.changed()
        except Exception as failure:
            error = failure
        with old.announced():
            ranks.agree(error)
            beginning.check_added(ranks, sums)
        extend_with = [*changed, *range(count, count + len(new))]
        if self.replaced is not None:
            self.replaced.drop_changed()
        if old.is_private:  # the job ends with its last session: take its state along
            self.settings = self.present_settings()
            state = self.whole_state()
        else:
            self.send_changes(old, old_groups)
            state = self.own_state()
        self.detach(f"{what} failed; attach() goes on", may_attach=True)
        self.state = state
        ranks.agree(None)  # every rank has left
        job, there = (None, None) if old.is_private else (old.job, Existing(old.session.endpoint))
        try:
            self.attach_groups(groups, job, extend_with if there else None, there)
        except errors.NotFoundError:
            raise beginning.deleted(old.job) from None
        except errors.OptstateError:  # the daemon refuses the new ones
            self.attach_groups(old_groups, job, existing=there)
            self._note_extended(old)
            raise
        self._note_extended(old)

    def _note_extended(self, old: Attachment) -> None:
        assert self.attachment is not None
        self.attachment.is_initialised = old.is_initialised
        if self.replaced is not None:
            self.replaced.note_read(self.attachment.parameters)
        self.detached_because = None
