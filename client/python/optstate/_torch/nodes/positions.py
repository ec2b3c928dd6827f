"""How far a node's job is, in the words in which nodes resolve it."""

from __future__ import annotations

from optstate._torch.nodes.resolution import Position, Step
from optstate.job_position import NodesNorm, find_position, noted_digest
from optstate.session_spec import SessionSpec


def position_of(spec: SessionSpec) -> Position | None:
    """Asks this rank's daemon how far the job is; None: it has none of this name."""
    found = find_position(spec)
    if found is None:
        return None
    prepared = None
    if found.prepared_step:
        norm, digest = None, found.prepared_digest
        if found.prepared_is_clipped:
            norm = NodesNorm(found.prepared_gradient_norm, found.prepared_clip_coefficient)
            digest = noted_digest(digest, norm)  # as it was before
        prepared = Step(
            found.prepared_step,
            digest,
            bool(found.prepared_found_inf),
            norm=norm,
            awaits_norm=bool(found.prepared_awaits_norm),
        )
    return Position(
        committed=Step(
            found.committed_step,
            found.digest,
            bool(found.found_inf),
            norm=NodesNorm(found.gradient_norm, found.clip_coefficient),
        ),
        prepared=prepared,
        loads_finished=found.loads_finished,
        durable_step=found.durable_step,
    )
