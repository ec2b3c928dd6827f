"""Norms of gradients: by parameter, and of all nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def combined_norm(norms: Sequence[float], norm_type: float) -> float:
    """Returns the norm of all nodes' gradients from the nodes' norms, which are put together in
    the order of the nodes: the last bits may depend on how many there are."""
    if norm_type == math.inf:
        return math.nan if any(map(math.isnan, norms)) else max(norms)
    if norm_type == 1:
        return sum(norms)
    return math.sqrt(sum(norm * norm for norm in norms))


def norms_by_name(of_shards: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns the L2 norms of whole parameters from those of their shards; -1: no gradient."""
    squares: dict[str, float] = {}
    for name, norm in of_shards:
        if norm != -1:
            squares[name] = squares.get(name, 0.0) + norm * norm
    return {name: math.sqrt(square) for name, square in squares.items()}
