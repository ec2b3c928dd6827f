"""A prepared step of a job whose ranks have started without those of the other jobs.

When its ranks died, the job may have been one of several that clip by one norm (norm_group), or one
whose nodes all hold the same (across_nodes="replicated"). Nothing in the daemons' files tells
which, but two facts do. Where a node has noted a norm, that is the norm of several jobs, which may
have taken the step. Where a node has clipped the step by its own norm, there are no other jobs:
those of a norm_group leave that to the group.

A step of which neither is known must not be committed by a node that is the only one to have the
job: it would take it by a norm of its own. Other jobs cannot have taken it, since no norm is noted.
Other nodes can, and are refused then when they come back, as they are in any case when this one has
gone on without them. Where several nodes have the job, all of which have prepared the step, a rank
that still lives may be about to commit it, so that none may drop it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from optstate._torch.nodes.resolution import Position, Verdict

logger = logging.getLogger("optstate")


def settled_without_others(
    job: str,
    verdicts: dict[int, Verdict],
    positions: Sequence[Position | None],
    *,
    says: bool = False,
) -> dict[int, Verdict]:
    """Returns what becomes of verdicts, by node, that are of a job by itself.

    says: a step that is dropped is logged.
    """
    commits = {
        node: position.prepared
        for node, position in enumerate(positions)
        if verdicts.get(node) is Verdict.COMMIT and position is not None and position.prepared
    }
    unnoted = [node for node, step in commits.items() if step.norm is None]
    if len(unnoted) < len(commits):
        return dict.fromkeys(unnoted, Verdict.CLIP) or verdicts
    present = sum(position is not None for position in positions)
    if present != 1 or all(step.is_clipped_here for step in commits.values()):
        return verdicts
    [(node, step)] = commits.items()
    if says:
        logger.warning(
            'step %d of job "%s" was prepared, and what other jobs or nodes decided about it is not'
            " known here: it is dropped, and is to be taken again",
            step.step,
            job,
        )
    return {node: Verdict.ABORT}
