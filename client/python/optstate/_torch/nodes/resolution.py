"""Nodes resolve a step whose decision some of them do not know: by one pure function.

Every node is at a committed step and may have prepared the next one. A step is prepared by
engines, decided by the ranks of all nodes together, and taken by each engine as it is told. So
that nodes agree whoever died meanwhile, the same rule decides while ranks live and when others
attach after them; server/session/README.md has it as a table.

Nodes of which each has only a part of the parameters know the norm of all gradients only together.
They take a step in one round more: when all have prepared it, every node notes that norm (CLIP),
and only when all nodes have noted it do they commit. So a step that no node has noted can be
committed nowhere, and is dropped; one that some node has noted has its norm in that node's files.
A noted step has another digest (noted_digest), so that a verdict to drop what was not noted comes
too late for it.

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

from optstate.job_position import NodesNorm, noted_digest


class Verdict(enum.IntEnum):
    """The verdict about a prepared step; values of the C API."""

    COMMIT = 1
    SKIP = 2
    ABORT = 3
    CLIP = 5  # it stays prepared, and has the norm of all nodes from now on


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that was prepared or taken. digest 0: taken in one phase. alike: of a vote, what is
    equal on all nodes of the job, whatever they hold. clip: of a vote, what is equal in all jobs
    that take the step together."""

    step: int
    digest: int
    found_inf: bool = False
    alike: int = 0
    # The norm of all nodes, where they hold different parameters; None: not noted. The digest of
    # a prepared step is that from before, the one of a committed step from after.
    norm: NodesNorm | None = None
    clip: tuple[int, ...] = ()
    # A prepared step that its daemon commits only once the norm of all nodes is noted.
    awaits_norm: bool = False

    @property
    def is_begun(self) -> bool:
        """Whether a job can have begun after this committed step: with the state of another one,
        or at step 0. Its daemon has it as a step of one phase without gradients."""
        norm = 0.0 if self.norm is None else self.norm.gradient_norm
        return self.digest == 0 and (self.step == 0 or (not self.found_inf and norm == 0))


@dataclasses.dataclass(frozen=True)
class Position:
    """How far one node's job is."""

    committed: Step
    prepared: Step | None = None
    loads_finished: int = 0
    durable_step: int = 0


class Unresolvable(Exception):
    """The nodes cannot go on together; the text says why, and how to go on."""


def decide(
    votes: Sequence[Step | None],
    kinds: Sequence[Hashable] | None = None,
    jobs: Sequence[Hashable] | None = None,
) -> Verdict:
    """Returns what all do with a step that each rank's node has prepared, or taken already, or
    (None) could not prepare.

    kinds, jobs: of each vote; digests are equal within a kind, and what is alike within a job.
    None: all are of one.
    """
    first = votes[0]
    digests: dict[Hashable, int] = {}
    alike: dict[Hashable, int] = {}
    for index, vote in enumerate(votes):
        if first is None or vote is None:
            return Verdict.ABORT
        kind = kinds[index] if kinds is not None else 0
        job = jobs[index] if jobs is not None else 0
        if (vote.step, vote.clip) != (first.step, first.clip):
            return Verdict.ABORT
        if alike.setdefault(job, vote.alike) != vote.alike:
            return Verdict.ABORT
        if digests.setdefault(kind, vote.digest) != vote.digest:
            return Verdict.ABORT
    return Verdict.SKIP if any(vote and vote.found_inf for vote in votes) else Verdict.COMMIT


def resolve(
    positions: Sequence[Position | None],
    names: Sequence[str],
    kinds: Sequence[Hashable] | None = None,
    jobs: Sequence[Hashable] | None = None,
) -> dict[int, Verdict]:
    """Returns, by node, the verdict that its prepared step gets now. Empty: all are at the same
    step, and none is prepared. Ask for the positions again after the verdicts are brought. The
    norm of CLIP is noted_norm().

    positions: by node; None: it has no such job. kinds, jobs: of each node, as for decide(). Jobs
    that take their steps together load by themselves, so that loads are compared within a job.
    Unresolvable: the nodes are at different steps and none can catch up.
    """
    if all(position is None for position in positions):
        return {}
    kinds = kinds if kinds is not None else [0] * len(positions)
    there = [position or Position(Step(0, 0)) for position in positions]
    is_split = len(set(kinds)) > 1
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
        # Nodes that hold the same may have clipped the step by the norm of several jobs.
        is_noted = is_split or prepared.norm is not None
        if kinds[node] in ahead and prepared.digest != _as_prepared(ahead[kinds[node]], is_noted):
            raise Unresolvable(_describe(there, positions, names, latest))
        verdicts[node] = Verdict.SKIP if was_skipped else _commit(prepared, is_split)
    if behind:
        return verdicts
    if any(p.committed.digest != ahead[kind].digest for kind, p in zip(kinds, there)):
        raise Unresolvable(_describe(there, positions, names, latest))
    if _are_of_several_runs(there, jobs):
        raise Unresolvable(_describe(there, positions, names, latest))
    waiting = {node: p.prepared for node, p in enumerate(there) if p.prepared is not None}
    if waiting:
        verdict = decide([p.prepared for p in there], kinds, jobs)
        if verdict is Verdict.COMMIT and is_split:
            if all(step.norm is None for step in waiting.values()):
                verdict = Verdict.ABORT
            else:
                of_each = {node: _commit(step, is_split) for node, step in waiting.items()}
                lacking = {n: v for n, v in of_each.items() if v is Verdict.CLIP}
                return lacking or of_each
        return dict.fromkeys(waiting, verdict)
    # Where nothing is loaded yet, the ranks are going to load.
    loads: dict[Hashable, set[int]] = {}
    for job, position in zip(jobs or [0] * len(there), there):
        loads.setdefault(job, set()).add(position.loads_finished)
    if any(len(of_job) > 1 and (latest or 0 not in of_job) for of_job in loads.values()):
        raise Unresolvable(
            _describe(there, positions, names, latest)
            + ": a load of state has ended on some nodes alone"
        )
    return {}


