"""A node that is going to leave gives its part of a job's state to nodes that stay."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NoReturn

import torch

from optstate import errors
from optstate._torch.job.attachment import Attachment
from optstate._torch.nodes.agreement import NodeAgreement
from optstate._torch.nodes.moves.choosing import Source
from optstate._torch.nodes.moves.deletion import delete_left
from optstate._torch.nodes.moves.durability import make_present_step_durable
from optstate._torch.nodes.moves.holdings import HeldJob, find_holding
from optstate._torch.nodes.moves.parcelling import Wish, check_movable, make_parcels
from optstate._torch.nodes.places import Places
from optstate._torch.nodes.together import Agreeing, raised_on_all
from optstate._torch.ranks import Ranks
from optstate._torch.served import Served
from optstate.session_spec import SessionSpec

logger = logging.getLogger("optstate")


def _leaving_nodes(places: Places, flags: Sequence[bool]) -> set[int]:
    """Returns the nodes of which a rank leaves. ValueError, on every rank alike: all do."""
    leaving = {node for node, leaves in zip(places.node_of, flags) if leaves}
    if len(leaving) == len(places.nodes):
        raise ValueError(
            "hand_over(): all nodes leave, and none would have the state: save a checkpoint"
        )
    return leaving


def wishes_of(
    jobs: Sequence[HeldJob], leaving: set[int], *, all_parts: bool = False
) -> tuple[list[Source], list[Wish]]:
    """Returns the parts that no node would have any more, and which nodes get them: each the one
    that has the fewest elements so far. jobs: by node. all_parts: nodes that stay give theirs too,
    to themselves."""
    staying = [node for node in range(len(jobs)) if node not in leaving]
    loads = {node: _elements(jobs[node]) for node in staying}
    there = set() if all_parts else {_number(jobs[node]) for node in staying}
    sources, wishes = [], []
    for node in [*(staying if all_parts else ()), *sorted(leaving)]:
        part = jobs[node].part
        assert part is not None
        if part.number in there:
            continue  # another node holds the same shards
        there.add(part.number)
        heir = node
        if node in leaving:
            heir = min(staying, key=lambda each: (loads[each], each))
            loads[heir] += _elements(jobs[node])
        sources.append(Source(node, jobs[node]))
        wishes.append(Wish(heir, part, tuple(each for each in jobs[node].blocks if each.name)))
    return sources, wishes


def _elements(job: HeldJob) -> int:
    return sum(math.prod(each.shape) for each in job.blocks)


def _number(job: HeldJob) -> int:
    assert job.part is not None
    return job.part.number


def _refuse_one_node(attachment: Attachment) -> NoReturn:
    _refuse(attachment, "it is on one node, which would keep all of it. Save a checkpoint")


def _check_job(attachment: Attachment, is_sharded: bool) -> None:
    """Raises, on every rank alike, when the job has nothing that nodes could hand over."""
    if not attachment.places.several:
        _refuse_one_node(attachment)
    if not is_sharded:
        _refuse(
            attachment,
            'with across_nodes="replicated" every node has all of it: close() the optimizer, and'
            " go on with the nodes that stay",
        )
    if attachment.is_private:
        _refuse(attachment, "it has no name, and ends with its last rank. Say job=NAME")


def _refuse(attachment: Attachment, why: str) -> NoReturn:
    raise errors.FailedPreconditionError(f'job "{attachment.job}" cannot be handed over: {why}')


def _leave(served: Served, attachment: Attachment, everyone: Agreeing) -> None:
    """Detaches every rank, after the daemons have got what the trainer changed; or raises on every
    rank, which then are attached. everyone: the ranks that take steps together."""
    error: Exception | None = None
    try:
        if attachment.must_abort:
            attachment.abort_step()  # what a step that failed may have left
        attachment.check_no_micro_steps("hand_over() was called")
        if attachment.was_taken:
            _refuse(
                attachment,
                "the step that failed was committed after all: call step() first, which reads its"
                " result",
            )
        groups = list(attachment.parameters.groups.in_order(served.param_groups))
        attachment.options.check_groups(groups)
        attachment.parameters.check_tensors()
    except Exception as failure:
        error = failure
    everyone.agree(error)
    # No rank waits for those of a job that refuses what was changed.
    with raised_on_all(everyone):
        if served.replaced is not None:
            served.replaced.drop_changed()
        served.send_changes(attachment, groups)
    with raised_on_all(everyone):  # every rank has left
        served.detach(
            f'job "{attachment.job}" was handed over to the nodes that stay: construct the'
            " optimizer anew on them"
        )


class _Parts:
    """The parts of one job that its nodes have, while some of them are handed over.

    Threads: one at a time. Collective, over the ranks of the job: all methods.
    """

    def __init__(
        self,
        ranks: Ranks,
        places: Places,
        agreement: NodeAgreement,
        spec: SessionSpec,
        leaving: set[int],
    ) -> None:
        """agreement: of the job's ranks alone."""
        self._ranks = ranks
        self._places = places
        self._agreement = agreement
        self._spec = spec
        self._leaving = leaving
        self._gives_all = False  # nodes that stay have what they give, too, and no job
        self._here = places.node_of[places.rank]

    def check(self) -> None:
        """Raises when what the nodes have cannot be handed over."""
        if self._leaving:
            found = self._find()
            check_movable(self._spec, [each for each in found if each is not None])

    def _find(self) -> list[HeldJob | None]:
        spec = self._spec

        def find() -> HeldJob | None:
            return find_holding(spec.endpoint, spec.job, spec.connect_timeout_s, None, None).job

        return self._agreement.on_first(find)

    def make_durable(self) -> None:
        """Has a loss of power leave a job that stays at the step at which others are handed
        over."""
        if not self._leaving:
            self._agreement.on_first(lambda: make_present_step_durable(self._spec))

    def give(self) -> None:
        """Has all parts be on nodes that stay."""
        if not self._leaving:
            return
        spec, found = self._spec, self._find()
        jobs = [each for each in found if each is not None and each.part is not None]
        is_open = any(each.position.prepared is not None for each in jobs)
        if is_open or len(jobs) != len(found) or len({(each.run, each.step) for each in jobs}) > 1:
            raise errors.AbortedError(
                f'the nodes of job "{spec.job}" do not have it at one step, or have prepared'
                f" another ({'; '.join(map(str, found))}), and nothing was handed over: construct"
                " the optimizer anew on all nodes, which settles the step, and end other scripts"
                " that take steps of the job"
            )
        # A loss of power would take the nodes that stay back to a step before.
        durable_steps = [each.position.durable_step for each in jobs if each.durability]
        self._gives_all = any(step != jobs[0].step for step in durable_steps)
        sources, wishes = wishes_of(jobs, self._leaving, all_parts=self._gives_all)
        if wishes:
            step, run = jobs[0].step, jobs[0].run
            make_parcels(self._ranks, self._places, spec, sources, wishes, step=step, run=run)

    def end(self) -> None:
        """Deletes what is on other nodes, or in parcels, by now."""
        if not self._leaving:
            return

        def delete() -> None:
            if self._gives_all or self._here in self._leaving:
                delete_left(self._spec, self._spec.job)

        self._agreement.on_first(delete)
        if self._places.rank == self._places.first_rank:
            names = ", ".join(self._places.nodes[node] for node in sorted(self._leaving))
            logger.info('job "%s" was handed over: %s can leave', self._spec.job, names)


