"""The norm by which nodes that hold different parameters clip a step together."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from optstate import _native, errors
from optstate._torch.gradients.norms import clip_coefficient, combined_norm, sum_in_layout_order
from optstate._torch.ranks import Ranks
from optstate.job_position import NodesNorm
from optstate.session import Session, StepOutcome, fetch_numbers

# For each shard of a node, in order, the number of its parameter, and its sum of squares.
_Sums = list[tuple[int, float]]


class Clipping:
    """How the step under way is clipped.

    Threads: one at a time. Collective: norm_of_all().
    """

    def __init__(self, ranks: Ranks, kind_ranks: Sequence[int]) -> None:
        """kind_ranks: one rank for each set of parameters that nodes hold, in order."""
        self._ranks = ranks
        self._kind_ranks = kind_ranks
        self._numbers: list[int | None] = []
        self._needs_sums = False
        self._norm_type, self._max_norm, self._grad_scale = 2.0, 0.0, 1.0
        self._norms: Sequence[float] = ()

    def note_layout(
        self,
        names: Sequence[str],
        *,
        first_number: int = 0,
        duplicates: Collection[str] = (),
        needs_sums: bool = False,
    ) -> None:
        """Notes what this node's shards are of. All nodes of a job have the same parameters in one
        order, of some perhaps a shard without elements.

        first_number: of the job's parameters, in the order in which sums are added. duplicates:
        parameters that another job counts. needs_sums: some job has such ones, and the norm that
        its daemon has found counts them too.
        """
        numbers = {
            name: None if name in duplicates else first_number + number
            for number, name in enumerate(dict.fromkeys(names))
        }
        self._numbers = [numbers[name] for name in names]
        self._needs_sums = needs_sums

    def note_options(
        self, *, max_norm: float, norm_type: float, grad_scale: float, **_: Any
    ) -> None:
        """Notes how the next step is to be clipped, as Session.commit() takes it."""
        self._norm_type, self._max_norm, self._grad_scale = norm_type, max_norm, grad_scale

    def note_norms(self, norms: Sequence[float]) -> None:
        """Notes the norm that each of kind_ranks has found of its node's gradients."""
        self._norms = norms

    def combined_norm(self) -> float:
        """Returns the norm of all nodes' gradients from those of the nodes."""
        return combined_norm(self._norms, self._norm_type)

    def norm_of_all(self, session: Session, outcome: StepOutcome) -> NodesNorm:
        """Returns the norm of all nodes' gradients, and the clip coefficient, the same on all
        ranks. Collective when a step is to be clipped by a 2-norm, or some parameters are
        duplicates: the sums of squares by parameter then give the bits that one node would have.

        outcome: of the step that is prepared on all nodes, or found taken on this one.
        """
        if self._norm_type != 2 or not (self._max_norm or self._needs_sums):
            norm = self.combined_norm()
            return NodesNorm(norm, clip_coefficient(self._max_norm, norm))
        sums: _Sums | None = None
        taken: NodesNorm | None = None
        error: Exception | None = None
        try:
            if outcome.prepared:
                sums = self._sums_of(session)
            else:
                taken = NodesNorm(outcome.gradient_norm, outcome.clip_coefficient)
        except errors.FailedPreconditionError:
            error = errors.UnavailableError(
                f"step {outcome.step} is prepared here by an engine that has died since, and the"
                " sums of squares that clip the step are gone with it. Nothing is lost: construct"
                " the optimizer anew on all ranks of all nodes, which drops the step, and take it"
                " again"
            )
        except Exception as failure:
            error = failure
        found = self._ranks.gather((taken, sums, self._grad_scale))
        if error is not None:
            raise error
        for of_rank, _, _ in found:
            if of_rank is not None:
                return of_rank
        of_kinds = [found[rank][1] for rank in self._kind_ranks]
        if None in of_kinds:
            raise errors.UnavailableError("the daemon of another node has lost its sums of squares")
        norm = _unscaled_norm(of_kinds, [found[rank][2] for rank in self._kind_ranks])
        return NodesNorm(norm, clip_coefficient(self._max_norm, norm))

    def _sums_of(self, session: Session) -> _Sums:
        # Sums of squares that are not unscaled; -1: there is no gradient.
        sums = fetch_numbers(session, _native.PREPARED_SUM, len(self._numbers))
        return [(number, each) for number, each in zip(self._numbers, sums) if number is not None]


def _unscaled_norm(of_kinds: Sequence[_Sums], scales: Sequence[float]) -> float:
    """Returns the norm of all gradients, unscaled. Jobs of their own may have other scales than
    each other, as when the daemon averages the gradients of their ranks, which are not equally
    many."""
    if len(set(scales)) == 1:
        return math.sqrt(sum_in_layout_order(of_kinds)) / scales[0]
    return math.sqrt(
        sum_in_layout_order(
            [
                [(number, each / scale / scale if each >= 0 else each) for number, each in sums]
                for sums, scale in zip(of_kinds, scales)
            ]
        )
    )
