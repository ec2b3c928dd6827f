"""Where the memory of training is: in the daemon, shared with it, or the trainer's own."""

from __future__ import annotations

from typing import NamedTuple

from optstate import _optctl
from optstate._torch_attachment import Attachment

# An array of describe job that is no state of the optimizer's.
_PARAMETERS = "parameters"


class MemoryUse(NamedTuple):
    """Bytes. A trainer with torch's own optimizer holds all of them itself, in each rank."""

    # In the daemon, once for all ranks: masters, moments, sums of micro-steps, and what it takes
    # to go on after a crash.
    state: int
    parameters: int  # in the daemon, once for all ranks
    views: int  # of the parameters: what this process has as views, and not a second time
    copies: int  # of the parameters: what this process holds as copies
    gradients: int  # this rank's gradient area, in memory that it shares with the daemon
    replaced: int  # what attaching replaced, held by this process until the first step


def memory_use(attachment: Attachment, replaced: int) -> MemoryUse:
    """UnavailableError when the daemon does not answer."""
    session = attachment.session
    session.refuse_fork()
    described = _optctl.ask(session.endpoint, "describe", "job", attachment.job)
    job = described.get("job", described)
    arrays = {each["name"]: int(each.get("bytes", 0)) for each in job.get("arrays", [])}
    views, copies = attachment.parameters.bytes_of_views_and_copies()
    return MemoryUse(
        state=sum(size for name, size in arrays.items() if name != _PARAMETERS),
        parameters=views + copies,
        views=views,
        copies=copies,
        gradients=attachment.gradients.area_bytes,
        replaced=replaced,
    )
