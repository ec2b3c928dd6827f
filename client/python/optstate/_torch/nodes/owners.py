"""Parameters that several nodes share out, as ZeRO does with optimizer state: of each, one node's
daemon has the state and updates it, and then the other nodes get its values. With
partition="contiguous" a parameter may be cut, and several nodes have some of its rows.

A node's layout has of each such parameter the rows that it has, perhaps none (see shards.py), so
that everything else is as with shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from optstate import errors
from optstate._torch.collective.averaging import Destination, buckets_of
from optstate._torch.nodes.places import Places
from optstate._torch.ranks import Ranks
from optstate._torch.shards import Layout, forget_rows, is_shard, keep_rows
from optstate._torch.tensors import increment_versions
from optstate.session_spec import Shard


class Share(NamedTuple):
    """Rows [begin, end) of a parameter, by its first dimension, which a node has."""

    node: int
    begin: int
    end: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.begin : self.end]


# Smaller parameters share a broadcast, larger ones are not copied for it.
_LARGE_BYTES = 1 << 20
_AT_A_TIME_BYTES = 256 << 20


class _Bucket(NamedTuple):
    """Rows of a node's parameters that are sent together."""

    node: int
    first_rank: int
    parts: list[torch.Tensor]

    @property
    def numel(self) -> int:
        return sum(rows.numel() for rows in self.parts)

    def flat(self, *, is_sender: bool) -> torch.Tensor:
        """Returns what is sent, or where it arrives; the rows themselves if they are contiguous."""
        first = self.parts[0]
        if len(self.parts) == 1:
            return first.contiguous().view(-1)
        if is_sender:
            return torch.cat([rows.reshape(-1) for rows in self.parts])
        return first.new_empty(self.numel)

    def take(self, flat: torch.Tensor) -> None:
        """Gives the parameters what has arrived."""
        if flat.data_ptr() == self.parts[0].data_ptr():
            increment_versions(self.parts)  # it has arrived there
            return
        for rows, part in zip(self.parts, flat.split([each.numel() for each in self.parts])):
            rows.copy_(part.view(rows.shape))


def _at_a_time(buckets: Sequence[_Bucket]) -> Iterator[list[_Bucket]]:
    """Yields runs of buckets whose broadcasts are started together: a backend may have copies of
    all that are under way."""
    some: list[_Bucket] = []
    size = 0
    for bucket in buckets:
        some.append(bucket)
        size += bucket.numel * bucket.parts[0].element_size()
        if size >= _AT_A_TIME_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


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


def runs_of(shapes: Sequence[Sequence[int]], node_count: int) -> list[list[Share]]:
    """Cuts parameters, one behind the other, into a run of about as many elements for each node,
    at the nearest rows. Returns the shares of each parameter, which is at least one."""
    numels = [torch.Size(shape).numel() for shape in shapes]
    total = sum(numels)
    shares: list[list[Share]] = []
    begin_of_parameter = 0
    for shape, numel in zip(shapes, numels):
        rows = shape[0]
        cuts = [0]
        for node in range(1, node_count):
            border = total * node / node_count - begin_of_parameter
            cut = round(border * rows / numel) if numel else 0
            cuts.append(min(max(cut, cuts[-1]), rows))
        cuts.append(rows)
        found = [
            Share(node, begin, end)
            for node, (begin, end) in enumerate(zip(cuts, cuts[1:]))
            if begin < end
        ]
        shares.append(found or [Share(0, 0, rows)])
        begin_of_parameter += numel
    return shares


