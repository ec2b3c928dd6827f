"""Announcements of an optimizer that attaches to its job: a log message, and warnings."""

from __future__ import annotations

import logging
import os
import warnings

from optstate._torch.job.attachment import Attachment

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
    gradients = "become views" if attachment.gradients.makes_views else "are copied"
    if attachment.session.created:
        logger.info(
            "%s is new: %d parameters and their state, %s; gradients %s",
            where,
            count,
            kept,
            gradients,
        )
    elif step > 0 and overwritten:
        logger.warning(
            "%s goes on: training begins with the parameters of step %d, and %d of %d parameters"
            " had other values in this script, which are overwritten. For a fresh run delete the"
            " job (optctl delete job %s) or use another name; gradients %s",
            where,
            step,
            overwritten,
            count,
            attachment.job,
            gradients,
        )
    else:
        logger.info(
            "%s is attached again at step %d: %d parameters; gradients %s",
            where,
            step,
            count,
            gradients,
        )


def warn_if_embedded(attachment: Attachment) -> None:
    """Warns that a named job, which the user expects to find again, ends with this process."""
    chose = attachment.chose_endpoint or os.environ.get("OPTSTATE_ENDPOINT")
    if attachment.is_private or chose or not attachment.is_first_rank:
        return
    if attachment.is_embedded:
        warnings.warn(
            f'no daemon runs on this node: job "{attachment.job}" is in a private one, which ends'
            " with this process, and the job with it. Start optstated to keep it, or say"
            ' endpoint="embedded"',
            stacklevel=5,
        )


def warn_of_places(attachment: Attachment, alike: tuple[str, str] | None) -> None:
    """Warns that a re-attached job without names exchanges weights if their order changed."""
    if alike is None or not attachment.is_first_rank:
        return
    warnings.warn(
        f'job "{attachment.job}" goes on at step {attachment.session.committed_step} with'
        f' parameters that have no names: "{alike[0]}" and "{alike[1]}" are alike in shape and'
        " dtype, and if they are in another order than in the script that began the job, their"
        " values change places. Give names (model=model, or model.named_parameters() in place of"
        " parameters()) from the job's beginning on",
        stacklevel=5,
    )
