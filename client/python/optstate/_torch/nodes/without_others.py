"""A prepared step of a job whose ranks have started without those of the other jobs.

When its ranks died, the job may have been one of several that clip by one norm (norm_group), which
its ranks do not know now. Its daemon does: such a step waits for the norm, and is committed only
once that is noted (CommitRequest.awaits_norm). So no job and no node has applied a step whose norm
nobody has noted (one that found Inf or NaN may have skipped it), and ranks that still live cannot
do so once it is dropped: a noted step has another digest. Where one node has noted the norm, other
jobs may have taken the step, and all nodes clip it by that norm.
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
    lacking = [node for node, step in commits.items() if step.awaits_norm and step.norm is None]
    if not lacking:
        return verdicts
    if any(step.norm is not None for step in commits.values()):
        return dict.fromkeys(lacking, Verdict.CLIP)
    if says:
        logger.warning(
            'step %d of job "%s" was prepared to be clipped by the norm of several jobs, which is'
            " not noted: it is dropped, and is to be taken again",
            commits[lacking[0]].step,
            job,
        )
    return {**verdicts, **dict.fromkeys(commits, Verdict.ABORT)}
