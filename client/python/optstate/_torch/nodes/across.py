"""Which jobs can be had on several nodes."""

from __future__ import annotations

from optstate import errors
from optstate._torch.nodes.places import Places
from optstate._torch.settings import Settings
from optstate._torch.zero_options import refusal_on_nodes


def check_across_nodes(settings: Settings, places: Places, *, is_sharded: bool) -> None:
    """Raises, on every rank alike, when a job cannot be had on these nodes."""
    if not places.several:
        return
    count = len(places.nodes)
    if settings.overlaps_with_ddp:
        raise refusal_on_nodes(f"ranks on {count} nodes")
    if settings.across_nodes is None:
        raise errors.UnimplementedError(
            f"the ranks run on {count} nodes, each with a daemon of its own: say"
            ' across_nodes="replicated", so that every node takes the same steps with the same,'
            ' averaged gradients, or "sharded" when each node holds a part of the state. (Nodes'
            " are told apart by the kernel's boot id or $OPTSTATE_NODE.)"
        )
    if is_sharded and settings.across_nodes == "replicated":
        raise errors.UnimplementedError(
            f'the parameters are sharded (DTensors, or partition="local"), and the ranks run on'
            f' {count} nodes: say across_nodes="sharded", which has each node\'s daemon keep the'
            " shards of its ranks"
        )
    if settings.reduction == "daemon":
        raise ValueError(
            f'reduction="daemon" sums the ranks of one node, and the job is on {count}: leave it'
            " out, with gradients averaged over all ranks (DistributedDataParallel)"
        )
    if settings.speculative:
        raise ValueError("speculative=True cannot be had on several nodes: leave it out")
    places.check_even()
