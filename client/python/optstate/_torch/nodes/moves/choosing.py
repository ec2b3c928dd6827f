"""Where the state of a job is, when it goes on with other nodes or ranks: by one pure function.

A job moves in two turns. First its state goes into parcels, one for each node of those to come, and
the jobs that it came from are deleted once all parcels are whole. Then each node makes its job of
its parcel, and the parcels are deleted once all jobs are whole; nobody trains before that. So at
each moment either the former jobs are whole, or all parcels are:

    parcels of one run have everything     the jobs beside them are former ones, or half made: they
                                           go, and the jobs are made of the parcels
    else                                   the jobs have everything, and parcels that were being
                                           made of them go

A node that leaves hands its part to another one as a parcel, which then is a part of the same run.

What was made of what is in the names that jobs and parcels have of their runs. Nothing is deleted
that could be ahead of what is kept, or of another origin: then it is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from optstate._torch.names import quoted
from optstate._torch.nodes.copy_note import has_nothing
from optstate._torch.nodes.moves.blocks import Regions
from optstate._torch.nodes.moves.durability import WHILE_MOVING
from optstate._torch.nodes.moves.holdings import HeldJob, Holding, Mark, last_step_of
from optstate._torch.nodes.moves.making_note import MakingNote
from optstate._torch.nodes.part_names import Part

_DELETE = (
    "delete it there (optctl delete job {name}) if it is not wanted, and start the ranks again"
)


class Refused(Exception):
    """The nodes have no state with which the job can go on; the text says why, and what to do."""


class Source(NamedTuple):
    """A job or parcel, and the place of its node."""

    node: int
    held: HeldJob


class Choice(NamedTuple):
    """The state with which a job goes on."""

    run: str
    sources: tuple[Source, ...]
    debris: tuple[Source, ...]  # can be deleted
    stays: bool  # the jobs are just those that the ranks want
    is_local: bool  # each node has parcels of all that its ranks want

    @property
    def step(self) -> int:
        return max(each.held.step for each in self.sources)

    def is_of(self, former: Choice) -> bool:
        """Returns whether it is a former choice, perhaps at another step."""
        return self._places() == former._places()

    def _places(self) -> tuple:
        sources = [(each.node, each.held.job, each.held.run) for each in self.sources]
        return self.run, self.stays, self.is_local, sources


def choose(
    job: str, names: Sequence[str], found: Sequence[Holding], count_of_nodes: int
) -> Choice | None:
    """Returns where the state of a job is; None: no node has any.

    names, found: by node. Jobs of the choice may be one step apart, of which the one behind has
    prepared the next. Refused: parts are missing, or what is here does not belong together.
    """
    jobs = [Source(node, each.job) for node, each in enumerate(found) if each.job is not None]
    parcels = [Source(node, each) for node, here in enumerate(found) for each in here.parcels]
    if not parcels and all(not each.held.position.loads_finished for each in jobs):
        return None
    chosen = _whole_parcels(job, names, parcels)
    if chosen:
        run = chosen[0].held.run
        debris = _beside_parcels(job, names, chosen, jobs, found)
        is_local = count_of_nodes == 1 or all(run in each.ready for each in found)
        stays = False
    else:
        run, chosen = _run_of_jobs(job, names, found, jobs, parcels)
        debris, is_local = [], False
        stays = len(chosen) == len(found) == len(jobs)
        stays = stays and all(each.held.mark is None and each.held.fits for each in chosen)
        if not stays and not all(each.held.position.loads_finished for each in chosen):
            raise Refused(
                f'job "{job}" was made on other nodes or ranks, and has not got its first'
                f" parameters everywhere ({_said(names, chosen)}): delete it on all nodes (optctl"
                f" delete job {job})"
            )
    unused = [each for each in parcels if each not in chosen]
    debris += _unused(job, names, run, chosen, unused, found)
    return Choice(run, tuple(chosen), tuple(debris), stays, is_local)


def _parts_of(sources: Sequence[Source]) -> list[Part]:
    parts = (each.held.mark.part if each.held.mark else each.held.part for each in sources)
    return [part for part in parts if part is not None]


def _missing_parts(sources: Sequence[Source]) -> list[int]:
    """Returns numbers of parts that are not here, of which each node may have one, or several may
    have the same."""
    parts = _parts_of(sources)
    count = max((part.count for part in parts), default=0)
    return sorted(set(range(1, count + 1)) - {part.number for part in parts})


def _lacking(sources: Sequence[Source]) -> list[str]:
    """Returns names of parameters of which not all elements are here."""
    regions = Regions(each.held.blocks for each in sources)
    lacking = set(regions.lacking())
    if _missing_parts(sources):
        # A parameter that one node has whole seems to have no elements on the others.
        lacking.update(name for name in regions.names if not math.prod(regions.whole_shape(name)))
    return [name for name in regions.names if name in lacking]


def _whole_parcels(job: str, names: Sequence[str], parcels: Sequence[Source]) -> list[Source]:
    """Returns the parcels of one run, and of one step, that have everything; empty: none have."""
    by_run: dict[tuple[str, int], list[Source]] = {}
    for each in parcels:
        if each.held.is_whole:
            # A part may be handed over at a later step than that at which the run came here.
            by_run.setdefault((each.held.run, each.held.step), []).append(each)
    whole = {key: of_run for key, of_run in by_run.items() if not _lacking(of_run)}
    made_of = {_mark_source(each) for of_run in whole.values() for each in of_run}
    latest = [of_run for (run, _), of_run in whole.items() if run not in made_of]
    if len(latest) > 1:
        raise Refused(
            f'the nodes have the state of job "{job}" more than once'
            f" ({_said(names, [of_run[0] for of_run in latest])}): delete the parcels of the run"
            " that is not wanted (optctl delete job), and start the ranks again"
        )
    return latest[0] if latest else []


def _mark_source(parcel: Source) -> str:
    assert parcel.held.mark is not None
    # A part that was handed over is of the same run.
    return parcel.held.mark.source if parcel.held.mark.source != parcel.held.run else ""


def _said(names: Sequence[str], sources: Sequence[Source]) -> str:
    return "; ".join(f"{names[node]}: {held}" for node, held in sources)


def _was_made_of(mark: Mark, held: HeldJob) -> bool:
    """Returns whether a parcel with this mark was made of a job."""
    if mark.source == held.run:
        return True
    # Its daemon has restored it from disk.
    is_alone = held.mark is None and held.part is None and bool(mark.last_step)
    return is_alone and last_step_of(held.position) == mark.last_step


def _is_source(held: HeldJob, mark: Mark) -> bool:
    """Returns whether a job is one that parcels with this mark were made of, and has nothing that
    they lack."""
    if not _was_made_of(mark, held):
        return False
    step = held.position.committed.step
    return step == mark.step or (step < mark.step and _came_back(held, mark))


def _came_back(held: HeldJob, mark: Mark) -> bool:
    """Returns whether a job that a parcel was made of has lost its memory since, and nobody has
    trained with it from its durable step on."""
    position = held.position
    is_durable = bool(held.durability) and position.durable_step == position.committed.step
    return is_durable and position.durable_step in mark.durable and position.prepared is None


def _is_made(held: HeldJob, mark: Mark, note: MakingNote | None) -> bool:
    """Returns whether a job was made of parcels with this mark, and nobody has trained with it."""
    step = held.position.committed
    if held.part is not None:
        # Trainers of earlier builds brought it to its step by others, most of which were skipped.
        was_skipped = step.digest == 0 and step.found_inf
        is_new = (step.is_begun or was_skipped) and step.step <= mark.step
        return is_new and held.run == mark.part.run
    if not step.is_begun or step.step not in (0, mark.step):
        return False
    # The layout of a job of one node does not say it.
    if has_nothing(held.position) or held.durability == WHILE_MOVING:
        return True
    if note is None or note.parcels != mark.part.run:
        return False
    # No other client has a job begin at that step; a daemon that restores one gives it another run.
    return note.job == held.run or 0 < step.step == mark.step


def _beside_parcels(
    job: str,
    names: Sequence[str],
    chosen: Sequence[Source],
    jobs: Sequence[Source],
    found: Sequence[Holding],
) -> list[Source]:
    """Returns the jobs beside parcels that have everything: those that the parcels were made of,
    or that were being made of the parcels. Refused: there is another one, or one of which nothing
    says that it is one of these."""
    mark = chosen[0].held.mark
    assert mark is not None
    for node, held in jobs:
        is_known = _is_source(held, mark) or _is_made(held, mark, found[node].note)
        if not is_known or held.position.prepared is not None:
            raise Refused(
                f'{names[node]} has job "{job}" ({held}) beside parcels of {mark.part} at step'
                f" {mark.step} ({_said(names, chosen)}), with which the job was to go on, and"
                " nothing says that the parcels were made of that job, or it of them, so that one"
                " of the two would be lost. If another client has made the job, and the run is to"
                f" go on at step {mark.step}, delete the job (optctl delete job {job}, on"
                f" {names[node]} alone); if the job is to go on, delete the parcels:"
                f" {quoted([each.held.job for each in chosen])}. Then start the ranks again"
            )
    return list(jobs)


def _run_of_jobs(
    job: str,
    names: Sequence[str],
    found: Sequence[Holding],
    jobs: Sequence[Source],
    parcels: Sequence[Source],
) -> tuple[str, list[Source]]:
    """Returns the run that has everything in jobs, and in parcels that were handed over."""
    by_run: dict[str, list[Source]] = {}
    for each in jobs:
        by_run.setdefault(each.held.run, []).append(each)
    for each in parcels:
        if each.held.is_whole and each.held.run == _origin(each):
            beside = by_run.setdefault(each.held.run, [])
            assert each.held.mark is not None
            numbers = [_number(other) for other in beside]
            if each.held.mark.part.number not in numbers:
                beside.append(each)
    whole = {run: of_run for run, of_run in by_run.items() if not _lacking(of_run)}
    said = "; ".join(f"{name}: {each}" for name, each in zip(names, found))
    if len(whole) != 1:
        raise Refused(_incomplete(job, said, by_run) if not whole else _several(job, said))
    [(run, chosen)] = whole.items()
    if any(each.held.run != run for each in jobs):
        raise Refused(_several(job, said))
    handed = [each.held.step for each in chosen if each.held.mark is not None]
    for _, held in chosen:
        if handed and (held.step != handed[0] or held.position.prepared is not None):
            raise Refused(
                f'the parts of job "{job}" are not at one step ({said}): one was handed over, and'
                " the job went on without it. Delete the job and its parcels on all nodes (optctl"
                " delete job) and begin it again from a checkpoint"
            )
    return run, chosen


def _origin(parcel: Source) -> str:
    assert parcel.held.mark is not None
    return parcel.held.mark.source


def _number(source: Source) -> int:
    part = source.held.part if source.held.mark is None else source.held.mark.part
    return 0 if part is None else part.number


def _several(job: str, said: str) -> str:
    return (
        f'the jobs "{job}" of these nodes do not belong together ({said}): ranks attach on nodes'
        " of one run. Start them so, or delete the job on the nodes where it is not wanted (optctl"
        f" delete job {job}), or on all of them and begin it again from a checkpoint"
    )


def _incomplete(job: str, said: str, by_run: Mapping[str, Sequence[Source]]) -> str:
    """Returns what is missing, of each run, and what to do about it."""
    if len(by_run) > 1:
        return _several(job, said)
    if not by_run:
        return (
            f'the state of job "{job}" is not here but for parcels that are half made ({said}):'
            " delete them (optctl delete job) and begin the job again from a checkpoint"
        )
    [of_run] = by_run.values()
    lacking = _lacking(of_run)
    count = max((part.count for part in _parts_of(of_run)), default=1)
    which = ", ".join(map(str, _missing_parts(of_run)))
    step = max(each.held.step for each in of_run)
    return (
        f'the jobs "{job}" of these nodes are not the whole state ({said}): of parameters'
        f" {quoted(lacking)} elements are missing. The run is on {count} nodes, and those of part"
        f" {which} have no ranks here. Where their daemons still run, start ranks on all of them:"
        f" they go on from step {step}, or one after it, and hand_over() before a node leaves has"
        " the others go on without it. A node that was rebooted is at its durable step; if it has"
        " none, its part is lost: delete the job on all nodes (optctl delete job) and go on from"
        f" the last checkpoint, of step {step} or before"
    )


def _unused(
    job: str,
    names: Sequence[str],
    run: str,
    chosen: Sequence[Source],
    unused: Sequence[Source],
    found: Sequence[Holding],
) -> list[Source]:
    """Returns parcels that are not needed, because the chosen ones or jobs have it all. Refused: a
    parcel could have something else."""
    mark = chosen[0].held.mark
    runs = {run} if mark is None else {run, mark.source}
    step = min(each.held.step for each in chosen)
    for node, held in unused:
        assert held.mark is not None
        # The jobs that a half made one is made of stay until all are whole.
        if not held.is_whole:
            continue
        belongs = bool(runs & {held.run, held.mark.source})
        belongs = belongs or any(_was_made_of(held.mark, each.held) for each in chosen)
        belongs = belongs or any(_has_made(*each, held.mark, found) for each in chosen)
        belongs = belongs or _was_broken_off(held.mark, unused)
        is_ahead = held.mark.step > step and not _was_given_up(held.mark, chosen, unused)
        if not belongs or is_ahead:
            raise Refused(
                f'{names[node]} has a parcel of job "{job}" ({held}, as job "{held.job}") that'
                f" does not belong to the state with which the job goes on ({_said(names, chosen)})"
                f": {_DELETE.format(name=held.job)}"
            )
    return list(unused)


def _has_made(node: int, held: HeldJob, mark: Mark, found: Sequence[Holding]) -> bool:
    """Returns whether a job of one node, whose layout does not say it, is whole and was made of
    parcels with this mark: some of them are deleted already."""
    note, position = found[node].note, held.position
    if held.mark is not None or held.part is not None or not position.loads_finished:
        return False
    if note is None or note.parcels != mark.part.run:
        return False
    if note.job == held.run:
        return True
    # Its daemon has restored it from disk; it was durable before any parcel was deleted.
    is_at_step = position.committed.is_begun and 0 < position.committed.step == mark.step
    return is_at_step and held.durability != WHILE_MOVING


def _was_broken_off(mark: Mark, unused: Sequence[Source]) -> bool:
    """Returns whether a parcel is one of those that were never all whole, and are all here: what
    they were made of is as it was."""
    of_run = [each for each in unused if each.held.run == mark.part.run]
    return len(of_run) == mark.part.count and not all(each.held.is_whole for each in of_run)


def _was_given_up(mark: Mark, chosen: Sequence[Source], unused: Sequence[Source]) -> bool:
    """Returns whether a parcel is one of those that were being made of the chosen jobs when all
    lost their memory."""
    return _was_broken_off(mark, unused) and all(_came_back(each.held, mark) for each in chosen)
