"""Reports of an optimizer on its job: names, steps, norms and memory."""

from __future__ import annotations

import dataclasses

from optstate._torch.gradients.norms import gradient_norms
from optstate._torch.job.memory_use import MemoryUse, memory_use
from optstate._torch.offload import OffloadTuner, set_fraction
from optstate._torch.served import Served
from optstate.session import StepOutcome


class Reports:
    """The part of ServedOptimizer that reports, and sets what is not an option of a step.

    Threads: one at a time, like the optimizer.
    """

    _served: Served

    def __repr__(self) -> str:
        """Returns torch's text with the job, its endpoint and its step."""
        served = getattr(self, "_served", None)
        attachment = served.attachment if served is not None else None
        if attachment is None:
            said = "job: none" if served is None else f"job: none, {served.detached_because}"
        else:
            session = attachment.session
            said = f"job: {attachment.job}\n    endpoint: {session.endpoint}"
            said += f"\n    step: {self._served.steps_before + session.committed_step}"
        begin, opened, rest = super().__repr__().partition("(\n")
        return f"{begin}{opened}    {said}\n{rest}"

    @property
    def committed_step(self) -> int:
        """The last step that the daemon has committed; 0 for a new job."""
        served = self._served
        if served.attachment is None:
            return served.steps_before
        served.finish_interrupted(served.attachment)
        return served.steps_before + served.attachment.session.committed_step

    @property
    def last_outcome(self) -> StepOutcome | None:
        """The outcome of this optimizer's last step; None before the first."""
        served = self._served
        if served.attachment is not None:
            served.finish_interrupted(served.attachment)
        return served.outcome

    @property
    def job(self) -> str | None:
        """Name of the job, also while it is asleep; None while not attached."""
        holder = self._served.attachment or self._served.asleep
        return holder.job if holder else None

    @property
    def endpoint(self) -> str | None:
        """The resolved endpoint of the daemon; None while not attached."""
        attachment = self._served.attachment
        return attachment.session.endpoint if attachment else None

    @property
    def wire(self) -> str | None:
        """The wire that carries gradients and parameters, shm or grpc; None while not attached."""
        attachment = self._served.attachment
        return attachment.session.wire if attachment else None

    def gradient_norms(self) -> dict[str, float]:
        """Returns the L2 norm of each parameter's gradient in the last step, by name.

        The norms are of the unscaled gradients before clipping, summed (and with
        reduction="daemon" averaged) over ranks and micro-steps. Parameters without a
        gradient are left out. Not collective. FailedPreconditionError before the first
        step, and after the daemon's engine was restarted.
        """
        return gradient_norms(self._served.attached())

    def memory(self) -> MemoryUse:
        """Returns where the memory is that torch's optimizer would hold in this process.

        Asks the daemon. Not collective. UnavailableError when the daemon does not answer.
        """
        attachment = self._served.attached()
        replaced = self._served.replaced
        return memory_use(attachment, 0 if replaced is None else replaced.held_bytes)

    def set_offload_fraction(self, fraction: float | str) -> None:
        """Changes offload_fraction, from the next step on, with the same bits; it is the job's,
        so one rank calls this. "auto": this rank searches for the fastest one in its next steps.

        Does what `optctl set job NAME offload_fraction=...` does, as the user who runs the
        script: the job's owner and the daemon's may. FailedPreconditionError: the daemon has no
        device, or this user may not. UnimplementedError: devices cannot update the optimizer.
        """
        attachment = self._served.attached()
        tunes = isinstance(fraction, str) and fraction == "auto"
        if not tunes:
            set_fraction(attachment, fraction)
        served = self._served
        served.settings = dataclasses.replace(served.settings, tunes_offload=tunes)
        attachment.tuner = OffloadTuner() if tunes else None
