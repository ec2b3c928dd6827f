"""Jobs of their own that clip by one norm: stages of a pipeline, parts of tensors that no DTensor
describes, experts.

They take each step together, as nodes do that hold different parameters: all prepare it, their
sums of squares are added, each daemon notes the norm, and then all commit. So a step is taken by
all jobs or by none, whoever dies when, and a job that skips a step has all skip it. What attaches
settles all jobs together, by the rules of resolution.py.

A job whose nodes all hold the same (across_nodes="replicated") is copied to one of them that lacks
it, by its own ranks, while those of the other jobs wait. So does one whose state moves to other
nodes or ranks (across_nodes="sharded"), and before that all jobs settle their last step where they
are: a job by itself would not know what the others have decided.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch

from optstate import errors
from optstate._torch.nodes import resolution
from optstate._torch.nodes.agreement import ROUNDS_MAX, NodeAgreement, hash_of
from optstate._torch.nodes.misplaced import refuse_misplaced
from optstate._torch.nodes.moves.durability import make_present_step_durable
from optstate._torch.nodes.norm_members import NormMembers
from optstate._torch.nodes.places import Places
from optstate._torch.nodes.positions import position_of
from optstate._torch.nodes.resolution import Position, Step, Verdict
from optstate.session import Session
from optstate.session_spec import SessionSpec

# Parameters of one job; the sums of the next job's have numbers above them.
_PARAMETERS_MAX = 1 << 32


class NormGroup(NodeAgreement):
    """The ranks of all jobs of norm_group, which decide together.

    Threads: one at a time. Collective, over norm_group: what is collective in NodeAgreement, and
    the constructor.
    """

    group_norm_refusal = (
        "max_norm of a param group cannot be had with norm_group: each daemon knows the norm of"
        " its own job's parameters alone. Give max_norm to the optimizer, on all ranks"
    )

    def __init__(
        self,
        members: NormMembers,
        of_job: NodeAgreement,
        places: Places,
        kinds: Sequence[int] | None,
        duplicates: Collection[str],
        shapes: Sequence[tuple[str, tuple[int, ...]]],
    ) -> None:
        """of_job, places, kinds: of this rank's job, as for NodeAgreement. duplicates: names of
        its parameters that other jobs have too, and count. shapes: of all its parameters.

        ValueError, on all ranks: ranks of a job disagree about its duplicates, or nobody counts
        one.
        """
        ranks = members.ranks
        here = members.places
        # The first node of the job that holds the same, as a rank of norm_group.
        kind = 0 if kinds is None else kinds[places.node_of[places.rank]]
        place_in_job = places.first_ranks[kind]
        can_be_copied = of_job._copies is not None
        found = ranks.gather((place_in_job, sorted(duplicates), sorted(shapes), can_be_copied))
        _check_duplicates(members, [each[1:3] for each in found])
        rank_at = {
            (job, place): rank
            for rank, (job, place) in enumerate(zip(members.job_numbers, members.places_in_job))
        }
        firsts = [rank_at[job, each[0]] for job, each in zip(members.job_numbers, found)]
        unit_of = here.node_of
        super().__init__(ranks, here, [unit_of[firsts[rank]] for rank in here.first_ranks])
        # A fixed order, whichever order the ranks have.
        self._kind_ranks.sort(key=lambda r: (members.job_numbers[r], members.places_in_job[r]))
        self._jobs_of_votes: Sequence[Hashable] = members.job_numbers
        self._jobs = [members.job_numbers[rank] for rank in here.first_ranks]
        self._of_job = of_job
        # The units of this rank's job, in the order of its nodes.
        of_nodes = [rank_at[(members.job_numbers[ranks.rank], r)] for r in places.first_ranks]
        self._units = [unit_of[rank] for rank in of_nodes]
        self._can_be_copied = [found[rank][3] for rank in here.first_ranks]
        self._is_on_several_nodes = places.several
        self._duplicates = frozenset(duplicates)
        self._has_duplicates = any(each[1] for each in found)
        self._first_number = members.job_numbers[ranks.rank] * _PARAMETERS_MAX
        self._clip_options = 0
        self._node = places.node
        self.moves_state = of_job.moves_state

    @property
    def of_job(self) -> NodeAgreement:
        return self._of_job

    @property
    def spans_jobs(self) -> bool:
        return True

    def note_layout(self, names: Sequence[str]) -> None:
        self._clipping.note_layout(
            names,
            first_number=self._first_number,
            duplicates=self._duplicates,
            needs_sums=self._has_duplicates,
        )

    def check_spec(self, spec: SessionSpec) -> None:
        self._differences.note_spec(spec)
        error: Exception | None = None
        try:
            self._of_job.check_spec(spec)
        except Exception as failure:
            error = failure
        self.agree(error)

    def settle(self, spec: SessionSpec) -> None:
        """Does it for all jobs, whose state moves before if that of any job does. Collective."""
        if self.any_rank(self._of_job.moving is not None):
            self._settle_before_moves(spec)
            # A loss of power afterwards finds all jobs at one step.
            self.on_all(lambda: self._make_durable(spec))
            self.on_all(lambda: self._move(spec))
        refuse_misplaced(
            self.on_first,
            spec,
            self._node,
            lambda: self._position(spec),
            is_embedded=_is_embedded(spec),
        )
        super().settle(spec)

    def _make_durable(self, spec: SessionSpec) -> None:
        moving = self._of_job.moving

        def make() -> None:
            if moving is None or moving.position_before(spec)[0] is not None:
                make_present_step_durable(spec)

        self._of_job.on_first(make)

    def _move(self, spec: SessionSpec) -> None:
        if self._of_job.moving is not None:
            self._of_job.moving.move(spec)

    def _settle_before_moves(self, spec: SessionSpec) -> None:
        """Brings all jobs to one step where their state is."""
        for _ in range(ROUNDS_MAX):
            found = self.on_first(lambda: self._before_moves(spec))
            positions = [position for position, _, _ in found]
            parts = [
                kind if part is None else (job, part)
                for kind, job, (_, part, _) in zip(self._kinds or (), self._jobs, found)
            ]
            try:
                verdicts = self._resolve(positions, parts, [moves for _, _, moves in found])
            except resolution.Unresolvable as error:
                raise errors.FailedPreconditionError(
                    f'job "{spec.job}" and those of its norm_group: {error}'
                ) from None
            if not verdicts:
                return
            self.bring(spec, positions, verdicts)
        raise errors.AbortedError(
            f'the nodes of job "{spec.job}" and of those of its norm_group do not settle: other'
            " ranks still take steps of them"
        )

    def _before_moves(self, spec: SessionSpec) -> tuple[Position | None, int | None, bool]:
        """Returns how far what this unit has of its job is, which part it is (None: the unit's
        own), and whether the job's state moves, so that the unit may have nothing."""
        moving = self._of_job.moving
        if moving is None:
            return self._position(spec), None, False
        return *moving.position_before(spec), True

    def check_attached(self, session: Session) -> None:
        """Raises, on all ranks, when jobs are at other steps or have other loss scales, or nodes of
        one job are in other phases. Collective."""
        error: Exception | None = None
        try:
            self._of_job.check_attached(session)
        except Exception as failure:
            error = failure
        self.agree(error)
        facts: dict[Any, Any] = {
            "committed step": session.committed_step,
            "loss scaler": session.loss_scaler_state() or session.loss_scale,
        }
        self._check_alike(facts)

    def check_parameters(self, keys: Sequence[Hashable], tensors: Sequence[torch.Tensor]) -> None:
        error: Exception | None = None
        try:
            if self._is_on_several_nodes:
                self._of_job.check_parameters(keys, tensors)
        except Exception as failure:
            error = failure
        self.agree(error)

    def note_options(
        self, hyperparams: Any, loss_scale: float, how: dict[str, Any]
    ) -> dict[str, Any]:
        if self._has_duplicates and how["norm_type"] == 1:
            raise errors.UnimplementedError(
                "norm_type=1 cannot be had with norm_duplicates: daemons say each parameter's sum"
                " of squares, and not of magnitudes, so that duplicates would be counted. Take"
                " norm_type 2 or infinity"
            )
        # Options of the groups are the job's own; what all jobs clip by is the same for all.
        clip = (loss_scale, how["max_norm"], how["norm_type"])
        self._clip_options = hash_of(repr(clip).encode())
        return super().note_options(hyperparams, loss_scale, how)

    def of_all_shards(self, fetch: Callable[[], list[Any]]) -> list[Any]:
        """Does it for this rank's job alone."""
        return self._of_job.of_all_shards(fetch)

    def _positions(self, spec: SessionSpec) -> list[Position | None]:
        return self.on_first(lambda: self._position(spec))

    def _position(self, spec: SessionSpec) -> Position | None:
        if _is_embedded(spec):
            return None
        copies = self._of_job._copies
        return position_of(spec) if copies is None else copies.position(spec)

    def _clip_numbers(self) -> list[int]:
        return [self._clip_options]

    def _decide(self, votes: Sequence[Step | None]) -> Verdict:
        return resolution.decide(votes, self._kinds_of_votes, self._jobs_of_votes)

    def _resolve(
        self,
        positions: Sequence[Position | None],
        parts: Sequence[Hashable] | None = None,
        may_lack: Sequence[bool] = (),
    ) -> dict[int, Verdict]:
        """parts: what each unit holds; None: as it is going to be. may_lack: of each unit, whether
        it needs to have nothing; empty: no unit moves."""
        # A unit that gets its job from another one takes part when it has it.
        assert self._kinds is not None
        kinds: Sequence[Hashable] = self._kinds if parts is None else parts
        had = {kind for kind, position in zip(kinds, positions) if position is not None}
        moves = may_lack or [False] * len(positions)
        there = [
            unit
            for unit, position in enumerate(positions)
            if position is not None
            or not (moves[unit] or (self._can_be_copied[unit] and kinds[unit] in had))
        ]
        verdicts = resolution.resolve(
            [positions[unit] for unit in there],
            [self._places.nodes[unit] for unit in there],
            [kinds[unit] for unit in there],
            [self._jobs[unit] for unit in there],
        )
        return {there[place]: verdict for place, verdict in verdicts.items()}

    def _give(self, spec: SessionSpec, positions: Sequence[Position | None]) -> bool:
        copies = self._of_job._copies
        work = None
        if copies is not None:
            work = copies.giving(spec, [positions[unit] for unit in self._units])
        if not self._ranks.any(work is not None):
            return False
        error: Exception | None = None
        try:
            is_over = False
            while not is_over:
                left = 0
                try:
                    if work is not None:
                        next(work)
                        left = 1
                except StopIteration:
                    work = None
                except Exception as failure:
                    error, left = failure, -1
                everyones = [of_rank[0] for of_rank in self._ranks.gather_numbers([left])]
                is_over = min(everyones) < 0 or not any(everyones)
        finally:
            if work is not None:
                work.close()  # some other job was not copied, so that none is
        self.agree(error)
        return True

    def _note_step(self) -> None:
        self._of_job._note_step()


