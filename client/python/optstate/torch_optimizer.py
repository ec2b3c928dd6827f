"""What every optimizer of optstate is, whatever torch's class it stands for."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import torch

from optstate import _native, _torch_checkpoint, errors
from optstate._collective import Ranks
from optstate._optimizers import as_float, hyperparams_of
from optstate._options import (
    Scalar,
    checked_norm_type,
    limit,
    master_format,
    state_format,
)
from optstate._torch_attachment import Attachment, Settings
from optstate._torch_layout import (
    check_group,
    model_names,
    optimizer_info,
    parameter_names,
    parameter_specs,
)
from optstate._torch_state import ServedState
from optstate._torch_state_transfer import StateTransfer
from optstate.session import LossScaler, StepOutcome


def _remove_hooks(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


class ServedOptimizer(StateTransfer, torch.optim.Optimizer):
    """What the optimizers of optstate add to torch's of the same names.

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
            steps. A param group's own "max_norm" clips the group by its norm.
        norm_type: of max_norm, as clip_grad_norm_ takes it: 1, 2 or infinity.
        max_value: cut each element of the unscaled, norm-clipped gradients to
            +-this (as clip_grad_value_). None, 0 and infinity: not.
        process_group: whose ranks train the job together; None: the default
            group of torch.distributed if it is initialised, else this process.
        model: a module to take stable parameter names from; or pass (name,
            parameter) pairs, as torch's optimizers accept.
        partition: "greedy" (whole parameters) or "contiguous" (equal slices):
            which rank pushes which gradients.
        accumulate: reserve accumulators in the daemon for accumulate_step(). With
            reduction="daemon" a micro-step of all ranks is summed as soon as each
            has taken it; a rank without a gradient adds nothing to it.
        accumulate_dtype: of the accumulators: "float32", or "gradient" for the
            gradients' own, which for 16 bits takes half the memory and rounds each
            sum to nearest even.
        reduction: "trainer": the gradients are reduced already, as after
            DistributedDataParallel. "daemon": each rank has its own, and the
            daemon averages them in the pass of the update; no collective between
            the ranks of the node. Under DistributedDataParallel register
            optstate.ddp_hook, which keeps it from reducing.
        overlap: push each gradient as soon as backward() has accumulated it, so
            that the daemon looks at it while backward() goes on. Needs
            reduction="daemon" when there are several ranks. Changes that are
            made to .grad before step() are noticed and pushed again, but for
            those that leave no trace: through .data or numpy, by a collective of
            torch.distributed, or by unscale_() without the scaler's own step().
            Parameters come back while others are updated, where the wire can.
        state_dtype: of the state arrays: torch.float32, torch.bfloat16 (rounded
            stochastically, reproducibly) or "dynamic8" (bitsandbytes' 8-bit map):
            4, 2 or 1.02 bytes an element. Adafactor's row_var and col_var are
            float32 always.
        master: where the fp32 values of 16-bit parameters are kept: "float32"
            beside them, or "split": the bfloat16 parameter is the upper half and
            16 bits are beside it, 2 bytes less for the same steps. A parameter
            half way between two bfloat16 is then the larger one, not the even
            one. float32 parameters are their own in either case.
        loss_scaler: an optstate.LossScaler, kept by the daemon with the job:
            ``optimizer.scale(loss).backward()``, then ``optimizer.step()``.
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

    # Of the subclass: the daemon's name of its optimizer.
    _optimizer = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Shows torch's arguments and ours as the class's signature."""
        super().__init_subclass__(**kwargs)
        if ServedOptimizer not in cls.__bases__:
            return
        torchs = inspect.signature(cls._torch_class().__init__).parameters.values()
        ours = inspect.signature(ServedOptimizer.__init__).parameters.values()
        kept = [each for each in torchs if each.kind is not each.VAR_KEYWORD]
        added = [each for each in ours if each.kind is each.KEYWORD_ONLY]
        cls.__signature__ = inspect.Signature([*kept, *added][1:])

    @classmethod
    def _torch_class(cls) -> type[torch.optim.Optimizer]:
        """What this is but for the daemon."""
        torchs = (each for each in cls.__mro__ if not issubclass(each, ServedOptimizer))
        return next(each for each in torchs if issubclass(each, torch.optim.Optimizer))

    def __init__(
        self,
        params: Any,
        *args: Any,
        job: str | None = None,
        endpoint: str | None = None,
        max_norm: Scalar | None = None,
        max_value: Scalar | None = None,
        norm_type: float = 2.0,
        process_group: Any | None = None,
        model: torch.nn.Module | None = None,
        partition: str = "greedy",
        accumulate: bool = False,
        accumulate_dtype: str = "float32",
        reduction: str = "trainer",
        overlap: bool = False,
        state_dtype: torch.dtype | str | None = None,
        master: str = "float32",
        loss_scaler: LossScaler | None = None,
        connect_timeout: float | None = None,
        step_timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        settings = Settings(
            endpoint,
            partition,
            accumulate,
            connect_timeout,
            step_timeout,
            self._optimizer,
            state_format(state_dtype),
            reduction,
            loss_scaler,
            overlap,
            master_format(master),
            accumulate_dtype,
        )
        super().__init__(params, *args, **kwargs)
        self.state = ServedState(self)  # what Adagrad begins with is the daemon's
        if job is not None and (not isinstance(job, str) or not job):
            raise ValueError(f"Invalid job: {job!r} (a name, or None)")
        limit(max_norm, "max_norm")
        limit(max_value, "max_value")
        checked_norm_type(norm_type)
        self.max_norm, self.max_value, self.norm_type = max_norm, max_value, norm_type
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
        self._hooks: list[Any] = []
        # State whose file descriptors a process that is being started inherits.
        self._handed_over: Any = None

    # Where the optimizer stands.

    @property
    def committed_step(self) -> int:
        """The last step that the daemon has committed; 0 for a new job."""
        attachment = self._attachment
        if attachment is None:
            return self._steps_before
        self._finish_interrupted(attachment)
        return self._steps_before + attachment.session.committed_step

    @property
    def last_outcome(self) -> StepOutcome | None:
        """What became of this optimizer's last step; None before it."""
        if self._attachment is not None:
            self._finish_interrupted(self._attachment)
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

    def gradient_norms(self) -> dict[str, float]:
        """The L2 norm of each parameter's gradient in the last step, by name.

        Of the unscaled gradients before clipping, summed (and with
        reduction="daemon" averaged) over ranks and micro-steps. Parameters without a
        gradient are not in it. Not collective. FailedPreconditionError before the first
        step, and after the daemon's engine was started anew.
        """
        return self._attached().arrays.fetch_gradient_norms()

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
                attachment.check_replicas(tensors)
                attachment.load(self.param_groups, range(len(tensors)), self._held(tensors))
            attachment.parameters.read()
        except BaseException:
            attachment.session.close()
            raise
        self._drop_held()
        if not attachment.is_private:
            self._steps_before = 0
        self._attachment = attachment
        # Also at interpreter exit; closing does nothing in a forked child.
        self._finalizer = weakref.finalize(self, attachment.session.close)
        if self._settings.overlap:
            self._hook_gradients()
        attachment.warn_if_embedded()
        return attachment

    # Overlap.

    def _hook_gradients(self) -> None:
        """Pushes each gradient as soon as backward() has accumulated it."""
        _remove_hooks(self._hooks)
        # A hook must not keep a dropped optimizer, and with it its rank, alive.
        served = weakref.ref(self)

        def hook_of(index: int) -> Callable[[torch.Tensor], None]:
            def hook(_: torch.Tensor) -> None:
                optimizer = served()
                if optimizer is not None:
                    optimizer._push_early(index)

            return hook

        self._hooks = [
            tensor.register_post_accumulate_grad_hook(hook_of(index))
            for index, tensor in enumerate(self._tensors())
            if tensor.requires_grad
        ]
        weakref.finalize(self, _remove_hooks, self._hooks)

    def _push_early(self, index: int) -> None:
        attachment = self._attachment
        if attachment is None or attachment.committing is not None or attachment.must_abort:
            return  # step() pushes it
        if attachment.session.is_forked:
            return  # of a child that only computes
        with attachment.undone_on_error():
            attachment.gradients.push_early(attachment.next_step, attachment.micro_step, index)

    def _held(self, tensors: Sequence[torch.Tensor]) -> dict[int, dict[str, Any]]:
        """State that is here and not in a daemon: of an unpickled optimizer."""
        return {
            index: self.state[tensor]
            for index, tensor in enumerate(tensors)
            if "step" in self.state.get(tensor, ())
        }

    def _has_state(self) -> bool:
        """Whether a parameter was updated, or has loaded state."""
        attachment = self._attachment
        if attachment is None:
            return False
        self._finish_interrupted(attachment)
        return any(attachment.arrays.fetch_step_counts(range(len(self._tensors()))))

    def _drop_held(self) -> None:
        info = optimizer_info(self.param_groups, self._settings.optimizer)
        keys = _torch_checkpoint.keys_of(info)
        for tensor in [key for key in self.state if isinstance(key, torch.Tensor)]:
            for key in keys:
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
        if self._attachment is not None:  # without a wait for a step that is under way
            self._steps_before += self._attachment.session.committed_step
        self._attachment, self._detached_because = None, because
        self._handed_over = None
        _remove_hooks(self._hooks)
        self._hooks = []
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

        Waits for the other ranks. When it raises because of a value that is wrong
        here (ValueError, TypeError), nothing has happened, and it can be taken again.
        When the daemon refuses (InvalidArgumentError, FailedPreconditionError),
        nothing of the step stays there, micro-steps neither, and it can be taken
        again from the first. So it can after UnavailableError and
        DeadlineExceededError, once the daemon is back: it attaches again by itself. If
        the step had been taken all the same, it is not taken twice: the next step()
        reads what came of it.

        Ctrl-C ends the wait for another rank with KeyboardInterrupt. The step is
        under way then: the next use of the optimizer waits for it to end and reads
        the parameters, and a next step() then takes another step. close() gives it
        up: it is not taken, unless the other ranks had all come.
        """
        self._check_graph_capture()
        try:
            return self._step(closure)
        except BaseException:
            # A GradScaler multiplies by what is left here when it takes the step again.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._handed_over = None
        attachment = self._prepared_attachment()
        attachment.fill_hyperparams(self.param_groups)
        grad_scale, found_inf = self._scaling(attachment)
        how = {
            "grad_scale": grad_scale,
            "max_norm": limit(self.max_norm, "max_norm"),
            "max_value": limit(self.max_value, "max_value"),
            "norm_type": checked_norm_type(self.norm_type),
            "found_inf": found_inf,
        }
        if attachment.was_taken:
            self._outcome = attachment.taken_outcome(**how)
            return loss
        # unscale_() changes gradients without a new version.
        was_unscaled = self._has_scaler() and getattr(self, "grad_scale", None) is None
        if was_unscaled and attachment.micro_step:
            raise RuntimeError(
                "unscale_() has unscaled the last micro-step alone: with accumulate_step(), leave"
                " unscaling to step(); now call abort_step() and take the step again"
            )
        overlap = self._settings.overlap
        step = attachment.next_step
        gradients = attachment.gradients.gather(anew=was_unscaled)
        with attachment.undone_on_error():
            attachment.gradients.push(step, attachment.micro_step, gradients)
            attachment.note_missing(gradients)
            idle = attachment.without_gradient
            attachment.committing = step
            self._outcome = attachment.session.commit(
                step,
                attachment.hyperparams,
                **how,
                read=attachment.parameters.direct(but=idle) if overlap else None,
            )
        attachment.micro_step = 0
        attachment.gradients.forget_pushed()
        if self._outcome.applied:
            attachment.parameters.read(without_gradient=idle, but_direct=overlap)
        attachment.committing = None
        return loss

    def accumulate_step(self) -> None:
        """Pushes the present gradients as one micro-step and drops them.

        The daemon adds up micro-steps in fp32; step() adds the gradients there
        are by then, if any, and updates with the sum. Needs ``accumulate=True``.
        zero_grad() leaves pushed micro-steps alone; abort_step() drops them.
        A GradScaler looks at the gradients of step() alone: with one, look at
        last_outcome.found_inf. Errors are as step()'s.

        With reduction="daemon" it waits until the other ranks have taken the
        micro-step as well. AbortedError: one of them was lost or has aborted, and
        what was summed of the step is gone; take it again from its first
        micro-step.
        """
        if not self._settings.accumulate:
            raise RuntimeError("accumulate_step needs an optimizer made with accumulate=True")
        attachment = self._prepared_attachment()
        if attachment.was_taken:  # step() will say so
            self.zero_grad(set_to_none=True)
            return
        gradients = attachment.gradients.gather()
        with attachment.undone_on_error():
            attachment.gradients.push(attachment.next_step, attachment.micro_step, gradients)
            # Also without a gradient: other ranks may have one, and wait.
            attachment.session.end_micro_step(attachment.next_step, attachment.micro_step)
        attachment.gradients.forget_pushed()
        attachment.note_missing(gradients)
        attachment.micro_step += 1
        self.zero_grad(set_to_none=True)

    def abort_step(self) -> None:
        """Drops the micro-steps that this rank pushed since the last step.

        With reduction="daemon" those of all ranks: each calls it.
        """
        attachment = self._attached()
        attachment.session.abort(attachment.next_step)
        attachment.gradients.forget_pushed()
        attachment.micro_step = 0

    def _prepared_attachment(self) -> Attachment:
        """Checks what the trainer may have changed, and sends it if need be."""
        attachment = self._attached()
        attachment.check_groups(self.param_groups)
        attachment.parameters.check_parameters(self.param_groups)
        if attachment.must_abort:
            attachment.abort_step()
        changed = attachment.parameters.changed()
        if changed or attachment.broken_load is not None:
            attachment.check_no_micro_steps("parameters were changed in place")
            attachment.load(self.param_groups, changed)
        return attachment

    def _has_scaler(self) -> bool:
        """Whether a GradScaler calls step()."""
        return getattr(self, "found_inf", None) is not None

    def _scaling(self, attachment: Attachment) -> tuple[float, bool]:
        """(grad_scale, found_inf): the daemon's scale, or what a GradScaler left."""
        if self._has_scaler() and attachment.gradient_divisor > 1:
            raise RuntimeError(
                'a GradScaler cannot be used with reduction="daemon" on several ranks: it looks at'
                " this rank's gradients alone, so that the ranks' scales would part. Use"
                " loss_scaler=optstate.LossScaler(...), which the ranks share"
            )
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        scale = attachment.session.loss_scale or 1.0
        if grad_scale is not None:
            scale = as_float(grad_scale)
        return (
            scale * attachment.gradient_divisor,
            found_inf is not None and as_float(found_inf) != 0,
        )

    @property
    def loss_scale(self) -> float:
        """What losses are to be multiplied by now; 1 without a loss_scaler."""
        return self._attached().session.loss_scale or 1.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times loss_scale, for backward(); step() unscales."""
        return loss * self.loss_scale

    def _check_graph_capture(self) -> None:
        check = getattr(self, "_accelerator_graph_capture_health_check", None)
        if check is None:  # its name in older torch
            check = self._cuda_graph_capture_health_check
        check()

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
            hyperparams_of(
                optimizer_info(self.param_groups, self._optimizer),
                self.param_groups[index],
                index,
            )
            if self._attachment is not None:
                self._extend(self._attachment)
        except BaseException:
            self.param_groups.pop()
            raise

    def _extend(self, old: Attachment) -> None:
        """Closes the session and opens one with all groups."""
        old_groups, groups = self.param_groups[:-1], self.param_groups
        self._finish_interrupted(old)
        old.check_no_micro_steps("add_param_group()")
        ranks = Ranks(self._process_group)
        error: Exception | None = None
        try:  # while nothing is given up yet
            old.parameters.check_parameters(old_groups)
            parameter_specs(groups, parameter_names(groups, self._names_by_id))
        except Exception as failure:
            error = failure
        ranks.agree(error)
        count = sum(len(group["params"]) for group in old_groups)
        extend_with = [*old.parameters.changed(), *range(count, len(self._tensors()))]
        if old.is_private:  # it ends with its last session: take its state along
            self._settings = self._present_settings()
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
