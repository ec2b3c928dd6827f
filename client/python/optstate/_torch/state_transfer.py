"""Moves the state of an optimizer of optstate out of the daemon and into it."""

from __future__ import annotations

import contextlib
import multiprocessing.context
from collections.abc import Iterator
from typing import Any

import torch

from optstate import errors
from optstate._torch.flat_shards import flat_shard_of, is_flat_shard, restore_flat_shard
from optstate._torch.hidden_values import hide_values, opened
from optstate._torch.job.attachment import Attachment
from optstate._torch.layout import parameter_names
from optstate._torch.nodes.together import raised_on_all
from optstate._torch.parameters.replaced import words_on_parameters
from optstate._torch.served import Served
from optstate._torch.shards import local_values, stand_in
from optstate._torch.state import checkpoint
from optstate._torch.state.checkpoint import StateEntry
from optstate._torch.state.loaded import Loaded
from optstate._torch.tensors import in_memory
from optstate._torch.warn import warn


class GroupOfCopies:
    """The process group of an optimizer; copies share it, and pickles lose it."""

    def __init__(self, group: Any | None = None, is_lost: bool = False) -> None:
        self.group, self.is_lost = group, is_lost

    def __deepcopy__(self, _: Any) -> GroupOfCopies:
        return self

    def __reduce__(self) -> Any:
        return GroupOfCopies, (None, self.is_lost or self.group is not None)