def _is_embedded(spec: SessionSpec) -> bool:
    """Returns whether the daemon begins with the session, so that it has no job yet."""
    return (spec.endpoint or os.environ.get("OPTSTATE_ENDPOINT")) == "embedded"


def _check_duplicates(
    members: NormMembers, found: Sequence[tuple[Sequence[str], Sequence[tuple[str, tuple]]]]
) -> None:
    of_jobs: dict[int, Sequence[str]] = {}
    for rank, (job, (duplicates, _)) in enumerate(zip(members.job_numbers, found)):
        if of_jobs.setdefault(job, duplicates) != duplicates:
            raise ValueError(
                f"ranks of {members.places.names[rank]} give other norm_duplicates than each other:"
                " give all ranks of a job the same"
            )
    for rank, (job, (duplicates, shapes)) in enumerate(zip(members.job_numbers, found)):
        counted = {
            shape
            for other, (theirs, of_other) in zip(members.job_numbers, found)
            if other != job
            for name, shape in of_other
            if name not in theirs
        }
        for name, shape in shapes:
            if name in duplicates and shape not in counted:
                raise ValueError(
                    f'parameter "{name}" {list(shape)} of {members.places.names[rank]} is one of'
                    " norm_duplicates, and no other job of norm_group counts a parameter of this"
                    " shape: leave it out in one job, so that it is counted once"
                )
