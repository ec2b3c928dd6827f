"""Which part of which run a node's job is: a name in its layout says it.

Nothing else in the daemons' files tells jobs of one run from those of another run of the same name
and step, when each node holds other shards: their digests differ anyway. So the layout of a
node's job begins with a parameter without elements, whose name identifies the run, the node's
part in it, and the number of nodes. Nodes that hold the same shards have the same part, because
their digests, which depend on the layout, are compared.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from optstate import _native, _optctl, errors
from optstate._torch.nodes.agreement import NodeAgreement
from optstate._torch.nodes.places import Places
from optstate._torch.ranks import Ranks
from optstate._torch.settings import Settings
from optstate._torch.shards import Layout, exchange
from optstate.job_position import find_position
from optstate.session_spec import ParameterSpec, SessionSpec, Shard

_NAME = re.compile(r"optstate\.nodes/([0-9a-f]+)/(\d+)of(\d+)(@0)?")


class Part(NamedTuple):
    """A node's part in a run of several nodes: the first node, from 1 on, that holds the same."""

    run: str
    number: int
    count: int

    @property
    def name(self) -> str:
        return f"optstate.nodes/{self.run}/{self.number}of{self.count}"


def part_of(names: Sequence[str]) -> Part | None:
    """Returns what the names of a job's parameters say; None: a job of one node, or replicas."""
    found = _NAME.fullmatch(names[0]) if names else None
    return None if found is None else Part(found[1], int(found[2]), int(found[3]))


class _Found(NamedTuple):
    """A job that a node has."""

    part: Part | None
    step: int
    durable_step: int

    def __str__(self) -> str:
        if self.part is None:
            return f"a job without parts at step {self.step}"
        part = self.part
        text = f"part {part.number} of {part.count} of run {part.run} at step {self.step}"
        return text + (f", durable step {self.durable_step}" if self.durable_step else "")


def _ask(settings: Settings, job: str) -> _Found | None:
    """Returns the job that this node has; None: none."""
    if (settings.endpoint or os.environ.get("OPTSTATE_ENDPOINT")) == "embedded":
        return None  # that daemon begins with the session
    address = SessionSpec(
        job=job,
        optimizer=0,
        group_options=(),
        parameters=(),
        endpoint=settings.endpoint,
        connect_timeout_s=settings.connect_timeout or 0,
    )
    position = find_position(address)
    if position is None:
        return None
    parameters = _optctl.ask(settings.endpoint, "get", "params", job).get("parameters", [])
    if not parameters:
        return None
    part = part_of([each["parameter"]["name"] for each in parameters[:1]])
    return _Found(part, position.committed_step, position.durable_step)


def _missing(found: Sequence[_Found | None]) -> str:
    """Returns what to do about parts of a run that no node has; nothing when all are there."""
    parts = [each.part for each in found if each is not None and each.part is not None]
    if not parts or len({(part.run, part.count) for part in parts}) > 1:
        return ""
    count = parts[0].count
    lacking = sorted(set(range(1, count + 1)) - {part.number for part in parts})
    if not lacking:
        return ""
    which = ", ".join(map(str, lacking))
    step = max(each.step for each in found if each is not None)
    return (
        f" The run is on {count} nodes, and those of part {which} have no ranks here. Where their"
        f" daemons still run, start ranks on all of them: they go on from step {step}, or one"
        " after it. Another number of nodes takes a checkpoint that is saved there"
        " (consolidate_state_dict, dcp.save). A node that was rebooted is at its durable step; if"
        " it has none, its part is lost, and all go on from the last checkpoint."
    )


def exchange_on_nodes(
    ranks: Ranks,
    places: Places,
    make_mine: Callable[[], Sequence[ParameterSpec]],
    settings: Settings,
    job: str | None,
) -> tuple[Layout, NodeAgreement]:
    """Does exchange(), and names this node's part in the layout when there are several nodes.
    Returns what the nodes agree by too. Collective.

    job: None: it is a new one of a unique name. FailedPreconditionError, on all ranks: the jobs
    that the nodes have are not the parts of one run.
    """
    layout = exchange(ranks, places, make_mine)
    agreement = NodeAgreement(ranks, places, layout.kinds)
    if settings.across_nodes == "sharded":
        layout = _named(layout, ranks, places, agreement, settings, job)
    return layout, agreement


def _named(
    layout: Layout,
    ranks: Ranks,
    places: Places,
    agreement: NodeAgreement,
    settings: Settings,
    job: str | None,
) -> Layout:
    nodes = places.nodes
    run = ranks.from_first(secrets.token_hex(8))
    expected = [Part(run, kind + 1, len(nodes)) for kind in layout.kinds]
    if job is not None:
        found = agreement.on_first(lambda: _ask(settings, job))
        known = next((each.part.run for each in found if each and each.part), None)
        if known is not None:
            expected = [part._replace(run=known) for part in expected]
        # A node without the job is for the rules of resolution, which say how far the others are.
        wrong = [
            node
            for node, each in enumerate(found)
            if each is not None and each.part != (expected[node] if places.several else None)
        ]
        if wrong:
            said = [f"{node}: {each or 'no such job'}" for node, each in zip(nodes, found)]
            raise errors.FailedPreconditionError(
                f'the jobs "{job}" of these nodes do not belong together'
                f" ({'; '.join(said)}): ranks attach on all nodes of one run, in the order of its"
                f" parts.{_missing(found)} Start them so, or delete the job on all nodes (optctl"
                " delete job) and begin it again from a checkpoint"
            )
    if not places.several:
        return layout
    mark = ParameterSpec(
        name=expected[places.node_of[places.rank]].name,
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
