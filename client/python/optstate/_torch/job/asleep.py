"""Facts that an optimizer keeps of its job while that is asleep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from optstate._torch.job.attachment import Attachment
from optstate._torch.names import quoted
from optstate._torch.parameters.group_order import GroupOrder
from optstate._torch.tensors import bits_sum
from optstate.job_sleep import JobSleep


def _sums(attachment: Attachment) -> list[int]:
    """Returns sums of the bits of the job's parameters, wherever the trainer's are."""
    values = attachment.parameters.daemon_values
    return [bits_sum(values(index)) for index in range(attachment.parameters.count)]


@dataclasses.dataclass
class Asleep:
    """A job that an optimizer has left to give its memory back, and attaches to again."""

    job: str
    endpoint: str
    order: GroupOrder
    committed_step: int
    sums: Sequence[int]  # of its parameters' bits
    own_state: dict[Any, Any]  # the user's own keys of optimizer.state
    is_initialised: bool
    # None: it is not known whether it sleeps by now.
    slept: JobSleep | None = None

    @classmethod
    def of(cls, attachment: Attachment, own_state: dict[Any, Any]) -> Asleep:
        return cls(
            job=attachment.job,
            endpoint=attachment.session.endpoint,
            order=attachment.parameters.groups,
            committed_step=attachment.session.committed_step,
            sums=_sums(attachment),
            own_state=own_state,
            is_initialised=attachment.is_initialised,
        )

    @property
    def created_at_ns(self) -> int:
        return 0 if self.slept is None else self.slept.created_at_ns

    def problem_with(self, attachment: Attachment) -> str | None:
        """Returns why this is not the job that was left; None: it is."""
        if attachment.session.created:
            return (
                f'job "{self.job}" was deleted while it was asleep, and its state with it; a new'
                f" one of its name was made just now (optctl delete job {self.job})"
            )
        step = attachment.session.committed_step
        if step != self.committed_step:
            return (
                f'job "{self.job}" was left at step {self.committed_step} and is at step {step}:'
                " somebody has woken it, and it has gone on since"
            )
        now = _sums(attachment)
        others = [attachment.arrays.name(i) for i, was in enumerate(self.sums) if now[i] != was]
        if not others:
            return None
        return (
            f'job "{self.job}" has other values of parameters {quoted(others)} than when it was'
            " left: somebody has woken it, and has loaded others"
        )
