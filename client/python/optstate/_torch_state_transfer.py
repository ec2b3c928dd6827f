"""The state of an optimizer of optstate, out of the daemon and into it."""

from __future__ import annotations

import contextlib
import multiprocessing.context
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from optstate import _torch_checkpoint, errors
from optstate._torch_attachment import Attachment
from optstate._torch_layout import parameter_names
from optstate._torch_served import Served
from optstate._torch_state import Opaque, ServedState, hide_entries


class StateTransfer:
    """What of ServedOptimizer is about its state: state_dict, pickle, single parameters.

    Threads: as the optimizer, one at a time.
    """

    _served: Served
    param_groups: list[dict[str, Any]]
    state: defaultdict[Any, Any]

    def upload_parameters(self) -> None:
        """Sends the parameters that differ from the daemon's, whoever changed them. Collective.

        One of 16 bits that has the daemon's bits keeps its master.
        """
        attachment = self._served.attached()
        attachment.parameters.check_parameters(self.param_groups)
        attachment.check_no_micro_steps("upload_parameters()")
        attachment.load(self.param_groups, attachment.parameters.differing())

    def fetch_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """One parameter's step, exp_avg, ... at the committed step.

        {} before its first update. KeyError when it is not this optimizer's.
        """
        attachment = self._served.attached()
        index = 0
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor is parameter:
                    (entry,) = _torch_checkpoint.fetch_entries(
                        attachment.arrays,
                        attachment.info,
                        [index],
                        [(tensor, attachment.fixed_group(group))],
                    )
                    return entry or {}
                index += 1
        raise KeyError("not a parameter of this optimizer")

    @contextlib.contextmanager
    def _state_present(self) -> Iterator[None]:
        """Puts the daemon's state into self.state, where torch looks for it."""
        served = self._served
        served.check_usable()
        own = self.state
        merged: defaultdict[Any, Any] = defaultdict(dict)
        if served.attachment is not None:
            served.finish_interrupted(served.attachment)
            merged.update(served.attachment.fetch(self.param_groups))
        for key, value in own.items():
            is_entry = isinstance(key, torch.Tensor)
            merged[key] = {**merged.get(key, {}), **value} if is_entry else value
        self.state = merged
        try:
            yield
        finally:
            self.state = own

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """As torch's, fetched from the daemon; loads into torch's own optimizer.

        Moments are fp32 whatever the parameter's dtype, and parameters of 16
        bits have a "master_param" besides, so that nothing is lost. Every rank
        that calls it gets all of it; it is not collective.
        """
        with self._state_present():
            return super().state_dict()

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state_dict of this class or of torch's own. Collective.

        Parameters are not part of it: load the model's before. Raises
        ValueError, with nothing changed, when it does not fit. committed_step stays
        as it is. UserWarning when a named job has taken more steps than the state: a
        script that attaches again loads only if committed_step is 0.
        """
        self._served.attached().check_no_micro_steps("load_state_dict()")
        handle = self.register_load_state_dict_pre_hook(hide_entries)
        self._served.is_loading_state_dict = True
        try:
            super().load_state_dict(state_dict)
        finally:
            self._served.is_loading_state_dict = False
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        served = getattr(self, "_served", None)
        if served is not None and served.is_loading_state_dict:
            self._set_loaded_state(state)  # torch's load_state_dict ends here
            return
        state = dict(state)
        settings, *limits = state.pop("_optstate")
        self._served = served = Served(settings)
        served.max_norm, served.max_value, served.norm_type = limits
        self._set_torchs_state(state)
        served.state = ServedState(served, served.state)

    def _set_torchs_state(self, state: dict[str, Any]) -> None:
        """As torch's __setstate__, which would put what is shared into __dict__."""
        state = dict(state)
        self._served.state = state.pop("state")
        self._served.param_groups = state.pop("param_groups")
        super().__setstate__(state)

    def _set_loaded_state(self, state: dict[str, Any]) -> None:
        groups = state["param_groups"]
        given = {
            key: value.value if isinstance(value, Opaque) else value
            for key, value in state["state"].items()
        }
        attachment = self._served.attached()
        _torch_checkpoint.complete_groups(
            self._torch_class(), groups, self.param_groups, self.defaults
        )
        attachment.check_groups(groups)
        names = parameter_names(groups, self._served.names_by_id)
        entries: dict[int, Any] = {}
        for group in groups:
            for tensor in group["params"]:
                index = len(entries)
                entry = entries[index] = given.pop(tensor, None) or None
                if entry is not None:
                    _torch_checkpoint.check_entry(
                        attachment.info, entry, names[index], tensor, group
                    )
        self._warn_of_older_state(attachment, entries)
        self._set_torchs_state({"state": ServedState(self._served, given), "param_groups": groups})
        attachment.load(groups, attachment.parameters.changed(), entries)
        self._served.fix_start(entries)
        attachment.parameters.read()

    def _warn_of_older_state(self, attachment: Attachment, entries: dict[int, Any]) -> None:
        if attachment.is_private or attachment.session.committed_step == 0:
            return
        loaded = _torch_checkpoint.last_step_of(entries)
        if loaded is None:
            return
        # A load that broke off, and is repeated, has left nothing to compare with.
        with contextlib.suppress(errors.OptstateError):
            present = max(attachment.arrays.fetch_step_counts(range(len(entries))))
            if loaded < present:
                warnings.warn(
                    f'job "{attachment.job}" has taken {present} steps and is put back to a state'
                    f" of {loaded}: a script that attaches again loads a checkpoint only if"
                    " optimizer.committed_step is 0",
                    stacklevel=2,
                )

    def __getstate__(self) -> dict[str, Any]:
        """As torch's, with the state itself. The copy is not attached: it is an
        optimizer of its own, that attach() makes a job of."""
        with self._state_present():
            state = super().__getstate__()
        served = self._served
        if multiprocessing.context.get_spawning_popen() is not None:
            # torch shares a tensor's memory, and takes for granted that who pickles the
            # tensor keeps it until the process has started.
            served.handed_over = state["state"]
        limits = (served.max_norm, served.max_value, served.norm_type)
        state["_optstate"] = (served.present_settings(), *limits)
        return state