class SharedOut:
    """The parameters of an optimizer that the nodes have shared out.

    Threads: one at a time. Collective: spread() and consolidate().
    """

    def __init__(
        self,
        ranks: Ranks,
        places: Places,
        groups: Sequence[Sequence[torch.Tensor]],
        names: Sequence[str],
        *,
        cuts: bool,
    ) -> None:
        """Chooses an owner for each tensor that is no shard, which are the same on all ranks.

        cuts: each group is cut into runs, so that groups which are added later change none; else
        no parameter is cut. UnimplementedError: a parameter without dimensions has no rows.
        """
        self._ranks = ranks
        self._first_ranks = places.first_ranks
        self._here = places.node_of[places.rank]
        counted = iter(enumerate(names))
        named = [[(*next(counted), tensor) for tensor in group] for group in groups]
        mine = [[each for each in group if not is_shard(each[2])] for group in named]
        self.names = [name for group in mine for _, name, _ in group]
        self.tensors = [tensor for group in mine for *_, tensor in group]
        for name, tensor in zip(self.names, self.tensors):
            if not tensor.dim():
                raise errors.UnimplementedError(
                    f'parameter "{name}" has no dimensions, and across_nodes="sharded" cannot give'
                    ' it to one node: make it one of shape [1], or say "replicated"'
                )
        count = len(places.nodes)
        self.shares: list[list[Share]] = []
        if cuts:
            for group in mine:
                self.shares += runs_of([tensor.shape for *_, tensor in group], count)
        else:
            owners = owners_of([each.numel() for each in self.tensors], count)
            self.shares = [
                [Share(owner, 0, tensor.shape[0])] for owner, tensor in zip(owners, self.tensors)
            ]
        indices = [index for group in mine for index, *_ in group]
        # Among all parameters, those that several nodes have.
        self._cut = {index for index, shares in zip(indices, self.shares) if len(shares) > 1}
        self._token = object()
        self._shapes = [tensor.shape for tensor in self.tensors]
        for tensor, share in zip(self.tensors, map(self._share_here, self.shares)):
            rows = (0, 0) if share is None else (share.begin, share.end)
            is_whole = rows == (0, tensor.shape[0])
            keep_rows(tensor, None if is_whole else rows, by=self._token)
        # The state of all nodes, until it changes; None: not asked for.
        self._consolidated: dict[Any, Any] | None = None

    def _share_here(self, shares: Sequence[Share]) -> Share | None:
        return next((each for each in shares if each.node == self._here), None)

    def in_layout(self, layout: Layout) -> Layout:
        """Returns this node's layout with parameters that are elsewhere as whole ones without
        elements, which optimizers that need whole parameters take too."""
        elsewhere = {
            name
            for name, shares in zip(self.names, self.shares)
            if len(shares) == 1 and self._share_here(shares) is None
        }
        parameters = [
            spec._replace(shard=Shard(0, spec.shape, (0,) * len(spec.shape)))
            if spec.name in elsewhere
            else spec
            for spec in layout.parameters
        ]
        return layout._replace(parameters=parameters)

    def destinations(self) -> dict[torch.Tensor, list[Destination]]:
        """Returns, by parameter, the ranks that push its gradient: the first ones of the owners."""
        return {
            tensor: [Destination(self._first_ranks[node], *rows) for node, *rows in shares]
            for tensor, shares in zip(self.tensors, self.shares)
        }

    def end(self) -> None:
        """Makes the parameters what they were without this. Idempotent."""
        for tensor in self.tensors:
            forget_rows(tensor, by=self._token)

    def check_shapes(self) -> None:
        """Raises TypeError when a parameter has another shape than when they were shared out: its
        rows would be those of another one."""
        for name, tensor, shape in zip(self.names, self.tensors, self._shapes):
            if tensor.shape != shape:
                raise TypeError(
                    f'parameter "{name}" is now {list(tensor.shape)}, but the job has'
                    f" {list(shape)}: change the model before the optimizer is constructed, for a"
                    " job of another name"
                )

    def cut_among(self, indices: Sequence[int]) -> bytes:
        """Returns what identifies the parameters of these that several nodes have: the nodes
        compare of which they have no gradients, and so do not update their rows."""
        return b"".join(f"{index} ".encode() for index in sorted(indices) if index in self._cut)

    @torch.no_grad()
    def spread(self) -> None:
        """Gives all nodes the values that the owners have: a broadcast for each large parameter,
        and one for each run of a node's others of one dtype and device, many at the same time."""
        self.forget_state()
        buckets: list[_Bucket] = []
        for node, first_rank in enumerate(self._first_ranks):
            owned = [
                share.of(tensor.detach())
                for tensor, shares in zip(self.tensors, self.shares)
                for share in shares
                if share.node == node
            ]
            large = [rows for rows in owned if rows.numel() * rows.element_size() >= _LARGE_BYTES]
            small = [rows for rows in owned if rows.numel() * rows.element_size() < _LARGE_BYTES]
            for parts in [*([rows] for rows in large), *buckets_of(small)]:
                buckets.append(_Bucket(node, first_rank, parts))
        for some in _at_a_time(buckets):
            flats = [each.flat(is_sender=each.node == self._here) for each in some]
            sources = [each.first_rank for each in some]
            self._ranks.replicate_all(list(zip(flats, sources)))
            for bucket, flat in zip(some, flats):
                if bucket.node != self._here:
                    bucket.take(flat)

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

    def consolidate(
        self, state: dict[Any, dict[str, Any]], keys: Collection[str], to: int | None
    ) -> None:
        """Keeps state with the entries that other nodes have, on rank `to` (None: on all).

        keys: of the arrays and numbers of the optimizer's state; others are the script's own.
        FailedPreconditionError, on all ranks: nodes have updated their rows of a parameter
        differently often.
        """
        shared = set(self.tensors)
        found = {each: entry for each, entry in state.items() if each not in shared}
        for node, first_rank in enumerate(self._first_ranks):
            entries = None
            if node == self._here:
                entries = {
                    index: dict(state[tensor])
                    for index, tensor in enumerate(self.tensors)
                    if self._share_here(self.shares[index]) is not None and tensor in state
                }
            found_there = self._ranks.object_from(entries, first_rank)
            for index, tensor in enumerate(self.tensors):
                shares = self.shares[index]
                if all(share.node != node for share in shares):
                    continue
                entry = found_there.get(index)
                if node == shares[0].node:
                    if entry is not None:
                        found[tensor] = entry
                elif entry is not None or tensor in found:
                    self._join(found.get(tensor), entry, keys, self.names[index])
        self._consolidated = found if to is None or to == self._ranks.rank else None

    def _join(
        self,
        above: dict[str, Any] | None,
        entry: dict[str, Any] | None,
        keys: Collection[str],
        name: str,
    ) -> None:
        """Adds to the state of a parameter's rows that of the rows behind them, on another node.
        Both have the same numbers, such as the step count."""
        has = [None if each is None else each.keys() & keys for each in (above, entry)]
        if above is None or entry is None or has[0] != has[1]:
            raise _unlike(name)
        for key in keys & above.keys():
            one, other = above[key], entry[key]
            is_array = isinstance(one, torch.Tensor) and one.dim() > 0
            if is_array:
                above[key] = torch.cat([one, other])
            elif one != other:
                raise _unlike(name)


def _unlike(name: str) -> errors.FailedPreconditionError:
    return errors.FailedPreconditionError(
        f'parameter "{name}" is cut, and its nodes have updated their rows of it differently often:'
        " in some steps it had a gradient on some nodes alone. Begin again from a checkpoint, with"
        " gradients that are averaged over all ranks (DistributedDataParallel)"
    )
