"""optstate.AdamW and optstate.Adam: torch's optimizers, with the state in the daemon.

``torch.optim.AdamW(model.parameters(), lr=3e-4)`` becomes
``optstate.AdamW(model.parameters(), lr=3e-4, job="my-run")``. Everything torch
documents of its optimizer holds; ServedOptimizer says what is added.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Union

import torch

from optstate import _native, _torch_checkpoint, errors
from optstate._collective import Ranks
from optstate._torch_attachment import Attachment, Settings, as_float, hyperparams_of
from optstate._torch_layout import check_group, model_names, parameter_names, parameter_specs
from optstate.session import StepOutcome

Scalar = Union[float, torch.Tensor]


class _Opaque:
    """Takes a value past the casts of torch's load_state_dict unchanged."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _hide_entries(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    hidden = {key: _Opaque(value) for key, value in state_dict["state"].items()}
    return {**state_dict, "state": hidden}


def _max_norm_value(max_norm: Scalar | None) -> float:
    """The C API's: 0 for no clipping."""
    if max_norm is None:
        return 0.0
    value = as_float(max_norm)
    if not value >= 0:
        raise ValueError(f"Invalid max_norm: {max_norm}")
    return 0.0 if math.isinf(value) else value


class ServedOptimizer(torch.optim.Optimizer):
    """What optstate.Adam and optstate.AdamW add to torch's.

    Keyword arguments beyond torch's:
        job: name of the job on this node. A job of this name that is there
            already is re-attached: the parameters are overwritten in place with
            the daemon's, of step ``committed_step``. None: a job of a unique
            name that ends with this optimizer.
        endpoint: "unix:PATH", "grpc:HOST:PORT", "grpc:unix:PATH" or "embedded".
            None: $OPTSTATE_ENDPOINT, else the node's daemon when its socket is
            there, else "embedded", a private daemon that lives with the trainer.
        max_norm: clip the L2 norm of all gradients to this, in the daemon (as
            clip_grad_norm_, but in the same pass as the update). None, 0 and
            infinity: no clipping. Also an attribute that may be changed between
            steps.
        process_group: whose ranks train the job together; None: the default
            group of torch.distributed if it is initialised, else this process.
        model: a module to take stable parameter names from; or pass (name,
            parameter) pairs, as torch's optimizers accept.
        partition: "greedy" (whole parameters) or "contiguous" (equal slices):
            which rank pushes which gradients.
        accumulate: reserve accumulators in the daemon for accumulate_step().
        connect_timeout, step_timeout: seconds; None: 30 and 1800. step_timeout
            includes waiting for the other ranks.

    With several ranks the trainer reduces the gradients (as
    DistributedDataParallel does); each rank pushes the part it owns and reads
    all parameters back. Constructing, add_param_group, load_state_dict and step
    are collective: every rank calls them in the same order.

    A gradient with NaN or Inf skips the step on all ranks; last_outcome says so.
    Parameters that were changed in place (``p.copy_()``,
    ``model.load_state_dict``), on every rank alike, are sent to the daemon before
    the next step. Changes through ``.data`` or numpy leave no trace: call
    upload_parameters() after them.

    Threads: one at a time, as torch's. Processes: a forked child cannot use it.
    """

    _step_supports_amp_scaling = True

    # torch's constructor calls add_param_group before _set_up.
    _attachment: Attachment | None = None
    # Why there is no attachment, and whether the first use makes one.
    _detached_because: str | None = None
    _is_loading_state_dict = False

    def _set_up(
        self,
        settings: Settings,
        *,
        job: str | None,
        max_norm: Scalar | None,
        process_group: Any | None,
        model: torch.nn.Module | None,
    ) -> None:
        """The end of the subclasses' constructors."""
        if job is not None and (not isinstance(job, str) or not job):
            raise ValueError(f"Invalid job: {job!r} (a name, or None)")
        _max_norm_value(max_norm)
        self.max_norm = max_norm
        self._set_up_detached(settings, process_group, model_names(model))
        self._attach(job)

    def _set_up_detached(
        self, settings: Settings, process_group: Any | None, names_by_id: dict[int, str]
    ) -> None:
        self._settings = settings
        self._process_group = process_group
        self._names_by_id = names_by_id
        self._finalizer: weakref.finalize | None = None
        self._steps_before = 0  # of a private job that went on under another name
        self._outcome: StepOutcome | None = None

    # Where the optimizer stands.

    @property
    def committed_step(self) -> int:
        """The last step that the daemon has committed; 0 for a new job."""
        attachment = self._attachment
        return self._steps_before + (attachment.session.committed_step if attachment else 0)

    @property
    def last_outcome(self) -> StepOutcome | None:
        """What became of this optimizer's last step; None before it."""
        return self._outcome

    @property
    def job(self) -> str | None:
        """Name of the job; None while not attached."""
        return self._attachment.job if self._attachment else None

    @property
    def endpoint(self) -> str | None:
        """Where the daemon is, resolved; None while not attached."""
        return self._attachment.session.endpoint if self._attachment else None

    @property
    def wire(self) -> str | None:
        """What carries gradients and parameters, shm or grpc."""
        return self._attachment.session.wire if self._attachment else None

    # Attaching.

    def attach(self, job: str | None = None, endpoint: str | None = None) -> None:
        """Attaches a copied or unpickled optimizer; otherwise its first use does.

        A new job starts with the state that the copy holds; an existing one
        overwrites parameters and state with the daemon's. Collective.
        """
        if self._attachment is not None:
            raise RuntimeError(f'the optimizer is attached to job "{self.job}" already')
        self._check_usable()
        if endpoint is not None:
            self._settings = dataclasses.replace(self._settings, endpoint=endpoint)
        self._attach(job)

    def _check_usable(self) -> None:
        if self._detached_because is not None:
            raise RuntimeError(f"the optimizer cannot be used: {self._detached_because}")

    def _attach(self, job: str | None, extend_with: Sequence[int] | None = None) -> Attachment:
        """Attaches, loads what the daemon lacks, and reads all parameters back.

        `extend_with`: the job may get new groups, and these parameters are sent; a
        new job gets all. Leaves nothing open when it raises.
        """
        attachment = Attachment(
            self.param_groups,
            self._settings,
            Ranks(self._process_group),
            job=job,
            names_by_id=self._names_by_id,
            extend=extend_with is not None,
        )
        try:
            if attachment.session.phase == _native.PHASE_FAILED:
                attachment.raise_failure()
            if extend_with is not None:
                attachment.load(self.param_groups, extend_with)
            elif attachment.needs_load:
                attachment.check_new()
                tensors = self._tensors()
                attachment.load(self.param_groups, range(len(tensors)), self._held(tensors))
            attachment.binding.read()
        except BaseException:
            attachment.session.close()
            raise
        self._drop_held()
        if not attachment.is_private:
            self._steps_before = 0
        self._attachment = attachment
        # Also at interpreter exit; closing does nothing in a forked child.
        self._finalizer = weakref.finalize(self, attachment.session.close)
        return attachment

    def _held(self, tensors: Sequence[torch.Tensor]) -> dict[int, dict[str, Any]]:
        """State that is here and not in a daemon: of an unpickled optimizer."""
        return {
            index: self.state[tensor]
            for index, tensor in enumerate(tensors)
            if "step" in self.state.get(tensor, ())
        }

    def _drop_held(self) -> None:
        for tensor in [key for key in self.state if isinstance(key, torch.Tensor)]:
            for key in _torch_checkpoint.KEYS:
                self.state[tensor].pop(key, None)
            if not self.state[tensor]:
                del self.state[tensor]

    def _attached(self) -> Attachment:
        if self._attachment is not None:
            self._finish_interrupted(self._attachment)
            return self._attachment
        self._check_usable()
        return self._attach(None)

    def _finish_interrupted(self, attachment: Attachment) -> None:
        outcome = attachment.finish_interrupted()
        if outcome is not None:
            self._outcome = outcome

    def _detach(self, because: str) -> None:
        self._steps_before = self.committed_step
        self._attachment, self._detached_because = None, because
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None

    def close(self) -> None:
        """Detaches from the job. Idempotent; the optimizer cannot be used after.

        A named job stays in the daemon; a private one ends with its last rank.
        """
        self._detach("it is closed")

    def __enter__(self) -> ServedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for group in self.param_groups for tensor in group["params"]]

    # Stepping.

    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one optimization step in the daemon; returns the closure's loss.

        Waits for the other ranks. When it raises because of a value, nothing of
        the step stays in the daemon and it can be taken again; after
        UnavailableError or DeadlineExceededError, attach anew and look at
        committed_step.

        Ctrl-C ends the wait for another rank with KeyboardInterrupt. The step is
        under way then: the next use of the optimizer waits for it to end and reads
        the parameters, and a next step() then takes another step. close() gives it
        up: it is not taken, unless the other ranks had all come.
        """
        self._check_graph_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        attachment = self._prepared_attachment()
        attachment.fill_hyperparams(self.param_groups)
        max_norm = _max_norm_value(self.max_norm)
        grad_scale, found_inf = self._scaling()
        step = attachment.next_step
        with _undone_on_error(attachment):
            attachment.binding.push(step, attachment.micro_step)
            attachment.committing = step
            self._outcome = attachment.session.commit(
                step,
                attachment.hyperparams,
                grad_scale=grad_scale,
                max_norm=max_norm,
                found_inf=found_inf,
            )
        attachment.micro_step = 0
        if self._outcome.applied:
            attachment.binding.read()
        attachment.committing = None
        return loss

    def accumulate_step(self) -> None:
        """Pushes the present gradients as one micro-step and drops them.

        The daemon adds up micro-steps in fp32; step() adds the gradients there
        are by then, if any, and updates with the sum. Needs ``accumulate=True``.
        zero_grad() leaves pushed micro-steps alone; abort_step() drops them.
        A GradScaler looks at the gradients of step() alone: with one, look at
        last_outcome.found_inf.
        """
        if not self._settings.accumulate:
            raise RuntimeError("accumulate_step needs an optimizer made with accumulate=True")
        attachment = self._prepared_attachment()
        with _undone_on_error(attachment):
            if attachment.binding.push(attachment.next_step, attachment.micro_step):
                attachment.session.flush()
        attachment.micro_step += 1
        self.zero_grad(set_to_none=True)

    def abort_step(self) -> None:
        """Drops the micro-steps that this rank pushed since the last step."""
        attachment = self._attached()
        attachment.session.abort(attachment.next_step)
        attachment.micro_step = 0

    def _prepared_attachment(self) -> Attachment:
        """Checks what the trainer may have changed, and sends it if need be."""
        attachment = self._attached()
        attachment.check_groups(self.param_groups)
        attachment.binding.check_parameters(self.param_groups)
        if attachment.must_abort:
            attachment.session.abort(attachment.next_step)
            attachment.must_abort = False
        changed = attachment.binding.changed()
        if changed:
            attachment.load(self.param_groups, changed)
        return attachment

    def _scaling(self) -> tuple[float, bool]:
        """(grad_scale, found_inf) that a GradScaler left for this step."""
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        return (
            1.0 if grad_scale is None else as_float(grad_scale),
            found_inf is not None and as_float(found_inf) != 0,
        )

    def _check_graph_capture(self) -> None:
        check = getattr(self, "_accelerator_graph_capture_health_check", None)
        if check is None:  # its name in older torch
            check = self._cuda_graph_capture_health_check
        check()

    # State.

    def upload_parameters(self) -> None:
        """Sends all parameters as they are now to the daemon. Collective."""
        attachment = self._attached()
        attachment.binding.check_parameters(self.param_groups)
        attachment.load(self.param_groups, range(len(self._tensors())))
        attachment.binding.remember()

    def fetch_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """One parameter's step, exp_avg, ... at the committed step.

        {} before its first update. KeyError when it is not this optimizer's.
        """
        binding = self._attached().binding
        index = 0
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor is parameter:
                    (entry,) = _torch_checkpoint.fetch_entries(binding, [index], [(tensor, group)])
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
        ValueError, with nothing changed, when it does not fit.
        """
        self._attached()
        handle = self.register_load_state_dict_pre_hook(_hide_entries)
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
        settings, self.max_norm = state.pop("_optstate")
        super().__setstate__(state)
        self._set_up_detached(settings, None, {})

    def _set_loaded_state(self, state: dict[str, Any]) -> None:
        groups = state["param_groups"]
        given = {
            key: value.value if isinstance(value, _Opaque) else value
            for key, value in state["state"].items()
        }
        attachment = self._attached()
        attachment.check_groups(groups)
        names = parameter_names(groups, self._names_by_id)
        entries: dict[int, Any] = {}
        for group in groups:
            for tensor in group["params"]:
                index = len(entries)
                entry = entries[index] = given.pop(tensor, None) or None
                if entry is not None:
                    _torch_checkpoint.check_entry(entry, names[index], tensor, group)
        rest: defaultdict[Any, Any] = defaultdict(dict)
        rest.update(given)
        super().__setstate__({"state": rest, "param_groups": groups})
        attachment.load(groups, attachment.binding.changed(), entries)
        attachment.binding.read()

    def __getstate__(self) -> dict[str, Any]:
        """As torch's, with the state itself. The copy is not attached: it is an
        optimizer of its own, whose first use makes a private job of this state."""
        with self._state_present():
            state = super().__getstate__()
        state["_optstate"] = (self._settings, self.max_norm)
        return state

    # Growing.

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; after construction it is collective.

        The job goes on at its step, with the new parameters beside the old ones.
        A trainer that re-attaches to it later must construct all groups at once.
        """
        super().add_param_group(param_group)
        try:
            index = len(self.param_groups) - 1
            check_group(self.param_groups[index], index)
            hyperparams_of(self.param_groups[index], index)
            if self._attachment is not None:
                self._extend(self._attachment)
        except BaseException:
            self.param_groups.pop()
            raise

    def _extend(self, old: Attachment) -> None:
        """Closes the session and opens one with all groups."""
        old_groups, groups = self.param_groups[:-1], self.param_groups
        self._finish_interrupted(old)
        if old.micro_step:
            raise RuntimeError("add_param_group within a step: there are micro-steps pushed")
        ranks = Ranks(self._process_group)
        error: Exception | None = None
        try:  # while nothing is given up yet
            old.binding.check_parameters(old_groups)
            parameter_specs(groups, parameter_names(groups, self._names_by_id))
        except Exception as failure:
            error = failure
        ranks.agree(error)
        count = sum(len(group["params"]) for group in old_groups)
        extend_with = [*old.binding.changed(), *range(count, len(self._tensors()))]
        if old.is_private:  # it ends with its last session: take its state along
            for tensor, entry in old.fetch(old_groups).items():
                self.state[tensor].update(entry)
        self._detach("add_param_group failed")
        ranks.agree(None)  # every rank has left
        if old.is_private:
            self._attach(None)
        else:
            self._attach_extended(old.job, extend_with)
        self._detached_because = None

    def _attach_extended(self, job: str, extend_with: Sequence[int]) -> None:
        """Attaches with all groups or, when the daemon refuses the new one, without it."""
        try:
            self._attach(job, extend_with)
        except errors.OptstateError:
            refused = self.param_groups.pop()
            try:
                self._attach(job)
                self._detached_because = None
            finally:
                self.param_groups.append(refused)  # the caller takes it away
            raise


@contextlib.contextmanager
def _undone_on_error(attachment: Attachment) -> Iterator[None]:
    """Drops what was staged when a step fails, so that it can be taken again."""
    try:
        yield
    except (errors.UnavailableError, errors.NotFoundError, errors.DeadlineExceededError):
        # There may be no daemon to say it to, and waiting for one takes a while.
        attachment.micro_step, attachment.committing = 0, None
        attachment.must_abort = True
        raise
    except errors.OptstateError:
        attachment.micro_step, attachment.committing = 0, None
        with contextlib.suppress(errors.OptstateError):
            attachment.session.abort(attachment.next_step)
        raise
    except BaseException:
        attachment.micro_step = 0
        if attachment.committing is not None:
            raise  # a signal's: finish_interrupted() sees what became of it
        with contextlib.suppress(errors.OptstateError):
            attachment.session.abort(attachment.next_step)
        raise


class AdamW(ServedOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW with the state in the daemon; see ServedOptimizer."""

    def __init__(
        self,
        params: Any,
        lr: Scalar = 1e-3,
        betas: tuple[Scalar, Scalar] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        job: str | None = None,
        endpoint: str | None = None,
        max_norm: Scalar | None = None,
        process_group: Any | None = None,
        model: torch.nn.Module | None = None,
        partition: str = "greedy",
        accumulate: bool = False,
        connect_timeout: float | None = None,
        step_timeout: float | None = None,
    ) -> None:
        settings = Settings(
            endpoint, partition, accumulate, connect_timeout, step_timeout, _native.ADAMW
        )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._set_up(settings, job=job, max_norm=max_norm, process_group=process_group, model=model)


class Adam(ServedOptimizer, torch.optim.Adam):
    """torch.optim.Adam with the state in the daemon; see ServedOptimizer."""

    def __init__(
        self,
        params: Any,
        lr: Scalar = 1e-3,
        betas: tuple[Scalar, Scalar] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        job: str | None = None,
        endpoint: str | None = None,
        max_norm: Scalar | None = None,
        process_group: Any | None = None,
        model: torch.nn.Module | None = None,
        partition: str = "greedy",
        accumulate: bool = False,
        connect_timeout: float | None = None,
        step_timeout: float | None = None,
    ) -> None:
        settings = Settings(
            endpoint, partition, accumulate, connect_timeout, step_timeout, _native.ADAM
        )
        # Unknown to older torch, so only named when it is asked for.
        newer = {"decoupled_weight_decay": True} if decoupled_weight_decay else {}
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            **newer,
        )
        self._set_up(settings, job=job, max_norm=max_norm, process_group=process_group, model=model)
