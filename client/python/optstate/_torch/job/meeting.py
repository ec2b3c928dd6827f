"""The ranks of a job tell each other who they are, before any of them asks a daemon."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from optstate._access import check_same
from optstate._torch.collective.reducing import check_same_reducing
from optstate._torch.job.endpoints import address_of, check_endpoints
from optstate._torch.job.opening import check_names, private_name
from optstate._torch.job.partition import check_overlap, check_same_keyword, shard_specs
from optstate._torch.layout import parameter_names
from optstate._torch.nodes.across import check_across_nodes
from optstate._torch.nodes.agreement import NodeAgreement
from optstate._torch.nodes.norm_group import NormGroup
from optstate._torch.nodes.norm_members import NormMembers
from optstate._torch.nodes.owners import SharedOut
from optstate._torch.nodes.parts import exchange_on_nodes, find_whole_job
from optstate._torch.nodes.places import Places, node_name
from optstate._torch.nodes.together import raised_on_all
from optstate._torch.ranks import Ranks
from optstate._torch.settings import Settings
from optstate._torch.shards import Layout, describe_layout, is_shard
from optstate.session_spec import ParameterSpec


class Meeting(NamedTuple):
    """A job as its ranks have found it together."""

    job: str
    names: Sequence[str]  # of this rank's parameters
    places: Places
    is_sharded: bool
    layout: Layout | None  # of shards
    # Parameters that are no shards, where nodes share them out.
    shared_out: SharedOut | None
    agreement: NodeAgreement

    @property
    def takes_steps_together(self) -> bool:
        """Whether a step is taken on several nodes, or in several jobs, or in none."""
        return self.places.several or self.agreement.spans_jobs


def meet(
    param_groups: Sequence[dict[str, Any]],
    settings: Settings,
    ranks: Ranks,
    members: NormMembers | None,
    *,
    job: str | None,
    names_by_id: dict[int, str],
    duplicates: Collection[int],
) -> Meeting:
    """Collective, over the ranks of the job and of members. Leaves nothing behind when it raises,
    which it does on all ranks.

    members: the ranks that clip by one norm; None: those of the job. duplicates: ids of the
    parameters that another job of them counts.
    """
    shared_out: list[SharedOut] = []
    try:
        spans_jobs = members is not None and members.has_several_jobs
        with raised_on_all(members):
            met = _meet_in_job(
                param_groups,
                settings,
                ranks,
                job,
                names_by_id,
                shared_out,
                settles_later=spans_jobs,
            )
        if members is None or not spans_jobs:
            return met
        tensors = [tensor for group in param_groups for tensor in group["params"]]
        group = NormGroup(
            members,
            met.agreement,
            met.places,
            None if met.layout is None else met.layout.kinds,
            [name for name, each in zip(met.names, tensors) if id(each) in duplicates],
            [(name, tuple(each.shape)) for name, each in zip(met.names, tensors)],
        )
        return met._replace(agreement=group)
    except BaseException:
        for each in shared_out:
            each.end()
        raise


def _meet_in_job(
    param_groups: Sequence[dict[str, Any]],
    settings: Settings,
    ranks: Ranks,
    job: str | None,
    names_by_id: dict[int, str],
    made: list[SharedOut],
    *,
    settles_later: bool,
) -> Meeting:
    """made: gets what is to be ended when a rank raises. settles_later: as for Mover.find()."""
    tensors: list[torch.Tensor] = [each for group in param_groups for each in group["params"]]
    is_sharded = settings.partition == "local" or any(map(is_shard, tensors))
    keywords = (settings.across_nodes, settings.reduction, settings.stale_nodes)
    facts = (job, settings.access, settings.reducing, settings.partition, keywords)
    address = address_of(settings.endpoint, is_private=job is None)
    begun = ranks.gather((job or private_name(), is_sharded, node_name(), address, facts))
    everyones = [facts for *_, facts in begun]
    names_asked, accesses, reducings, partitions, everyones_keywords = map(list, zip(*everyones))
    check_names(names_asked)
    check_same(accesses)
    check_same_reducing(reducings)
    name: str = begun[0][0]
    places = Places([node for _, _, node, _, _ in begun], ranks.rank)
    shares_out = settings.across_nodes == "sharded" and places.several
    is_sharded = shares_out or any(sharded for _, sharded, _, _, _ in begun)
    for keyword, asked in zip(
        ("across_nodes", "reduction", "stale_nodes"), zip(*everyones_keywords)
    ):
        check_same_keyword(keyword, asked)
    check_across_nodes(settings, places, is_sharded=is_sharded)
    check_endpoints([address for _, _, _, address, _ in begun], places)
    if shares_out:
        check_same_keyword("partition", [each or "greedy" for each in partitions])
    if not is_sharded and ranks.world_size > 1:
        check_overlap(settings)
    names = parameter_names(param_groups, names_by_id)
    layout: Layout | None = None
    agreement = NodeAgreement(ranks, places, replaces_stale=settings.stale_nodes == "replace")

    def make_mine() -> list[ParameterSpec]:
        if shares_out and not all(map(is_shard, tensors)):
            groups = [group["params"] for group in param_groups]
            cuts = settings.partition == "contiguous"
            made.append(SharedOut(ranks, places, groups, names, cuts=cuts))
        return shard_specs(param_groups, names, settings, shares_out=shares_out)

    def in_layout(layout: Layout) -> Layout:
        for each in made:
            layout = each.in_layout(layout)
        return layout

    if is_sharded:
        layout, agreement = exchange_on_nodes(
            ranks,
            places,
            make_mine,
            lambda index: describe_layout(tensors[index]),
            in_layout,
            settings,
            job,
            settles_later=settles_later,
        )
    elif settings.across_nodes == "sharded" and job is not None:
        find_whole_job(ranks, places, agreement, settings, job, settles_later=settles_later)
    shared_out = made[0] if made else None
    return Meeting(name, names, places, is_sharded, layout, shared_out, agreement)