class StateTransfer:
    """The part of ServedOptimizer that handles state: state_dict, pickle, single parameters.

    Threads: one at a time, like the optimizer.
    """

    _served: Served
    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Any:
        """State as in torch: for each parameter a mapping with step, exp_avg, ... and user keys.

        The values are in the daemon, and fetched on access; a tensor has the values of the
        committed step, and stays the same until the next one. Writes (a value, a whole entry,
        del, clear(), a change of a tensor in place) are shown by state_dict() at once and sent
        to the daemon before the next step: make them on every rank alike. Writes that do not
        fit raise ValueError or TypeError; changes of a tensor that was read before a step
        raise RuntimeError in the next step. A mapping that is assigned is copied, its tensors
        are not.
        """
        return self._served.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._served.asleep is not None:
            self._served.check_usable()
        if self._served.attachment is None:
            self._served.state = value  # set by torch's constructor, or on a copy
        else:
            self._served.state.assign(value)

    def upload_parameters(self) -> None:
        """Sends the parameters that differ from the daemon's, however changed. Collective.

        A 16-bit parameter that has the daemon's bits keeps its master. The job then has the
        present parameters, and those that attaching had replaced are no longer put back.
        """
        attachment = self._served.attached()
        groups = attachment.parameters.groups.in_order(self.param_groups)
        attachment.parameters.check_tensors()
        attachment.check_no_micro_steps("upload_parameters()")
        attachment.load(groups, attachment.parameters.differing())
        if self._served.replaced is not None:
            self._served.replaced.forget_values()

    def fetch_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns one parameter's step, exp_avg, ... at the committed step.

        {} before its first update. KeyError when the parameter is not this optimizer's.
        """
        served = self._served
        attachment = served.attached()
        for group in self.param_groups:
            if any(tensor is parameter for tensor in group["params"]):
                entries = attachment.fetch([{**group, "params": [parameter]}])
                if served.edits is not None and not served.edits.is_idle:
                    entries = served.edits.put_over(entries, only=parameter)
                return entries.get(parameter, {})
        raise KeyError("not a parameter of this optimizer")

    @contextlib.contextmanager
    def _state_as(self, state: Any) -> Iterator[None]:
        """Makes torch find a plain mapping as self.state."""
        served = self._served
        own, served.state = served.state, state
        try:
            yield
        finally:
            served.state = own

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state_dict, fetched from the daemon; torch's own optimizer can load it.

        Moments are fp32 whatever the parameter's dtype, and 16-bit parameters
        have a "master_param" besides, so that nothing is lost. Every rank that
        calls it gets the whole state; the call is not collective. Nodes that share parameters
        out call consolidate_state_dict() before (else RuntimeError).
        """
        with self._state_as(self._complete_state()):
            return super().state_dict()

    def _complete_state(self) -> dict[Any, Any]:
        attachment = self._served.attachment
        if attachment is None or attachment.shared_out is None:
            return self._served.whole_state()
        return attachment.shared_out.complete_state()

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gathers the state that nodes have shared out (across_nodes="sharded") for state_dict(),
        as torch's ZeroRedundancyOptimizer does. Collective. to: the rank that gets it, or None
        for all. It is kept, in host memory, until the next step or load. Raises on all ranks when a
        rank cannot fetch its node's state.
        """
        attachment = self._served.attached()
        shared_out = attachment.shared_out
        if shared_out is not None:
            with raised_on_all(attachment.ranks):
                state, keys = self._served.whole_state(), self._served.torch_keys()
            shared_out.consolidate(state, keys, to)

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of this class or of torch's own. Collective.

        Parameters are not part of a state_dict: load the model's before. Raises
        ValueError, with nothing changed, when it does not fit. committed_step stays
        as it is. State that the job has already is not sent: load_state_dict(state_dict())
        changes nothing.

        Before the first step after attaching to an existing job, the keyword resume
        decides the effect of a state that is not the job's. "checkpoint": the job is put back
        to that state, along with the parameters that attaching had replaced, except those that
        were changed since. Parameters are put back only with state of another step than the
        job's: not with an empty one, nor with the job's own whose moments were changed.
        RuntimeError, with nothing changed, when it is unclear which were changed. "job": if
        the job has taken steps, its state stays, and only param_groups are taken. "error":
        RuntimeError, with nothing changed, if the job has taken steps or parameters would
        have to be put back. The first two warn (UserWarning), and so does a load of a state
        with fewer steps than a named job has taken.
        """
        attachment = self._served.attached()
        with attachment.raised_on_all():
            attachment.check_no_micro_steps("load_state_dict()")
            attachment.parameters.check_tensors()
        handle = self.register_load_state_dict_pre_hook(hide_values)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_optstate" not in state:
            self._set_loaded_state(state)  # torch's load_state_dict ends here
            return
        state = dict(state)
        settings, group, names, *limits = state.pop("_optstate")
        pieces = limits.pop() if len(limits) > 3 else ()  # none from an older version
        self._served = served = Served(settings, group.group)
        served.lacks_process_group = group.is_lost
        served.max_norm, served.max_value, served.norm_type = limits
        served.state = state.pop("state")
        served.param_groups = state.pop("param_groups")
        served.names_by_id = {
            id(tensor): name for tensor, name in zip(served.tensors(), names) if name is not None
        }
        for tensor, piece in zip(served.tensors(), pieces):
            restore_flat_shard(tensor, piece)
        super().__setstate__(state)

    def _set_groups(self, groups: list[dict[str, Any]]) -> None:
        """Sets groups like torch's __setstate__, which would put shared data into __dict__."""
        self._served.param_groups = groups
        with self._state_as({}):
            super().__setstate__({})

    def _set_loaded_state(self, state: dict[str, Any]) -> None:
        served = self._served
        attachment = served.attached()
        groups = state["param_groups"]
        own = self.param_groups
        with attachment.raised_on_all():
            checkpoint.complete_groups(self._torch_class(), groups, own, self.defaults)
            loaded = self._checked(attachment, state)
            is_present = loaded.is_present(attachment)
        # Without shards each rank decides by itself: when they differ, one loads while another
        # steps, which the daemon refuses at once.
        if not attachment.some_rank(not is_present):
            self._set_groups(groups)
            if attachment.some_rank(attachment.broken_load is not None):
                served.go_on_with_job()
        elif self._keeps_job(attachment):
            self._set_groups(groups)
            with attachment.raised_on_all():
                is_changed = bool(attachment.parameters.changed(warns=False))
            if attachment.some_rank(is_changed):
                with attachment.raised_on_all():
                    attachment.parameters.read()
                attachment.spread()
            return
        else:
            loaded = self._replace_state(attachment, state, loaded)
        served.fix_start(loaded.entries)
        assert served.edits is not None
        served.edits.set_own(loaded.own)
        served.edits.forget()

    def _replace_state(
        self, attachment: Attachment, state: dict[str, Any], loaded: Loaded
    ) -> Loaded:
        """Loads what was checked; returns it in the order of the job, which may be extended."""
        served = self._served
        is_of_another_step = loaded.is_of_another_step(attachment)
        put_back = self._parameters_to_put_back(attachment, is_of_another_step)
        self._warn_of_other_state(attachment, loaded.entries, is_of_another_step, put_back)
        # The load replaces what was written to the state. If the load is interrupted, the state
        # is the job's.
        assert served.edits is not None
        served.edits.forget()
        if loaded.frozen:
            attachment = self._thaw_for_load(attachment, loaded.frozen)
            loaded = self._checked(attachment, state)
        with attachment.raised_on_all():
            if served.replaced is not None and is_of_another_step:
                served.replaced.put_back(put_back)
            # A checkpoint's parameters may have come without a trace, as dcp.load() writes them.
            changed = attachment.parameters.changed(warns=False)
            parameters = {*changed, *loaded.lacking_masters()}
            served.masters = loaded.unfitting_masters()
        with attachment.raised_on_all(in_load=True):
            attachment.load(loaded.groups, sorted(parameters), loaded.entries)
            self._set_groups(state["param_groups"])  # an interrupted load keeps the former groups
            attachment.is_initialised = False
            attachment.parameters.read()
        attachment.spread()
        served.replaced = None
        return loaded

    @torch.no_grad()
    def _thaw_for_load(self, attachment: Attachment, frozen: list[torch.Tensor]) -> Attachment:
        """Extends the job by frozen parameters that have loaded state, which torch would keep.

        The trainer's changes are not sent by the extension, but with the load, so that the job
        gets all of a checkpoint or nothing.
        """
        parameters = attachment.parameters
        changed = [
            (parameters.values[index], in_memory(parameters.values[index]).clone())
            for index in parameters.changed(warns=False)
        ]
        if changed:
            parameters.read()
        broken, attachment.broken_load = attachment.broken_load, None
        try:
            extended = self._served.thaw(frozen)
        except BaseException:
            attachment.broken_load = broken
            raise
        finally:
            for tensor, values in changed:
                tensor.copy_(values)
        extended.broken_load = "state"  # until the load has ended
        return extended

    def _checked(self, attachment: Attachment, state: dict[str, Any]) -> Loaded:
        """Converts a loaded state to the job's order; raises, with nothing changed, if it does
        not fit."""
        groups = state["param_groups"]
        in_order = attachment.parameters.groups.in_order(groups)
        attachment.options.check_groups(in_order)
        of_groups = [(tensor, group) for group in in_order for tensor in group["params"]]
        names = parameter_names(in_order, self._served.names_by_id)
        own = {key: opened(value) for key, value in state["state"].items()}
        entries = {
            index: self._entry_of(attachment, own, name, *of)
            for index, (name, of) in enumerate(zip(names, of_groups))
        }
        tensors = [(stand_in(tensor), group) for tensor, group in of_groups]
        frozen = self._frozen_with_state(attachment, groups, own)
        starts = {name: entry for name, (_, entry) in frozen.items()}
        starts.update(zip(names, entries.values()))
        checkpoint.check_starts(attachment.info, starts)
        return Loaded(in_order, tensors, entries, own, [each for each, _ in frozen.values()])

    def _entry_of(
        self,
        attachment: Attachment,
        own: dict[Any, Any],
        name: str,
        tensor: torch.Tensor,
        group: dict[str, Any],
    ) -> StateEntry | None:
        """Removes the daemon's part of a parameter's entry from `own`; returns it, checked."""
        keys = self._served.torch_keys()
        values = own.pop(tensor, None) or {}
        entry = {
            key: value
            for key, value in values.items()
            if key in keys and not checkpoint.is_absent(value)
        }
        if entry:
            # A DTensor's shape is the whole parameter's, as a plain tensor's must be; a flat
            # piece's is its own.
            is_flat = is_flat_shard(tensor)
            if not is_flat:
                checkpoint.check_entry(attachment.info, entry, name, tensor, group)
            entry = {
                key: local_values(value, tensor, f'loaded {key} of parameter "{name}"')
                for key, value in entry.items()
            }
            if is_flat:
                checkpoint.check_entry(attachment.info, entry, name, tensor, group)
        beside = {key: value for key, value in values.items() if key not in keys}
        if beside:
            own[tensor] = beside
        return entry or None

    def _frozen_with_state(
        self, attachment: Attachment, groups: list[dict[str, Any]], own: dict[Any, Any]
    ) -> dict[str, tuple[torch.Tensor, StateEntry]]:
        """Returns, by name, parameters that have entries and are not in the job because they
        are frozen."""
        left_out = set(map(id, attachment.parameters.groups.left_out))
        names = iter(parameter_names(groups, self._served.names_by_id))
        found = {}
        for index, (group, present) in enumerate(zip(groups, self.param_groups)):
            for tensor in group["params"]:
                name = next(names)
                if id(tensor) not in left_out:
                    continue
                entry = self._entry_of(attachment, own, name, tensor, group)
                if entry is not None:
                    attachment.options.check_same(group, present, index)
                    found[name] = (tensor, entry)
        return found

    def _keeps_job(self, attachment: Attachment) -> bool:
        """Returns whether resume= keeps the job from loading a checkpoint that is not its state.
        RuntimeError when resume= refuses the load."""
        served = self._served
        step = attachment.session.committed_step
        if served.replaced is None or step == 0:
            return False
        where = f'job "{attachment.job}", which was re-attached at step {step},'
        if served.settings.resume == "error":
            raise RuntimeError(
                f'{where} has other state than the checkpoint that is loaded (resume="error"): do'
                " not load it to go on with the job, or delete the job"
                f" (optctl delete job {attachment.job}), or choose another, to begin from it"
            )
        if served.settings.resume == "job":
            served.replaced.left_out = True
            warn(
                f"{where} goes on with its own state and parameters: of the checkpoint that is"
                ' loaded, only param_groups are taken (resume="job")',
            )
            return True
        return False

    def _parameters_to_put_back(
        self, attachment: Attachment, is_of_another_step: bool
    ) -> list[int]:
        """Returns the replaced parameters to put back; RuntimeError when resume= refuses it."""
        replaced = self._served.replaced
        if replaced is None:
            return []
        with attachment.announced():
            found = replaced.to_put_back(attachment.ranks, is_of_another_step)
        if attachment.some_rank(bool(found)) and self._served.settings.resume == "error":
            raise RuntimeError(
                f'attaching to job "{attachment.job}" replaced {len(found)} parameters, and the'
                ' checkpoint that is loaded is of others (resume="error"): load the model\'s'
                " checkpoint after the optimizer is constructed, or choose another job"
            )
        return found

    def _warn_of_other_state(
        self,
        attachment: Attachment,
        entries: dict[int, StateEntry | None],
        is_of_another_step: bool,
        put_back: list[int],
    ) -> None:
        """Warns of state that is older than the job's, and of the effect on its parameters."""
        if attachment.is_private:
            return
        replaced = self._served.replaced.count if self._served.replaced is not None else 0
        if replaced and not is_of_another_step:
            warn(
                f'job "{attachment.job}" gets the state that is loaded, but the {replaced}'
                " parameters that attaching to it had replaced are not put back: that is done only"
                " with state of another step than the job's",
            )
            return
        loaded = checkpoint.last_step_of(entries)
        # A job from an older build may have no complete state to compare with.
        with contextlib.suppress(errors.OptstateError):
            present = max(attachment.arrays.fetch_step_counts(range(len(entries))))
            is_older = loaded is not None and loaded < present
            if put_back or (is_older and attachment.session.committed_step):
                of_step = "" if loaded is None else f" of {loaded}"
                of_parameters = words_on_parameters(len(put_back), replaced)
                warn(
                    f'job "{attachment.job}" has taken {present} steps and is put back to a state'
                    f"{of_step}{of_parameters}: a script that attaches"
                    " again loads a checkpoint only if optimizer.committed_step is 0",
                )

    def __getstate__(self) -> dict[str, Any]:
        """Returns what torch's returns, with all state. The copy is not attached: it is a
        separate optimizer, for which attach() makes a job."""
        served = self._served
        with self._state_as(self._complete_state()):
            state = super().__getstate__()
        if multiprocessing.context.get_spawning_popen() is not None:
            # torch shares a tensor's memory, and assumes that the pickling process keeps the
            # tensor until the new process has started.
            served.handed_over = state["state"]
        group = GroupOfCopies(served.process_group, served.lacks_process_group)
        limits = (served.max_norm, served.max_value, served.norm_type)
        names = [served.names_by_id.get(id(tensor)) for tensor in served.tensors()]
        pieces = list(map(flat_shard_of, served.tensors()))
        state["_optstate"] = (served.present_settings(), group, names, *limits, pieces)
        return state
