"""Norms of gradients: by parameter, and of all nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from optstate.held_session import HeldSession

if TYPE_CHECKING:
    from optstate._torch.job.attachment import Attachment


def combined_norm(norms: Sequence[float], norm_type: float) -> float:
    """Returns the norm of all nodes' gradients from the nodes' norms, which are put together in
    the order of the nodes: the last bits may depend on how many there are."""
    if norm_type == math.inf:
        return math.nan if any(map(math.isnan, norms)) else max(norms)
    if norm_type == 1:
        return sum(norms)
    return math.sqrt(sum(norm * norm for norm in norms))


def clip_coefficient(max_norm: float, norm: float) -> float:
    """Returns that of torch.nn.utils.clip_grad_norm_, as the daemon does; max_norm 0: 1."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0


def sum_in_layout_order(of_nodes: Iterable[Iterable[tuple[int, float]]]) -> float:
    """Returns the sum of the squares of all nodes' gradients, added as one node with all shards
    adds them: parameter by parameter, and of each the shards in the order of the nodes.

    of_nodes: for each shard of a node, in order, the number of its parameter, and its sum; -1: it
    has no gradient.
    """
    shards = [shard for of_node in of_nodes for shard in of_node if shard[1] >= 0]
    total = 0.0
    for _, value in sorted(shards, key=lambda shard: shard[0]):
        total += value  # sum() rounds otherwise from Python 3.12 on
    return total


def norms_by_name(of_shards: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns the L2 norms of whole parameters from those of their shards; -1: no gradient."""
    squares: dict[str, float] = {}
    for name, norm in of_shards:
        if norm != -1:
            squares[name] = squares.get(name, 0.0) + norm * norm
    return {name: math.sqrt(square) for name, square in squares.items()}


def gradient_norms(attachment: Attachment) -> dict[str, float]:
    """Returns norms by name, without parameters that had no gradient in the last step.
    Collective with shards on several nodes."""
    session = attachment.session
    if not isinstance(session, HeldSession):
        return attachment.arrays.fetch_gradient_norms()
    names = [spec.name for spec in attachment.spec.parameters]

    def of_node() -> list[tuple[str, float]]:
        return list(zip(names, session.gradient_norms(len(names))))

    nodes = attachment.nodes
    return norms_by_name(of_node() if nodes is None else nodes.of_all_shards(of_node))
