"""Whole parameters that several nodes share out, as ZeRO does with optimizer state: of each, one
node's daemon has the state and updates it, and then the other nodes get its values.

On the other nodes such a parameter is *elsewhere*: their layouts have a part of it without
elements (see shards.py), so that everything else is as with shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optstate import errors
from optstate._torch.collective.averaging import buckets_of
from optstate._torch.nodes.places import Places
from optstate._torch.ranks import Ranks
from optstate._torch.shards import Layout, is_shard, keep_elsewhere
from optstate.session_spec import Shard


def owners_of(numels: Sequence[int], node_count: int) -> list[int]:
    """Returns the node of each parameter: the one that has the fewest elements so far.

    In their order, so that parameters which are added later change none.
    """
    loads = [0] * node_count
    owners = []
    for numel in numels:
        owner = loads.index(min(loads))
        loads[owner] += numel
        owners.append(owner)
    return owners


class SharedOut:
    """The parameters of an optimizer that the nodes have shared out.

    Threads: one at a time. Collective: spread() and consolidate().
    """

    def __init__(
        self, ranks: Ranks, places: Places, tensors: Sequence[torch.Tensor], names: Sequence[str]
    ) -> None:
        """Chooses an owner for each tensor that is no shard, which are the same on all ranks.

        UnimplementedError: a parameter without dimensions has no part without elements.
        """
        self._ranks = ranks
        self._first_ranks = places.first_ranks
        self._here = places.node_of[places.rank]
        mine = [(name, tensor) for name, tensor in zip(names, tensors) if not is_shard(tensor)]
        for name, tensor in mine:
            if not tensor.dim():
                raise errors.UnimplementedError(
                    f'parameter "{name}" has no dimensions, and across_nodes="sharded" cannot give'
                    ' it to one node: make it one of shape [1], or say "replicated"'
                )
        self.tensors = [tensor for _, tensor in mine]
        self.names = [name for name, _ in mine]
        self.owners = owners_of([each.numel() for each in self.tensors], len(places.nodes))
        self._elsewhere = [
            tensor for tensor, owner in zip(self.tensors, self.owners) if owner != self._here
        ]
        keep_elsewhere(self._elsewhere, True)
        # The state of all nodes, until it changes; None: not asked for.
        self._consolidated: dict[Any, Any] | None = None

    def in_layout(self, layout: Layout) -> Layout:
        """Returns this node's layout with parameters that are elsewhere as whole ones without
        elements, which optimizers that need whole parameters take too."""
        elsewhere = {name for name, owner in zip(self.names, self.owners) if owner != self._here}
        parameters = [
            spec._replace(shard=Shard(0, spec.shape, (0,) * len(spec.shape)))
            if spec.name in elsewhere
            else spec
            for spec in layout.parameters
        ]
        return layout._replace(parameters=parameters)

    def destinations(self) -> dict[torch.Tensor, int]:
        """Returns, by parameter, the rank that pushes its gradient: the first of the owner."""
        return {
            tensor: self._first_ranks[owner] for tensor, owner in zip(self.tensors, self.owners)
        }

    def end(self) -> None:
        """Makes the parameters whole ones again. Idempotent."""
        keep_elsewhere(self._elsewhere, False)
        self._elsewhere = []

    @torch.no_grad()
    def spread(self) -> None:
        """Gives all nodes the values that the owners have: one broadcast for each run of a node's
        parameters of one dtype and device."""
        self.forget_state()
        for owner, first_rank in enumerate(self._first_ranks):
            owned = [each for each, node in zip(self.tensors, self.owners) if node == owner]
            for bucket in buckets_of(owned):
                flat = torch.cat([each.detach().reshape(-1) for each in bucket])
                self._ranks.replicate(flat, first_rank)
                if owner == self._here:
                    continue
                parts = flat.split([each.numel() for each in bucket])
                for tensor, part in zip(bucket, parts):
                    tensor.copy_(part.view_as(tensor))

    def forget_state(self) -> None:
        """Forgets what consolidate() gathered, which has changed."""
        self._consolidated = None

    def complete_state(self) -> dict[Any, dict[str, Any]]:
        """Returns what consolidate() gathered. RuntimeError: nothing, or not for this rank."""
        if self._consolidated is None:
            raise RuntimeError(
                "each node has the state of other parameters: call consolidate_state_dict() on all"
                " ranks before state_dict() or a copy; to=None gives it to all of them"
            )
        return self._consolidated

    def consolidate(self, state: dict[Any, dict[str, Any]], to: int | None) -> None:
        """Keeps state with the entries that other nodes have, on rank `to` (None: on all)."""
        found = dict(state)
        for owner, first_rank in enumerate(self._first_ranks):
            owned = [i for i, node in enumerate(self.owners) if node == owner]
            entries = None
            if owner == self._here:
                entries = {
                    i: dict(state[self.tensors[i]]) for i in owned if self.tensors[i] in state
                }
            entries = self._ranks.object_from(entries, first_rank)
            if owner != self._here:
                found.update({self.tensors[i]: entry for i, entry in entries.items()})
        self._consolidated = found if to is None or to == self._ranks.rank else None
