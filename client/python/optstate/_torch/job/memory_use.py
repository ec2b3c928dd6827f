"""Reports where training's memory is: in the daemon, shared with it, or the trainer's own."""

from __future__ import annotations

from typing import NamedTuple

from optstate import _optctl
from optstate._torch.job.attachment import Attachment

# Name of the array in `describe job` that is not optimizer state.
_PARAMETERS = "parameters"


class MemoryUse(NamedTuple):
    """Sizes in bytes. With torch's own optimizer, each rank holds all of this memory itself."""

    # In the daemon, once for all ranks: masters, moments, sums of micro-steps, and what the
    # daemon needs to continue after a crash.
    state: int
    parameters: int  # in the daemon, once for all ranks
    views: int  # parameters that this process has as views, and not a second time
    copies: int  # parameters that this process holds as copies
    gradients: int  # this rank's gradient area, in memory shared with the daemon
    replaced: int  # parameters replaced by attaching, held by this process until the first step
    gradient_views: int  # gradients in that area, which this process does not hold a second time
    # No size: whether gradients become such views in backward(). Otherwise step() copies them.
    makes_gradient_views: bool


def memory_use(attachment: Attachment, replaced: int) -> MemoryUse:
    """Returns the memory use of an attachment; UnavailableError if the daemon does not answer."""
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
        gradient_views=attachment.gradients.view_bytes,
        makes_gradient_views=attachment.gradients.makes_views,
    )
