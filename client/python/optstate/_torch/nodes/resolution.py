"""What nodes do about a step whose decision some of them do not know: one pure function.

Every node is at a committed step and may have prepared the next one. A step is prepared by
engines, decided by the ranks of all nodes together, and taken by each engine as it is told. So
that nodes agree whoever died meanwhile, the same rule decides while ranks live and when others
attach after them; server/session/README.md has it as a table.

Digests are of what one node has prepared. Nodes that hold the same parameters (of one *kind*) have
equal digests of one step. Nodes that hold different shards do not, and nothing in a daemon's
files says that two of their steps belong together. What does is the order in which ranks act:
whoever attaches finds nothing prepared on any node, and ranks prepare a step again only after the
verdict to drop it has been brought (NodeAgreement.take). So steps of one number that are prepared,
or prepared here and committed there, are of one attempt.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Sequence


class Verdict(enum.IntEnum):
    """What becomes of a prepared step; values of the C API."""

    COMMIT = 1
    SKIP = 2
    ABORT = 3
    COMMIT_CLIPPED = 4  # with a norm of all nodes, which hold different parameters


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that was prepared or taken. digest 0: taken in one phase. alike: of a vote, what is
    equal on all nodes, whatever they hold."""

    step: int
    digest: int
    found_inf: bool = False
    alike: int = 0


@dataclasses.dataclass(frozen=True)
class Position:
    """How far one node's job is."""

    committed: Step
    prepared: Step | None = None
    loads_finished: int = 0
    durable_step: int = 0


class Unresolvable(Exception):
    """The nodes cannot go on together; the text says why, and how to go on."""


def decide(votes: Sequence[Step | None], kinds: Sequence[Hashable] | None = None) -> Verdict:
    """Returns what all do with a step that each rank's node has prepared, or taken already, or
    (None) could not prepare.

    kinds: of each vote; digests are equal within a kind. None: all are of one.
    """
    first = votes[0]
    digests: dict[Hashable, int] = {}
    for index, vote in enumerate(votes):
        if first is None or vote is None:
            return Verdict.ABORT
        kind = kinds[index] if kinds is not None else 0
        if (vote.step, vote.alike) != (first.step, first.alike):
            return Verdict.ABORT
        if digests.setdefault(kind, vote.digest) != vote.digest:
            return Verdict.ABORT
    return Verdict.SKIP if any(vote and vote.found_inf for vote in votes) else Verdict.COMMIT


def resolve(
    positions: Sequence[Position | None],
    names: Sequence[str],
    kinds: Sequence[Hashable] | None = None,
) -> dict[int, Verdict]:
    """Returns, by node, the verdict that its prepared step gets now. Empty: all are at the same
    step, and none is prepared. Ask for the positions again after the verdicts are brought.

    positions: by node; None: it has no such job. kinds: of each node, as for decide().
    Unresolvable: the nodes are at different steps and none can catch up.
    """
    if all(position is None for position in positions):
        return {}
    kinds = kinds if kinds is not None else [0] * len(positions)
    there = [position or Position(Step(0, 0)) for position in positions]
    latest = max(position.committed.step for position in there)
    ahead: dict[Hashable, Step] = {}
    for kind, position in zip(kinds, there):
        if position.committed.step == latest:
            ahead.setdefault(kind, position.committed)
    was_skipped = any(step.found_inf for step in ahead.values())
    behind = [node for node, p in enumerate(there) if p.committed.step < latest]
    verdicts: dict[int, Verdict] = {}
    for node in behind:
        prepared = there[node].prepared
        if prepared is None or prepared.step != latest:
            raise Unresolvable(_describe(there, positions, names, latest))
        if kinds[node] in ahead and prepared.digest != ahead[kinds[node]].digest:
            raise Unresolvable(_describe(there, positions, names, latest))
        verdicts[node] = Verdict.SKIP if was_skipped else Verdict.COMMIT
    if behind:
        return verdicts
    if any(p.committed.digest != ahead[kind].digest for kind, p in zip(kinds, there)):
        raise Unresolvable(_describe(there, positions, names, latest))
    # All nodes take a step in two phases and skip it alike, or these are jobs of several runs.
    if len({(step.digest == 0, step.found_inf) for step in ahead.values()}) > 1:
        raise Unresolvable(_describe(there, positions, names, latest))
    waiting = {node: p.prepared for node, p in enumerate(there) if p.prepared is not None}
    if waiting:
        verdict = decide([p.prepared for p in there], kinds)
        return dict.fromkeys(waiting, verdict)
    # Where nothing is loaded yet, the ranks are going to load.
    loads = {p.loads_finished for p in there}
    if len(loads) > 1 and (latest or 0 not in loads):
        raise Unresolvable(
            _describe(there, positions, names, latest)
            + ": a load of state has ended on some nodes alone"
        )
    return {}


def _describe(
    there: Sequence[Position],
    positions: Sequence[Position | None],
    names: Sequence[str],
    latest: int,
) -> str:
    said = []
    for name, position, asked in zip(names, there, positions):
        text = f"step {position.committed.step}" if asked else "no such job"
        if position.prepared is not None:
            text += f", step {position.prepared.step} prepared"
        if position.durable_step:
            text += f", durable step {position.durable_step}"
        said.append(f"{name}: {text}, {position.loads_finished} loads")
    least = min(position.committed.step for position in there)
    return (
        f"the nodes of the job are not at one step ({'; '.join(said)}), and none has what the"
        f" others lack. Delete the job on all nodes (optctl delete job) and begin it again from a"
        f" checkpoint; all nodes had step {least}, and the last one was {latest}"
    )
