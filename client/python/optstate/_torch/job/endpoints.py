"""Which daemon each rank means, so far as it can be told before anything is opened.

Ranks that share a node share its daemon, which the first of them finds: another endpoint that one
of them names would be passed over in silence. Nodes do not share one: a daemon has one job of a
name, whose ranks the second node would take to be somebody else's.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from optstate import errors
from optstate._torch.nodes.places import Places

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


class DaemonAddress(NamedTuple):
    """A daemon, as one rank names it."""

    asked: str  # as the script or the environment say it; empty: the one that is found
    identity: Hashable  # equal where it is surely one daemon; None: nobody knows before


def address_of(endpoint: str | None, *, is_private: bool) -> DaemonAddress:
    """Returns the daemon that `endpoint` means on this machine.

    is_private: the job has no name, so that a daemon is begun where none answers.
    """
    asked = endpoint or os.environ.get("OPTSTATE_ENDPOINT") or ""
    if asked == "embedded":  # each node's first rank begins one
        return DaemonAddress(asked, None)
    where = asked[len("grpc:") :] if asked.startswith("grpc:unix:") else asked
    if where.startswith("unix:"):
        path = where[len("unix:") :]
        return DaemonAddress(asked, _socket(path) or (_machine(), _namespace("mnt"), path))
    if where:
        return DaemonAddress(asked, (_machine(), _namespace("net"), where))
    found = None if is_private else next(filter(None, map(_socket, _default_sockets())), None)
    return DaemonAddress(asked, found)


def check_endpoints(addresses: Sequence[DaemonAddress], places: Places) -> None:
    """Raises FailedPreconditionError, on every rank alike, when ranks of one node name different
    daemons, or several nodes one.

    addresses: by rank.
    """
    for node in places.nodes:
        named = [rank for rank in places.ranks_of(node) if addresses[rank].asked]
        for rank in named[1:]:
            if not _are_one(addresses[rank], addresses[named[0]]):
                raise errors.FailedPreconditionError(
                    f"ranks of one node ({node}) name different daemons:"
                    f' "{addresses[named[0]].asked}" on rank {named[0]}, and'
                    f' "{addresses[rank].asked}" on rank {rank}. The ranks of a node share one:'
                    " give all of them the same endpoint= (or $OPTSTATE_ENDPOINT). Where they are"
                    " to be several nodes on one machine, each with a daemon of its own, set"
                    " $OPTSTATE_NODE to another name for the ranks of each"
                )
    found: dict[Hashable, str] = {}
    for node, rank in zip(places.nodes, places.first_ranks):
        asked, identity = addresses[rank]
        other = node if identity is None else found.setdefault(identity, node)
        if other != node:
            which = f'"{asked}"' if asked else "the machine's, as no endpoint is given"
            raise errors.FailedPreconditionError(
                f"nodes {other} and {node} share one daemon ({which}), and each node needs a daemon"
                " of its own. On one machine, start another one (optstated --socket PATH"
                " --state-dir DIRECTORY), and give the ranks of each node its own endpoint"
                " ($OPTSTATE_ENDPOINT=unix:PATH). Ranks that are to share a daemon are one node:"
                " give them one name ($OPTSTATE_NODE), or none"
            )


def _are_one(one: DaemonAddress, other: DaemonAddress) -> bool:
    is_known = one.identity is not None and one.identity == other.identity
    return is_known or one.asked == other.asked


def _socket(path: str) -> Hashable | None:
    """Returns what tells a socket from all others; None: it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return _machine(), found.st_dev, found.st_ino


def _default_sockets() -> Sequence[str]:
    """Returns where a daemon is looked for without an endpoint; client/README.md has it."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    own = f"{folder}/optstate" if folder else f"/tmp/optstate-{os.getuid()}"
    return "/run/optstate/optstated.sock", f"{own}/optstated.sock"


def _machine() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _namespace(kind: str) -> int:
    """Returns a number of this process's namespace, which containers have of their own."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0
