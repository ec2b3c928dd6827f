"""Which ranks share a node."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence


def node_name() -> str:
    """Returns a name of this node that differs between nodes: $OPTSTATE_NODE, else the kernel's
    boot id, which all containers of a machine share."""
    chosen = os.environ.get("OPTSTATE_NODE")
    if chosen:
        return chosen
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclasses.dataclass(frozen=True)
class Places:
    """This rank's place on its node, and the nodes of all ranks."""

    names: Sequence[str]  # of the node, by rank
    rank: int

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, in the order of their first ranks."""
        return list(dict.fromkeys(self.names))

    @property
    def several(self) -> bool:
        return len(self.nodes) > 1

    @property
    def node_of(self) -> list[int]:
        """The place in `nodes` of each rank's node."""
        number_of = {node: number for number, node in enumerate(self.nodes)}
        return [number_of[name] for name in self.names]

    def ranks_of(self, node: str) -> list[int]:
        return [rank for rank, name in enumerate(self.names) if name == node]

    @property
    def node(self) -> str:
        return self.names[self.rank]

    @property
    def local_rank(self) -> int:
        return self.ranks_of(self.node).index(self.rank)

    @property
    def local_world_size(self) -> int:
        return len(self.ranks_of(self.node))

    @property
    def first_rank(self) -> int:
        """The first rank on this node."""
        return self.ranks_of(self.node)[0]

    @property
    def first_ranks(self) -> list[int]:
        """The first rank on each node, in the order of `nodes`."""
        return [self.ranks_of(node)[0] for node in self.nodes]

    def check_even(self) -> None:
        """Raises ValueError when the nodes have other numbers of ranks."""
        counts = {node: len(self.ranks_of(node)) for node in self.nodes}
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{node}: {count}" for node, count in counts.items())
            raise ValueError(f"nodes of one job have equally many ranks, but here ({said})")
