"""Which part of which run a node's job is: a name in its layout says it.

Nothing else in the daemons' files tells jobs of one run from those of another run of the same name
and step, when each node holds other shards: their digests differ anyway. So the layout of a
node's job begins with a parameter without elements, whose name identifies the run, the node's
part in it, and the number of nodes. Nodes that hold the same shards have the same part, because
their digests, which depend on the layout, are compared.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from optstate import _native
from optstate._torch.nodes.agreement import NodeAgreement
from optstate._torch.nodes.moves.mover import Mover
from optstate._torch.nodes.part_names import Part, part_of
from optstate._torch.nodes.places import Places
from optstate._torch.ranks import Ranks
from optstate._torch.settings import Settings
from optstate._torch.shards import Layout, exchange
from optstate.session_spec import ParameterSpec, SessionSpec, Shard

__all__ = ["Part", "exchange_on_nodes", "find_whole_job", "part_of"]


def exchange_on_nodes(
    ranks: Ranks,
    places: Places,
    make_mine: Callable[[], Sequence[ParameterSpec]],
    describe: Callable[[int], str],
    in_layout: Callable[[Layout], Layout],
    settings: Settings,
    job: str | None,
    *,
    settles_later: bool,
) -> tuple[Layout, NodeAgreement]:
    """Does exchange(), and names this node's part in the layout when there are several nodes.
    Returns what the nodes agree by too, which moves the job's state to these nodes and ranks before
    they attach, where it is on others. Collective.

    in_layout: what becomes of the layout then. job: None: it is a new one of a unique name.
    settles_later: as for Mover.find(). FailedPreconditionError, on all ranks: the jobs that the
    nodes have are not the parts of one run, or not all of them.
    """
    layout = exchange(ranks, places, make_mine, describe)
    agreement = NodeAgreement(ranks, places, layout.kinds)
    layout = in_layout(layout)
    if settings.across_nodes == "sharded":
        layout = _named(
            layout, ranks, places, agreement, settings, job, settles_later=settles_later
        )
    return layout, agreement


def find_whole_job(
    ranks: Ranks,
    places: Places,
    agreement: NodeAgreement,
    settings: Settings,
    job: str,
    *,
    settles_later: bool,
) -> None:
    """Does what exchange_on_nodes() does about a job that is on one node, and not cut."""
    mover = Mover(ranks, places, agreement)
    mover.find(_address(settings, job), [None], None, settles_later=settles_later)


def _address(settings: Settings, job: str) -> SessionSpec:
    return SessionSpec(
        job=job,
        optimizer=0,
        group_options=(),
        parameters=(),
        endpoint=settings.endpoint,
        connect_timeout_s=settings.connect_timeout or 0,
    )


def _named(
    layout: Layout,
    ranks: Ranks,
    places: Places,
    agreement: NodeAgreement,
    settings: Settings,
    job: str | None,
    *,
    settles_later: bool,
) -> Layout:
    count = len(places.nodes)
    run = ranks.from_first(secrets.token_hex(8))
    parts = [Part(run, kind + 1, count) if places.several else None for kind in layout.kinds]
    if job is not None:
        mover = Mover(ranks, places, agreement)
        address = _address(settings, job)
        found = mover.find(address, parts, layout.parameters, settles_later=settles_later)
        run = found or run
    part = parts[places.node_of[places.rank]]
    if part is None:
        return layout
    mark = ParameterSpec(
        name=part._replace(run=run).name,
        shape=(0, 0),  # Muon takes only matrices
        numel=0,
        dtype=_native.FLOAT32,
        gradient_dtype=_native.FLOAT32,
        group=0,
        shard=Shard(0, (0, 0), (0, 0)),
    )
    return layout._replace(
        parameters=[mark, *layout.parameters], held=[index + 1 for index in layout.held]
    )
