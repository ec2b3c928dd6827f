"""Opens an attachment that the rank and the job's groups may stand in the way of.

The rank may be held by a former optimizer of this process; the job may have other groups of the
same parameters than the script.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from optstate import errors
from optstate._torch.frozen import groups_as_in, parameters_in_job
from optstate._torch.job.attachment import Attachment
from optstate._torch.job.opening import Existing, gone, place_of
from optstate._torch.nodes.norm_members import NormMembers
from optstate._torch.nodes.places import node_name
from optstate._torch.ranks import Ranks
from optstate._torch.settings import Settings
from optstate.session_spec import SessionSpec

ParamGroups = Sequence[dict[str, Any]]


class Holder(Protocol):
    """An optimizer that may hold a rank."""

    attachment: Attachment | None

    def detach(self, because: str) -> None:
        """Frees the rank; `because` is said at each later use."""


# The attached optimizers of this process.
_living: weakref.WeakSet[Holder] = weakref.WeakSet()


def note_holder(holder: Holder) -> None:
    """Notes an attached optimizer, whose rank another may ask for later."""
    _living.add(holder)


def _has_rank_of(attachment: Attachment, spec: SessionSpec) -> bool:
    """Returns whether an attachment holds the rank that `spec` asks for."""
    held = attachment.spec
    return (
        attachment.job == spec.job
        and held.rank == spec.rank
        and place_of(spec.endpoint)
        in (place_of(held.endpoint), place_of(attachment.session.endpoint))
    )


def _take_over(spec: SessionSpec) -> bool:
    """Frees the rank that `spec` asks for when an optimizer of this process holds it.

    In a notebook the former optimizer still exists when its cell is run again: under
    another name, or in the traceback of a cell that raised.
    """
    for former in tuple(_living):
        if former.attachment is not None and _has_rank_of(former.attachment, spec):
            former.detach(
                f'another optimizer of this process has taken over job "{spec.job}"; use that one'
            )
            return True
    return False


def _known_endpoint(endpoint: str | None) -> str | None:
    """Returns the endpoint for optctl: for "embedded", that of this process's own daemon."""
    if (endpoint or os.environ.get("OPTSTATE_ENDPOINT") or "embedded") != "embedded":
        return endpoint
    attachments = (each.attachment for each in tuple(_living))
    return next((a.session.endpoint for a in attachments if a and a.is_embedded), endpoint)


def _parameters_of(job: str, ranks: Ranks, settings: Settings) -> list[tuple[str, int]]:
    """Returns parameters_in_job() of the first node that has the job. Collective."""
    nodes = ranks.gather(node_name())
    in_job: list[tuple[str, int]] = []
    if nodes.index(nodes[ranks.rank]) == ranks.rank:
        in_job = parameters_in_job(job, _known_endpoint(settings.endpoint))
    has_it = ranks.gather(bool(in_job))
    return ranks.object_from(in_job, has_it.index(True) if any(has_it) else 0)


def open_attachment(
    groups: ParamGroups,
    param_groups: ParamGroups,
    settings: Settings,
    ranks: Ranks,
    *,
    job: str | None,
    names_by_id: dict[int, str],
    extends: bool,
    members: NormMembers | None = None,
    existing: Existing | None = None,
) -> tuple[Attachment, ParamGroups]:
    """Opens with these groups of param_groups or, when an existing job has other groups of the
    same parameters, with the job's: parameters were frozen when it began, or are now. Returns
    the groups that it opened with.

    members: as of meet(). All jobs of members open anew, or none does. existing: the job must be
    there, else NotFoundError on all ranks.
    """
    everyone = ranks if members is None else members.ranks
    tensors = [tensor for group in param_groups for tensor in group["params"]]
    duplicates = {id(tensors[place]) for place in settings.norm_duplicates}

    def opened(these: ParamGroups, existing: Existing | None) -> Attachment:
        return Attachment(
            these,
            settings,
            ranks,
            job=job,
            names_by_id=names_by_id,
            take_over=_take_over,
            extend=extends,
            members=members,
            duplicates=duplicates,
            existing=existing,
        )

    try:
        return opened(groups, existing), groups
    except Exception as failure:
        if extends or job is None:
            raise
        if not all(everyone.gather(isinstance(failure, errors.FailedPreconditionError))):
            raise
        in_job = _parameters_of(job, ranks, settings)
        theirs = groups_as_in(in_job, param_groups, groups, names_by_id)
        was_extended = len({number for _, number in in_job}) > len(param_groups)
        has_frozen = groups is not param_groups
        if not all(everyone.gather(bool(theirs) and (was_extended or has_frozen))):
            raise
        assert theirs is not None
        # The groups are those of a job that is there, and are not to begin another one.
        there = existing or Existing(_known_endpoint(settings.endpoint))
        attachment = opened(theirs, there)
        if existing is None and any(everyone.gather(attachment.session.created)):
            attachment.close()
            raise gone(job) from None
        return attachment, theirs
