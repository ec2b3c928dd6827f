"""State of flat pieces put together: for checkpoints that another number of ranks loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optstate._torch.flat_shards import flat_shard_of
from optstate.torch_optimizer import ServedOptimizer

# A rank's piece: where it begins, its size, and its entry of state_dict().
_Piece = tuple[int, int, dict[str, Any]]


def whole_state_dict(optimizer: ServedOptimizer) -> dict[str, Any]:
    """Returns an optimizer's state_dict() with whole arrays in place of those of flat pieces.

    An array of state of a piece becomes one of [global_numel], in the process's memory, on every
    rank. load_state_dict() takes it with any number of ranks and any pieces of the same tensors; so
    does torch's optimizer of the whole flat tensors. Other parameters' entries are as in
    state_dict(). A key of the script's own is put together too when it has the piece's shape, and
    is the lowest rank's otherwise.

    Collective. ValueError, on all ranks: the pieces of a tensor were not updated equally often.
    What state_dict() raises on one rank is raised on all.
    """
    attachment = optimizer._served.attached()
    with attachment.raised_on_all():
        found = optimizer.state_dict()
    states = found["state"]
    for index, tensor in enumerate(optimizer._served.tensors()):
        where = flat_shard_of(tensor)
        if where is None:
            continue
        mine = (where.begin, tensor.numel(), states.pop(index, {}))
        entry = _joined(attachment.ranks.gather(mine), where.global_numel, index)
        if entry:
            states[index] = entry
    return found


def _joined(pieces: Sequence[_Piece], numel: int, index: int) -> dict[str, Any]:
    present = [piece for piece in pieces if piece[1]] or pieces
    counts = {float(entry.get("step", bool(entry))) for _, _, entry in present}
    if len(counts) > 1:
        raise ValueError(
            f"the pieces of parameter {index} were updated {sorted(counts)} times: some ranks had"
            " no gradient of theirs. Save each rank's own state_dict() instead"
        )
    whole = dict(present[0][2])
    for key, value in whole.items():
        if isinstance(value, torch.Tensor) and value.shape == (present[0][1],):
            whole[key] = value.new_empty(numel, device="cpu")
            for begin, size, entry in present:
                whole[key][begin : begin + size] = entry[key]
    return whole