class HandingOver:
    """The part of ServedOptimizer by which a node leaves a job that nodes share.

    Threads: one at a time, like the optimizer.
    """

    _served: Served

    @torch._disable_dynamo
    def hand_over(self, leaves: bool = False) -> bool:
        """Has nodes that stay take over what the daemons of leaving nodes have of a job with
        across_nodes="sharded". Collective, over all jobs of norm_group.

        leaves: whether this rank's node is going to leave, which one of its ranks may say for all;
        with norm_group, one rank of each job that the node has.
        Call it between two steps. Returns False, and does nothing, while no rank leaves. Otherwise
        it returns True, and the optimizer has left the job on all ranks: end them, and construct
        the optimizer anew on the nodes that stay, in any order and with any number of ranks, where
        the job goes on at committed_step with the same bits.

        Parameters and state that were changed in place are sent before. The leaving nodes' jobs are
        deleted when all that they had is on others. If ranks are killed before, all nodes
        have what they had. A durable job is made durable at this step before, on all nodes.

        FailedPreconditionError: the job is not one that nodes share, or a step is open; nothing
        has happened. ResourceExhaustedError: the nodes that stay have too little memory; the jobs
        are as they were. ValueError: all nodes leave.
        """
        served = self._served
        attachment = served.attached()
        ranks, places = attachment.ranks, attachment.places
        agreement = attachment.nodes
        any_rank = ranks.any if agreement is None else agreement.any_rank
        if not any_rank(bool(leaves)):
            return False
        flags = ranks.gather(bool(leaves))
        is_sharded = served.settings.across_nodes == "sharded"
        if agreement is None:
            _refuse_one_node(attachment)
        of_job = agreement.of_job
        parts: list[_Parts] = []

        def check() -> None:
            leaving: set[int] = set()
            if any(flags):
                _check_job(attachment, is_sharded)
                leaving = _leaving_nodes(places, flags)
            parts.append(_Parts(ranks, places, of_job, attachment.spec, leaving))
            parts[0].check()

        agreement.on_all(check)
        _leave(served, attachment, agreement)
        # Each of these is done for all jobs before the next one.
        agreement.on_all(parts[0].make_durable)
        agreement.on_all(parts[0].give)
        agreement.on_all(parts[0].end)
        return True
