"""The norm by which nodes that hold different parameters clip a step together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optstate import errors
from optstate._torch.gradients.norms import clip_coefficient, combined_norm, sum_in_layout_order
from optstate._torch.ranks import Ranks
from optstate.held_session import HeldSession
from optstate.job_position import NodesNorm
from optstate.session import Session, StepOutcome

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
        self._numbers: list[int] = []
        self._norm_type, self._max_norm, self._grad_scale = 2.0, 0.0, 1.0
        self._norms: Sequence[float] = ()

    def note_layout(self, names: Sequence[str]) -> None:
        """Notes what this node's shards are of. All nodes have the same parameters in one order,
        of some perhaps a shard without elements."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self._numbers = [numbers[name] for name in names]

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
        ranks. Collective when a step is to be clipped by a 2-norm: the sums of squares by
        parameter then give the bits that one node would have.

        outcome: of the step that is prepared on all nodes, or found taken on this one.
        """
        if not self._max_norm or self._norm_type != 2:
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
        found = self._ranks.gather((taken, sums))
        if error is not None:
            raise error
        for of_rank, _ in found:
            if of_rank is not None:
                return of_rank
        of_kinds = [found[rank][1] for rank in self._kind_ranks]
        if None in of_kinds:
            raise errors.UnavailableError("the daemon of another node has lost its sums of squares")
        norm = math.sqrt(sum_in_layout_order(of_kinds)) / self._grad_scale
        return NodesNorm(norm, clip_coefficient(self._max_norm, norm))

    def _sums_of(self, session: Session) -> _Sums:
        assert isinstance(session, HeldSession)
        return list(zip(self._numbers, session.prepared_sums(len(self._numbers))))
