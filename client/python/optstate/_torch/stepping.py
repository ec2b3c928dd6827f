"""Takes, accumulates and aborts steps of the optimizers of optstate."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import torch

from optstate._torch.collective.averaging import check_same_place, reduce_gradients
from optstate._torch.collective.reduced import forget_reduced
from optstate._torch.frozen import check_thawed_alike
from optstate._torch.gradients.gathered import Gradients
from optstate._torch.initialization import is_initialization
from optstate._torch.job.attachment import Attachment
from optstate._torch.joining import Joining
from optstate._torch.nodes.together import interrupts_afterwards
from optstate._torch.optimizer_info import as_float
from optstate._torch.options import checked_norm_type, limit
from optstate._torch.served import Served
from optstate._torch.shared import Shared
from optstate._torch.tensors import dtype_of
from optstate._torch.warn import warn
from optstate._torch.zero_options import veto
from optstate.session import StepOutcome


class Stepping(Joining):
    """The part of ServedOptimizer that takes steps.

    Threads: one at a time, like the optimizer.
    """

    _served: Served
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    # A GradScaler sets these for step(), and deletes them after it.
    grad_scale = Shared()
    found_inf = Shared()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Returns whether a GradScaler leaves unscaling, and skipping, to step().

        It does for a fused step, as in torch: else the scaler unscales before, and code that
        clips or reads gradients (Lightning refuses to clip otherwise) sees them unscaled. A
        scaler cannot unscale gradients that are in the daemon before step() is called, nor
        float16 gradients, and must not unscale where step() refuses a scaler.
        """
        settings, attachment = self._served.settings, self._served.attachment
        tensors = () if attachment is None else attachment.parameters.tensors
        return bool(
            self.defaults.get("fused")
            or settings.overlap
            or settings.accumulate
            or settings.reduction != "trainer"
            or settings.loss_scaler is not None
            or settings.in_norm_group
            or self._is_inside_join
            or torch.float16 in map(dtype_of, tensors)
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _: bool) -> None:
        """Ignores the assignment that torch's constructors make for a fused step."""

    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one optimization step in the daemon; returns the closure's loss.

        Waits for the other ranks. When it raises because of a value that is wrong
        here (ValueError, TypeError), nothing has happened, and the step can be taken
        again. When the daemon refuses (InvalidArgumentError, FailedPreconditionError),
        nothing of the step stays there, not even its micro-steps, and it can be taken
        again from the first micro-step. The same holds after UnavailableError and
        DeadlineExceededError, once the daemon is back: the optimizer attaches again by
        itself. If the step was committed all the same, it is not taken twice: the next
        step() reads its result.

        Ctrl-C ends the wait for another rank with KeyboardInterrupt. The step is then
        still under way: the next use of the optimizer waits for the step to end and
        reads the parameters, and the next step() takes another step. close() abandons
        the step: it is not taken, unless all other ranks have committed it.
        """
        self._check_graph_capture()
        try:
            return self._step(closure)
        except BaseException:
            # When it takes the step again, a GradScaler multiplies by a grad_scale left here.
            served = self._served
            served.__dict__.pop("grad_scale", None)
            served.__dict__.pop("found_inf", None)
            raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        served = self._served
        if is_initialization(self.param_groups) and not served.has_state():
            served.attached().is_initialised = True  # nothing else happens
            return loss
        served.handed_over = None
        self._meet(served.attached(), has_scaler=self._has_scaler())
        attachment, groups = self._prepared_attachment()
        attachment.options.fill(groups, attachment.parameters.groups)
        grad_scale, found_inf = self._scaling(attachment)
        how = {
            "grad_scale": grad_scale,
            "max_norm": limit(served.max_norm, "max_norm"),
            "max_value": limit(served.max_value, "max_value"),
            "norm_type": checked_norm_type(served.norm_type),
            "found_inf": found_inf,
        }
        said = veto(how["max_norm"], attachment.session.loss_scale) if served.says_vetoes else None
        if said is not None:
            served.says_vetoes = False
            warn(said)
        if attachment.nodes is not None:
            scale, options = attachment.session.loss_scale, attachment.options
            how = attachment.nodes.note_options(options.hyperparams, scale, how)
        if attachment.was_taken:
            served.note_outcome(attachment.taken_outcome(**how))
            return loss
        # unscale_() changes gradients without a new version.
        was_unscaled = self._has_scaler() and self._left_by_scaler("grad_scale") is None
        if was_unscaled and attachment.micro_step:
            raise RuntimeError(
                "unscale_() has unscaled the last micro-step alone: with accumulate_step(), leave"
                " unscaling to step(); now call abort_step() and take the step again"
            )
        overlap = served.settings.overlap
        self._reduce(attachment, is_last=True)
        gather = functools.partial(attachment.gradients.gather, anew=was_unscaled)
        # Several nodes are told of an error in the vote. On one node an error leaves the
        # micro-steps that were pushed.
        gradients = gather() if attachment.nodes is None else None
        with attachment.values_of_one_step():
            with attachment.undone_on_error():
                outcome = attachment.take_step(
                    functools.partial(self._push_and_commit, attachment, gradients, gather, **how)
                )
                served.note_outcome(outcome)
            attachment.micro_step = 0
            attachment.gradients.forget_pushed()
            forget_reduced(attachment.parameters.tensors)
            if outcome.applied:
                idle = attachment.without_gradient
                attachment.parameters.read(without_gradient=idle, but_direct=overlap)
            # A rank that learns only later how the step ended gives values away as well: so all
            # do after each step, and Ctrl-C waits until it is done.
            with interrupts_afterwards():
                attachment.spread()
                attachment.committing = None
        if attachment.tuner is not None:
            attachment.tuner.note(attachment, outcome)
        return loss

    def _push_and_commit(
        self,
        attachment: Attachment,
        gradients: Gradients | None,
        gather: Callable[[], Gradients],
        **how: Any,
    ) -> StepOutcome:
        if gradients is None:
            gradients = gather()
        step = attachment.next_step
        attachment.gradients.push(step, attachment.micro_step, gradients)
        attachment.note_missing(gradients)
        idle = attachment.without_gradient
        if attachment.nodes is not None and attachment.shared_out is not None:
            attachment.nodes.note_alike(attachment.shared_out.cut_among(idle))
        attachment.committing = step
        if idle and attachment.ranks.world_size > 1:
            attachment.parameters.note_idle(idle)
        overlap = self._served.settings.overlap
        return attachment.session.commit(
            step,
            attachment.options.hyperparams,
            **how,
            read=attachment.parameters.early(but=idle) if overlap else None,
        )

    def accumulate_step(self) -> None:
        """Pushes the present gradients as one micro-step and drops them.

        The daemon sums micro-steps in fp32; step() adds the gradients that exist
        then, if any, and updates with the sum. Needs ``accumulate=True``.
        zero_grad() leaves pushed micro-steps alone; abort_step() drops them.
        A GradScaler checks only the gradients of step(): with one, check
        last_outcome.found_inf. Raises the errors of step().

        With reduction="daemon" it waits until the other ranks have taken the
        micro-step as well. AbortedError: another rank was lost or has aborted, and
        the sums of the step are gone; take the step again from its first
        micro-step.
        """
        if not self._served.settings.accumulate:
            raise RuntimeError("accumulate_step needs an optimizer made with accumulate=True")
        attachment, _ = self._prepared_attachment(is_micro_step=True)
        if attachment.was_taken:  # step() reports it
            self.zero_grad(set_to_none=True)
            return
        self._reduce(attachment, is_last=False)
        gradients = attachment.gradients.gather()
        with attachment.undone_on_error():
            attachment.gradients.push(attachment.next_step, attachment.micro_step, gradients)
            # A rank without gradients participates too: other ranks may have some, and wait.
            attachment.session.end_micro_step(attachment.next_step, attachment.micro_step)
        attachment.gradients.forget_pushed()
        forget_reduced(attachment.parameters.tensors)
        attachment.note_missing(gradients)
        attachment.micro_step += 1
        self.zero_grad(set_to_none=True)

    def abort_step(self) -> None:
        """Drops the micro-steps that this rank pushed since the last step.

        With reduction="daemon" it drops those of all ranks: every rank calls it.
        """
        attachment = self._served.attached()
        attachment.session.abort(attachment.next_step)
        attachment.gradients.forget_pushed()
        attachment.micro_step = 0

    def _prepared_attachment(
        self, *, is_micro_step: bool = False
    ) -> tuple[Attachment, Sequence[dict[str, Any]]]:
        """Checks what the trainer may have changed, and sends changes. Returns the attachment
        and the groups in the job's order."""
        attachment = self._served.attached()
        thawed = attachment.parameters.groups.thawed()
        if thawed:
            check_thawed_alike(attachment.ranks.world_size, thawed)
            attachment = self._served.thaw(thawed)
        if attachment.parameters.groups.left_out:
            attachment.options.check_required(self.param_groups)
        groups = attachment.parameters.groups.in_order(self.param_groups)
        attachment.options.check_groups(groups)
        attachment.parameters.check_tensors()
        if attachment.shared_out is not None:
            attachment.shared_out.check_shapes()
        if attachment.must_abort:
            attachment.abort_step()
        if attachment.shared_out is not None and attachment.nodes is not None:
            # take() compares with the others, who may be waiting for this node's parameters.
            attachment.nodes.check_decided(attachment.session, spreads=True)
        if attachment.was_taken and attachment.is_sharded:
            # The others have ended this step, and do not meet again. What the script has written is
            # sent before the next one.
            return attachment, groups
        with attachment.undone_on_error():
            attachment.gradients.finish_early(attachment.next_step, attachment.micro_step)
        # Changes without a trace can be sent before the first micro-step, and the step refuses
        # them after later ones: there is no need to look for them before each micro-step.
        by_content = not is_micro_step or attachment.micro_step == 0
        self._served.send_changes(attachment, groups, by_content=by_content)
        self._served.replaced = None
        return attachment, groups

    def _reduce(self, attachment: Attachment, *, is_last: bool) -> None:
        settings = self._served.settings
        if settings.reduction == "collective":
            shared_out = attachment.shared_out
            destinations = None if shared_out is None else shared_out.destinations()
            attachment.feedback.loss_scale = attachment.session.loss_scale or 1.0
            error = None
            try:
                attachment.gradients.check()
            except Exception as failure:
                # The others wait for this rank in the process group. Where nothing comes before
                # that in which the ranks meet, its next try finds them there.
                if not attachment.is_sharded:
                    raise
                error = failure
            step, micro_step = attachment.next_step, attachment.micro_step
            check_same_place(attachment.ranks, step, micro_step, is_last=is_last, error=error)
            reduce_gradients(
                attachment.ranks,
                attachment.parameters.tensors,
                destinations,
                settings.reducing,
                attachment.feedback,
                continues=micro_step > 0,
            )

    def _left_by_scaler(self, name: str) -> Any:
        return self._served.__dict__.get(name)

    def _has_scaler(self) -> bool:
        """Returns whether a GradScaler calls step()."""
        return self._left_by_scaler("found_inf") is not None

    def _scaling(self, attachment: Attachment) -> tuple[float, bool]:
        """Returns (grad_scale, found_inf): the daemon's scale, or values set by a GradScaler."""
        settings = self._served.settings
        has_own_gradients = settings.reduction != "trainer" and attachment.ranks.world_size > 1
        if self._has_scaler() and has_own_gradients:
            given = "=".join(settings.reduction_as_given)
            raise RuntimeError(
                f"a GradScaler cannot be used with {given} on several ranks: it looks at"
                " this rank's gradients alone, so that the ranks' scales would part. Use"
                " loss_scaler=optstate.LossScaler(...), which the ranks share"
            )
        if self._has_scaler() and attachment.nodes is not None and attachment.nodes.spans_jobs:
            raise RuntimeError(
                "a GradScaler cannot be used with norm_group: it looks at this rank's gradients"
                " alone, so that the jobs' scales would part. Use"
                " loss_scaler=optstate.LossScaler(...), whose jobs skip steps together"
            )
        if self._has_scaler() and attachment.session.loss_scale:
            raise RuntimeError(
                "a GradScaler is used with an optimizer that has a loss_scaler: both would unscale"
                " the gradients. Use optimizer.scale(loss).backward() and optimizer.step() without"
                " the GradScaler, or construct the optimizer without loss_scaler="
            )
        grad_scale = self._left_by_scaler("grad_scale")
        found_inf = self._left_by_scaler("found_inf")
        scale = attachment.session.loss_scale or 1.0
        if grad_scale is not None:
            scale = as_float(grad_scale)
        return (
            scale * attachment.gradient_divisor,
            found_inf is not None and as_float(found_inf) != 0,
        )

    @property
    def loss_scale(self) -> float:
        """The factor by which losses are to be multiplied now; 1 without a loss_scaler."""
        return self._served.attached().session.loss_scale or 1.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss times loss_scale, for backward(); step() unscales."""
        return loss * self.loss_scale

    def _check_graph_capture(self) -> None:
        check = getattr(self, "_accelerator_graph_capture_health_check", None)
        if check is None:  # the check has another name in older torch
            check = self._cuda_graph_capture_health_check
        check()
