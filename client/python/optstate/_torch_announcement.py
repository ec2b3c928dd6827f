"""The log message that an optimizer writes once, when it attaches to its job."""

from __future__ import annotations

import logging

from optstate._torch_attachment import Attachment

logger = logging.getLogger("optstate")


def announce(attachment: Attachment, overwritten: int) -> None:
    """Logs, on rank 0, what the optimizer attached to.

    `overwritten`: number of the script's parameters whose values differed from the job's.
    """
    if not attachment.is_first_rank:
        return
    count = attachment.parameters.count
    where = f'job "{attachment.job}" of the daemon at {attachment.session.endpoint}'
    kept = (
        "which ends with this optimizer" if attachment.is_private else "which stays in the daemon"
    )
    if attachment.is_embedded:
        kept = "which ends with this process, as its private daemon does"
    step = attachment.session.committed_step
    if attachment.session.created:
        logger.info("%s is new: %d parameters and their state, %s", where, count, kept)
    elif step > 0 and overwritten:
        logger.warning(
            "%s goes on: training begins with the parameters of step %d, and %d of %d parameters"
            " had other values in this script, which are overwritten. For a fresh run delete the"
            " job (optctl delete job %s) or use another name",
            where,
            step,
            overwritten,
            count,
            attachment.job,
        )
    else:
        logger.info("%s is attached again at step %d: %d parameters", where, step, count)
