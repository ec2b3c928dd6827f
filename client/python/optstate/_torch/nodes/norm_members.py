"""The ranks of norm_group=, and which jobs they train."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from optstate import errors
from optstate._torch.nodes.places import Places, node_name
from optstate._torch.ranks import Ranks
from optstate._torch.settings import Settings


class _Member(NamedTuple):
    """One rank, as it says of itself."""

    job: str | None
    ranks: tuple[int, ...]  # of its process_group, as torch numbers all processes
    node: str


def _all_ranks(group: Any | None) -> list[int]:
    if not dist.is_available() or not dist.is_initialized():
        return [0]
    if group is None:
        return list(range(dist.get_world_size()))
    return list(dist.get_process_group_ranks(group))


class NormMembers:
    """The jobs that clip by one norm, and the nodes that have them: a *unit* is a job's part on one
    node.

    Threads: one at a time. Collective, over norm_group: the constructor and agree().
    """

    def __init__(
        self, norm_group: Any, process_group: Any | None, settings: Settings, job: str | None
    ) -> None:
        """ValueError, on all ranks of norm_group: they cannot clip together.

        job: None: each of them is a new one of a unique name.
        """
        self.ranks = Ranks(norm_group, "norm_group")
        mine = _Member(job, tuple(_all_ranks(process_group)), node_name())
        found = self.ranks.gather(mine)
        numbers = _all_ranks(norm_group)
        _check_members(found, numbers)
        self.ranks.agree(_refusal(settings))
        # By rank of norm_group, the job's ranks, which identify it.
        self.jobs: Sequence[tuple[int, ...]] = [member.ranks for member in found]
        names = {member.ranks: member.job or "" for member in found}
        # The order in which the jobs' sums are added: of their names, so that it does not depend
        # on the order of the ranks. Jobs without a name are in the order of their first ranks.
        order = sorted(names, key=lambda ranks: (names[ranks], ranks))
        self.job_numbers: Sequence[int] = [order.index(member.ranks) for member in found]
        self.places = Places([_unit(member) for member in found], self.ranks.rank)
        # By rank of norm_group, its place among the ranks of its job.
        self.places_in_job: Sequence[int] = [
            member.ranks.index(number) for number, member in zip(numbers, found)
        ]
        self.has_several_jobs = len(order) > 1

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank when some rank has an error. Collective."""
        self.ranks.agree(error)


def _unit(member: _Member) -> str:
    job = f'job "{member.job}"' if member.job else f"the job of ranks {list(member.ranks)}"
    return f"{job} on {member.node}"


def _check_members(found: Sequence[_Member], numbers: Collection[int]) -> None:
    by_rank: dict[int, _Member] = {}
    by_name: dict[str, _Member] = {}
    for member in found:
        outside = sorted(set(member.ranks) - set(numbers))
        if outside:
            raise ValueError(
                f"norm_group has some ranks of {_unit(member)} and lacks others, {outside}: they"
                " would not learn of a step that the group skips. Give the group of all ranks of"
                " all jobs that clip by one norm (torch.distributed.group.WORLD, if it is all)"
            )
        for rank in member.ranks:
            other = by_rank.setdefault(rank, member)
            if other.ranks != member.ranks:
                raise ValueError(
                    f"rank {rank} is in the process_group of {_unit(other)} and in that of"
                    f" {_unit(member)}: jobs of one norm_group have ranks of their own"
                )
        if (member.job is None) != (found[0].job is None):
            raise ValueError(
                f"of norm_group {_unit(found[0])} and {_unit(member)} have a name or none: give"
                " all jobs one (job=), so that they go on together, or none of them"
            )
        if member.job is not None:
            other = by_name.setdefault(member.job, member)
            if other.ranks != member.ranks:
                raise ValueError(
                    f'two jobs of norm_group are called "{member.job}", of ranks'
                    f" {list(other.ranks)} and {list(member.ranks)}: give each a name of its own"
                )


def _refusal(settings: Settings) -> ValueError | None:
    """Returns why a job with these settings cannot take its steps together with others."""
    refused = None
    if settings.overlap:
        refused = "overlap=True, which reads parameters before all jobs have agreed"
    elif settings.speculative:
        refused = "speculative=True, which updates parameters before all jobs have agreed"
    elif settings.accumulate and settings.reduction == "daemon":
        refused = 'accumulate=True and reduction="daemon" together'
    elif settings.stale_nodes == "replace":
        refused = 'stale_nodes="replace", which knows the nodes of one job alone'
    return None if refused is None else ValueError(f"norm_group cannot be had with {refused}")


def members_of(
    norm_group: Any | None, process_group: Any | None, settings: Settings, job: str | None
) -> NormMembers | None:
    """Returns the members of a group, as NormMembers() does; None: there is none."""
    return None if norm_group is None else NormMembers(norm_group, process_group, settings, job)


def refuse_extension(nodes: Any | None, what: str) -> None:
    """Raises UnimplementedError for an act that would extend one of several jobs.

    nodes: the attachment's NodeAgreement, if it has one.
    """
    if nodes is not None and nodes.spans_jobs:
        raise errors.UnimplementedError(
            f"{what} cannot be had with norm_group, whose jobs would have to be extended together:"
            " give the optimizer all parameters, with requires_grad, when it is constructed"
        )


def places_of_duplicates(
    duplicates: Iterable[torch.Tensor], tensors: Sequence[torch.Tensor], norm_group: Any | None
) -> frozenset[int]:
    """Returns the places, among an optimizer's tensors, of those that another job counts.

    ValueError: one of them is no parameter of this optimizer, or there is no norm_group.
    """
    wanted = {id(tensor): tensor for tensor in duplicates}
    if wanted and norm_group is None:
        raise ValueError("norm_duplicates are of jobs that clip by one norm: give norm_group too")
    places = frozenset(place for place, each in enumerate(tensors) if id(each) in wanted)
    strange = wanted.keys() - set(map(id, tensors))
    if strange:
        shapes = [list(wanted[key].shape) for key in strange]
        raise ValueError(
            f"norm_duplicates have tensors of shapes {shapes}, which are no parameters of this"
            " optimizer"
        )
    return places
