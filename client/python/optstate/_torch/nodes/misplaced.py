"""Jobs of a norm_group whose ranks have started on other nodes than those where the state lies.

A job without across_nodes= is on the node of its ranks alone. Where launchers give ranks other
nodes than in the run before, each rank's daemon has no job of its name, and would begin a new one.
The daemon that has it is another rank's of the group, which can be asked before anything is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from optstate import errors
from optstate._torch.nodes.copy_note import has_nothing
from optstate._torch.nodes.positions import position_of
from optstate._torch.nodes.resolution import Position
from optstate.session_spec import SessionSpec

# Jobs that an error names; the others are counted.
_NAMED_MAX = 4


class _Unit(NamedTuple):
    """A job's part on one node."""

    job: str
    node: str
    is_there: bool  # or cannot be on another node


def refuse_misplaced(
    on_first: Callable[[Callable[[], Any]], list[Any]],
    spec: SessionSpec,
    node: str,
    position: Callable[[], Position | None],
    *,
    is_embedded: bool,
) -> None:
    """Raises FailedPreconditionError, on all ranks, when a job that none of its own nodes has lies
    on another node of the group. Collective; nothing is made before.

    on_first: as NodeAgreement.on_first(). position: of this rank's job on this node. is_embedded:
    this rank's daemon begins with its session, so that it has nothing yet.
    """
    units: Sequence[_Unit] = on_first(
        lambda: _Unit(spec.job, node, is_embedded or _has_state(position()))
    )
    there = {unit.job for unit in units if unit.is_there}
    nodes_of: dict[str, list[str]] = {}
    for unit in units:
        if unit.job not in there:
            nodes_of.setdefault(unit.job, []).append(unit.node)
    if not nodes_of:
        return
    found = on_first(lambda: {} if is_embedded else _steps_here(spec, nodes_of))
    misplaced: dict[str, tuple[str, int]] = {}
    for unit, steps in zip(units, found):
        for job, step in steps.items():
            if job not in misplaced or misplaced[job][1] < step:
                misplaced[job] = unit.node, step
    if misplaced:
        raise errors.FailedPreconditionError(_describe(misplaced, nodes_of))


def _has_state(position: Position | None) -> bool:
    return position is not None and not has_nothing(position)


def _steps_here(spec: SessionSpec, jobs: Collection[str]) -> dict[str, int]:
    """Returns the steps of those jobs that this rank's daemon has, and that are this user's."""
    steps: dict[str, int] = {}
    for job in jobs:
        try:
            position = position_of(dataclasses.replace(spec, job=job))
        except errors.PermissionDeniedError:  # another user's, which only has the same name
            continue
        if position is not None and not has_nothing(position):
            steps[job] = position.committed.step
    return steps


def _describe(misplaced: dict[str, tuple[str, int]], nodes_of: dict[str, list[str]]) -> str:
    said = [
        f'job "{job}" lies on node {node} at step {step}, and its ranks are on'
        f" {', '.join(nodes_of[job])} now, which has no such job"
        for job, (node, step) in sorted(misplaced.items())
    ]
    left_out = len(said) - _NAMED_MAX
    more = f"; and {left_out} more" if left_out > 0 else ""
    job, (node, _) = min(misplaced.items())
    return (
        f"jobs of norm_group are on other nodes than their ranks: {'; '.join(said[:_NAMED_MAX])}"
        f"{more}. Nothing is made, because a new job would begin at step 0 there. Start each rank"
        " on the node where its job lies (torchrun places ranks by --node-rank only with"
        " --master-addr, without --rdzv-backend c10d). To begin anew, delete the former job there"
        f" (on {node}: optctl delete job {job}), or give all jobs of the group other names"
    )
