"""The state of an optimizer of optstate, out of the daemon and into it."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.context
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from optstate import _torch_checkpoint, errors
from optstate._torch_attachment import Attachment, Settings
from optstate._torch_layout import parameter_names
from optstate._torch_state import Opaque, ServedState, hide_entries


class StateTransfer:
    """What of ServedOptimizer is about its state: state_dict, pickle, single parameters.

    Threads: as the optimizer, one at a time.
    """

    _attachment: Attachment | None
    _settings: Settings
    param_groups: list[dict[str, Any]]
    state: defaultdict[Any, Any]
    _is_loading_state_dict = False

    def upload_parameters(self) -> None:
        """Sends all parameters as they are now to the daemon. Collective."""
        attachment = self._attached()
        attachment.parameters.check_parameters(self.param_groups)
        attachment.check_no_micro_steps("upload_parameters()")
        attachment.load(self.param_groups, range(len(self._tensors())))

    def fetch_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """One parameter's step, exp_avg, ... at the committed step.

        {} before its first update. KeyError when it is not this optimizer's.
        """
        attachment = self._attached()
        index = 0
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor is parameter:
                    (entry,) = _torch_checkpoint.fetch_entries(
                        attachment.arrays, attachment.info, [index], [(tensor, group)]
                    )
                    return entry or {}
                index += 1
        raise KeyError("not a parameter of this optimizer")

    @contextlib.contextmanager
    def _state_present(self) -> Iterator[None]:
        """Puts the daemon's state into self.state, where torch looks for it."""
        self._check_usable()
        own = self.state
        merged: defaultdict[Any, Any] = defaultdict(dict)
        if self._attachment is not None:
            self._finish_interrupted(self._attachment)
            merged.update(self._attachment.fetch(self.param_groups))
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
        self._attached().check_no_micro_steps("load_state_dict()")
        handle = self.register_load_state_dict_pre_hook(hide_entries)
        self._is_loading_state_dict = True
        try:
            super().load_state_dict(state_dict)
        finally:
            self._is_loading_state_dict = False
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if self._is_loading_state_dict:  # torch's load_state_dict ends here
            self._set_loaded_state(state)
            return
        state = dict(state)
        settings, self.max_norm, self.max_value, self.norm_type = state.pop("_optstate")
        super().__setstate__(state)
        self.state = ServedState(self, self.state)
        self._set_up_detached(settings, None, {})

    def _set_loaded_state(self, state: dict[str, Any]) -> None:
        groups = state["param_groups"]
        given = {
            key: value.value if isinstance(value, Opaque) else value
            for key, value in state["state"].items()
        }
        attachment = self._attached()
        _torch_checkpoint.complete_groups(
            self._torch_class(), groups, self.param_groups, self.defaults
        )
        attachment.check_groups(groups)
        names = parameter_names(groups, self._names_by_id)
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
        super().__setstate__({"state": ServedState(self, given), "param_groups": groups})
        attachment.load(groups, attachment.parameters.changed(), entries)
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
        optimizer of its own, whose first use makes a private job of this state."""
        with self._state_present():
            state = super().__getstate__()
        if multiprocessing.context.get_spawning_popen() is not None:
            # torch shares a tensor's memory, and takes for granted that who pickles the
            # tensor keeps it until the process has started.
            self._handed_over = state["state"]
        settings = self._present_settings()
        state["_optstate"] = (settings, self.max_norm, self.max_value, self.norm_type)
        return state

    def _present_settings(self) -> Settings:
        """Of a job that goes on from here: with the loss scale of now."""
        scaler = self._settings.loss_scaler
        if scaler is None or self._attachment is None:
            return self._settings
        scale = self._attachment.session.loss_scale
        return dataclasses.replace(
            self._settings, loss_scaler=dataclasses.replace(scaler, init_scale=scale)
        )