def _are_of_several_runs(there: Sequence[Position], jobs: Sequence[Hashable] | None) -> bool:
    """Returns whether steps of one number show that not all nodes have taken them together: they
    take a step in two phases, and skip it alike.

    A job whose state has moved begins at its step on all of its nodes, which do not say how that
    was taken: it is not compared with other jobs until it takes a step with them.
    """
    by_job: dict[Hashable, set[tuple[bool, bool]]] = {}
    for job, position in zip(jobs or [0] * len(there), there):
        step = position.committed
        by_job.setdefault(job, set()).add((step.digest == 0, step.found_inf))
    begun = {
        job for job, position in zip(jobs or [0] * len(there), there) if position.committed.is_begun
    }
    compared = {fact for job, of_job in by_job.items() if job not in begun for fact in of_job}
    return len(compared) > 1 or any(len(of_job) > 1 for of_job in by_job.values())


def resolve_present(
    positions: Sequence[Position | None], names: Sequence[str]
) -> dict[int, Verdict]:
    """Does resolve() for those nodes that have the job, all of which hold the same."""
    present = [node for node, position in enumerate(positions) if position is not None]
    there = [positions[node] for node in present]
    try:
        verdicts = resolve(there, [names[node] for node in present])
    except Unresolvable as error:
        if len({position.committed.step for position in there if position is not None}) == 1:
            raise
        stale = stale_nodes(positions)
        lacking = " and ".join(names[node] for node in stale) or "the nodes that lack steps"
        how = 'say stale_nodes="replace", or ' if stale else ""
        raise Unresolvable(
            f"{error}. Or, if all are of one run, {how}delete the job on {lacking} alone: they then"
            " get it from the others"
        ) from None
    return {present[place]: verdict for place, verdict in verdicts.items()}


def stale_nodes(positions: Sequence[Position | None]) -> list[int]:
    """Returns the nodes, all of which hold the same, that lack steps which others have taken, and
    cannot take them any more. Empty: the others cannot go on together without them either."""
    present = [position for position in positions if position is not None]
    latest = max(position.committed.step for position in present)
    stale = [
        node
        for node, position in enumerate(positions)
        if position is not None
        and position.committed.step < latest
        and (position.prepared is None or position.prepared.step != latest)
    ]
    rest = [None if node in stale else position for node, position in enumerate(positions)]
    try:
        resolve_present(rest, [""] * len(rest))
    except Unresolvable:
        return []
    return stale


def noted_norm(positions: Sequence[Position | None]) -> NodesNorm | None:
    """Returns the norm that some node has noted for the latest step of the nodes."""
    steps = [step for p in positions if p for step in (p.committed, p.prepared) if step]
    latest = max((step.step for step in steps), default=0)
    noted = (step.norm for step in steps if step.step == latest)
    return next((norm for norm in noted if norm is not None), None)


def _as_prepared(committed: Step, is_noted: bool) -> int:
    """Returns the digest that a committed step had when it was prepared.

    is_noted: it was clipped by a norm that was noted.
    """
    if not is_noted or committed.found_inf or committed.norm is None:
        return committed.digest
    return noted_digest(committed.digest, committed.norm)  # which undoes it


def _commit(prepared: Step, is_split: bool) -> Verdict:
    return Verdict.CLIP if is_split and prepared.norm is None else Verdict.COMMIT


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
    ahead = [name for name, each in zip(names, there) if each.committed.step == latest]
    why = "none has what the others lack"
    if least < latest:
        have = "has" if len(ahead) == 1 else "have"
        why = (
            f"{' and '.join(ahead)} {have} taken more steps than the others, which have not"
            " prepared those"
        )
    return (
        f"the nodes are not at one step ({'; '.join(said)}), and {why}."
        " Delete the job on all nodes (optctl delete job) and begin it again from a checkpoint; all"
        f" nodes had step {least}, and the last one was {latest}{_durable_on_all(positions)}"
    )


def _durable_on_all(positions: Sequence[Position | None]) -> str:
    """Returns how to go back to a step that is durable on all nodes, if there is one."""
    steps = {0 if position is None else position.durable_step for position in positions}
    if len(steps) > 1 or steps == {0}:
        return ""
    return (
        f". Or go back to step {steps.pop()}, which is durable on all of them: optctl recover JOB"
        " --to-durable on each node that is at a later one"
    )
