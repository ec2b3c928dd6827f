"""A model of the nodes of one job, whose every interleaving is tried.

The rules are the real ones (optstate._torch.nodes.resolution). Nodes that hold different shards
note the norm of an attempt before they commit it, as NodeAgreement.take does. An engine is
modelled as server/session/steps/step_preparer.cc has it: what it has committed and prepared
outlives it, and the first verdict that fits decides. Each node has one rank, for all its ranks.
Ranks of a new generation come when those of the last one are dead: they settle, and take the step
again.

Assumed: what a rank has sent reaches its engine at any time or never, and any number of times,
until ranks of the next generation attach; the engine ends the former sessions before. What a rank
has sent before an answer does not come again after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from optstate._torch.nodes import resolution
from optstate._torch.nodes.resolution import Position, Step, Verdict
from optstate.job_position import NodesNorm, noted_digest

STEP = 1
GENERATIONS = 3
_OF_ATTEMPT = 100


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One case: each node's ranks bring a digest, and may find inf or fail."""

    digests: tuple[int, ...]
    found_inf: tuple[bool, ...]
    fails: tuple[bool, ...]
    faults: int
    loses: bool  # a fault may take a prepared step's gradients
    # The kind of each node, by what it holds; None: all hold the same. See resolution.py.
    kinds: tuple[int, ...] | None = None
    # Each attempt at the step has other gradients, as of a script that goes on with other data.
    varies: bool = False
    retries: int = 0  # attempts that the same ranks make after an abort
    # The next ranks may come while some of the last ones still live, without a session.
    overlaps: bool = False
    # The next ranks do not await something: "bring" that the abort is brought to their own node,
    # "all" that it is to all nodes, "noted" that all nodes have noted the norm of what they commit.
    careless: str = ""
    # The protocol is broken on purpose, to see that check() notices: "alone", a rank decides by its
    # own node's vote; "any step", an engine takes a verdict about whatever it has prepared;
    # "forgets", an engine that dies has not written down what it has prepared; "unwritten", one
    # that dies has not written down what it was told.
    broken: str = ""

    @property
    def is_split(self) -> bool:
        return self.kinds is not None and len(set(self.kinds)) > 1

    def digest(self, index: int, attempt: int) -> int:
        return self.digests[index] + (_OF_ATTEMPT * attempt if self.varies else 0)


@dataclasses.dataclass(frozen=True)
class Node:
    committed: Step = Step(0, 0)
    prepared: Step | None = None
    # The rank: "runs", "voted" (its engine has prepared, or refused), "clips" (the norm is on its
    # way to the engine), "noted" (or not, as `noted` has it), "drops" (a step that it tries
    # again), "dropped", "done" or "dead".
    rank: str = "runs"
    votes: tuple[Step | None, ...] = ()  # by attempt of its generation
    attempt: int = 0
    dropped: int = 0  # attempts whose abort it has brought
    heard: frozenset[int] = frozenset()  # whose votes of its attempt it has
    noted: bool | None = None  # what it tells the others; None: nothing yet
    heard_noted: frozenset[int] = frozenset()  # whose it has

    @property
    def position(self) -> Position:
        return Position(self.committed, self.prepared)


@dataclasses.dataclass(frozen=True)
class World:
    nodes: tuple[Node, ...]
    messages: frozenset[tuple[int, Step, Verdict]] = frozenset()  # verdicts to engines
    seen: tuple[Position | None, ...] | None = None  # what settling ranks have read
    generation: int = 0
    faults: int = 0
    lost: bool = False
    error: str = ""  # why the ranks gave up

    def with_node(self, index: int, **changes: object) -> World:
        nodes = list(self.nodes)
        nodes[index] = dataclasses.replace(nodes[index], **changes)
        return dataclasses.replace(self, nodes=tuple(nodes))


def take(node: Node, step: Step, verdict: Verdict, *, takes_any: bool = False) -> Node:
    """Returns the node after its engine took a verdict; one that does not fit changes nothing, but
    for an engine that takes any."""
    prepared = node.prepared
    if prepared is not None and takes_any and verdict is not Verdict.CLIP:
        step = prepared
    if prepared is None or (prepared.step, prepared.digest) != (step.step, step.digest):
        return node
    if verdict is Verdict.CLIP:
        clipped = prepared if prepared.norm else dataclasses.replace(prepared, norm=step.norm)
        return dataclasses.replace(node, prepared=clipped)
    if prepared.norm != step.norm:  # which the digest shows
        return node
    if verdict is Verdict.ABORT:
        return dataclasses.replace(node, prepared=None)
    found_inf = verdict is Verdict.SKIP or prepared.found_inf
    committed = dataclasses.replace(prepared, found_inf=found_inf)
    if prepared.norm is not None:
        digest = noted_digest(prepared.digest, prepared.norm)
        committed = dataclasses.replace(committed, digest=digest)
    return dataclasses.replace(node, prepared=None, committed=committed)


def moves(world: World, scenario: Scenario) -> Iterator[World]:
    """All worlds that may come next."""
    takes_any = scenario.broken == "any step"
    for index, step, verdict in world.messages:
        node = take(world.nodes[index], step, verdict, takes_any=takes_any)
        if node != world.nodes[index]:
            nodes = list(world.nodes)
            nodes[index] = node
            yield dataclasses.replace(world, nodes=tuple(nodes))
    yield from _faults(world, scenario)
    if world.seen is not None:
        yield from _settling(world, scenario)
    else:
        dead = [node.rank == "dead" for node in world.nodes]
        may_come = any(dead) if scenario.overlaps else all(dead)
        if may_come and world.generation + 1 < GENERATIONS:
            yield dataclasses.replace(
                world, generation=world.generation + 1, seen=(None,) * len(world.nodes)
            )
    if world.seen is None or scenario.overlaps:
        yield from _stepping(world, scenario)


def _faults(world: World, scenario: Scenario) -> Iterator[World]:
    if world.faults == scenario.faults:
        return
    hit = dataclasses.replace(world, faults=world.faults + 1)
    if world.seen is not None:
        yield dataclasses.replace(hit, seen=None)  # those who settle die: all ranks are dead
    for index, node in enumerate(world.nodes):
        if node.rank != "dead":
            yield hit.with_node(index, rank="dead")
        if scenario.broken == "forgets" and node.prepared is not None:
            yield hit.with_node(index, prepared=None, rank="dead")
        if scenario.broken == "unwritten" and node.committed.step:
            yield hit.with_node(index, committed=Step(0, 0), prepared=None, rank="dead")
        if scenario.loses and node.prepared is not None:
            # Engine, supervisor and ranks at once.
            yield dataclasses.replace(hit, lost=True).with_node(index, prepared=None, rank="dead")


def _settling(world: World, scenario: Scenario) -> Iterator[World]:
    assert world.seen is not None
    for index, seen in enumerate(world.seen):
        if seen is None:
            read = list(world.seen)
            read[index] = world.nodes[index].position
            yield dataclasses.replace(world, seen=tuple(read))
    if None in world.seen:
        return
    try:
        names = [str(i) for i in range(len(world.seen))]
        verdicts = resolution.resolve(world.seen, names, scenario.kinds)
    except resolution.Unresolvable as error:
        yield dataclasses.replace(world, seen=None, error=str(error), messages=frozenset())
        return
    if not verdicts:  # they attach, unless ranks that still live have gone on
        if any(node.position != seen for node, seen in zip(world.nodes, world.seen)):
            yield dataclasses.replace(world, seen=(None,) * len(world.nodes))
            return
        nodes = tuple(
            dataclasses.replace(
                node,
                rank="runs",
                votes=(),
                attempt=0,
                dropped=0,
                heard=frozenset(),
                noted=None,
                heard_noted=frozenset(),
            )
            for node in world.nodes
        )
        yield dataclasses.replace(world, nodes=nodes, seen=None, messages=frozenset())
        return
    # Each verdict is brought and answered before the nodes are asked again; who brings it may
    # die before, which leaves it on its way.
    messages = set(world.messages)
    nodes = list(world.nodes)
    for index, verdict in verdicts.items():
        prepared = world.seen[index].prepared
        if verdict is Verdict.CLIP:
            norm = resolution.noted_norm(world.seen)
            assert norm is not None, "a norm is asked for that no node has"
            prepared = dataclasses.replace(prepared, norm=norm)
        messages.add((index, prepared, verdict))
        nodes[index] = take(nodes[index], prepared, verdict)
    yield dataclasses.replace(world, messages=frozenset(messages), seen=None)
    again = (None,) * len(nodes)
    yield dataclasses.replace(world, messages=frozenset(messages), nodes=tuple(nodes), seen=again)


def _stepping(world: World, scenario: Scenario) -> Iterator[World]:
    for index, node in enumerate(world.nodes):
        if node.rank == "runs":
            if node.committed.step == STEP:
                yield world.with_node(index, rank="done")
            else:
                fails = scenario.fails[index] and node.attempt == 0
                number = world.generation * (scenario.retries + 1) + node.attempt
                made = Step(STEP, scenario.digest(index, number), scenario.found_inf[index])
                # An engine answers with what it has prepared, whatever is pushed anew.
                vote = None if fails else node.prepared or made
                yield world.with_node(
                    index,
                    prepared=node.prepared if fails else vote,
                    rank="voted",
                    votes=(*node.votes, vote),
                    heard=frozenset({index}),
                )
        elif node.rank == "voted":
            for other, sender in enumerate(world.nodes):
                if other not in node.heard and len(sender.votes) > node.attempt:
                    yield world.with_node(index, heard=node.heard | {other})
            if scenario.broken == "alone" or len(node.heard) == len(world.nodes):
                vote = node.votes[node.attempt]
                if scenario.broken == "alone":
                    verdict = resolution.decide([vote])
                else:
                    votes = [each.votes[node.attempt] for each in world.nodes]
                    verdict = resolution.decide(votes, scenario.kinds)
                if verdict is Verdict.COMMIT and scenario.is_split:
                    norm = NodesNorm(float(sum(each.digest for each in votes)), 1.0)
                    clipped = dataclasses.replace(vote, norm=norm)
                    sent = world.with_node(index, rank="clips")
                    message = (index, clipped, Verdict.CLIP)
                    yield dataclasses.replace(sent, messages=world.messages | {message})
                    continue
                tries = verdict is Verdict.ABORT and node.attempt < scenario.retries
                then = "done" if verdict is not Verdict.ABORT else "drops" if tries else "dead"
                sent = world.with_node(index, rank=then)
                if vote is not None:
                    message = (index, vote, verdict)
                    sent = dataclasses.replace(sent, messages=world.messages | {message})
                yield sent
        elif node.rank == "clips":
            own = {each for each in world.messages if each[0] == index}
            (_, clipped, verdict) = next(each for each in own if each[2] is Verdict.CLIP)
            after = take(node, clipped, verdict)
            is_noted = after.prepared is not None and after.prepared.norm is not None
            then = world.with_node(
                index,
                prepared=after.prepared,
                rank="noted",
                noted=is_noted,
                heard_noted=frozenset({index}),
            )
            yield dataclasses.replace(then, messages=world.messages - own)
        elif node.rank == "noted":
            for other, sender in enumerate(world.nodes):
                if other not in node.heard_noted and sender.noted is not None:
                    yield world.with_node(index, heard_noted=node.heard_noted | {other})
            is_careless = scenario.careless == "noted"
            if is_careless or len(node.heard_noted) == len(world.nodes):
                if is_careless or all(each.noted for each in world.nodes):
                    sent = world.with_node(index, rank="done")
                    clipped = dataclasses.replace(
                        node.votes[node.attempt],
                        norm=NodesNorm(
                            float(sum(each.votes[node.attempt].digest for each in world.nodes)), 1.0
                        ),
                    )
                    message = (index, clipped, Verdict.COMMIT)
                    yield dataclasses.replace(sent, messages=world.messages | {message})
                else:
                    yield world.with_node(index, rank="dead")
            elif any(each.rank == "dead" and each.noted is None for each in world.nodes):
                yield world.with_node(index, rank="dead")
        elif node.rank == "drops":
            # The rank has the answer to its abort, which does not come again.
            vote = node.votes[node.attempt]
            after = node
            if vote is not None and scenario.careless != "bring":
                after = take(node, vote, Verdict.ABORT)
            then = world.with_node(
                index, prepared=after.prepared, rank="dropped", dropped=node.dropped + 1
            )
            own = {each for each in world.messages if each[0] == index}
            yield dataclasses.replace(then, messages=world.messages - own)
        elif node.rank == "dropped":
            lack = [each for each in world.nodes if each.dropped <= node.attempt]
            if not lack or scenario.careless == "all":
                yield world.with_node(
                    index, rank="runs", attempt=node.attempt + 1, heard=frozenset()
                )
            elif any(each.rank == "dead" for each in lack):
                yield world.with_node(index, rank="dead")
        if node.rank == "done" and any(each.rank == "dead" for each in world.nodes):
            yield world.with_node(index, rank="dead")  # the launcher ends the others
        if node.rank == "voted" and any(
            each.rank == "dead" and len(each.votes) <= node.attempt for each in world.nodes
        ):
            yield world.with_node(index, rank="dead")


def check(world: World, scenario: Scenario) -> None:
    """Raises AssertionError when the world is one that must not be."""
    kinds = scenario.kinds or (0,) * len(world.nodes)
    taken, digests = set(), set()
    for kind, node in zip(kinds, world.nodes):
        if node.committed.step == STEP:
            digest, norm = node.committed.digest, node.committed.norm
            if norm is not None:
                digest = noted_digest(digest, norm)  # as it was prepared
            found_inf = node.committed.found_inf
            taken.add((digest // _OF_ATTEMPT, found_inf, None if found_inf else norm))
            assert not scenario.is_split or found_inf or node.committed.norm, f"no norm: {world}"
            digests.add((kind, node.committed.digest))
    assert len(taken) <= 1, f"a step was taken in two ways, or of two attempts: {world}"
    assert len(digests) == len({kind for kind, _ in digests}), f"nodes took other steps: {world}"
    assert not world.error or world.lost, f"the nodes cannot go on, and nothing was lost: {world}"
    if world.seen is None and all(node.rank == "runs" for node in world.nodes):
        if not any(node.attempt for node in world.nodes):
            steps = {(node.committed.step, node.prepared) for node in world.nodes}
            assert len(steps) == 1, f"ranks attached to nodes at different steps: {world}"


def explore(scenario: Scenario) -> set[World]:
    """Returns all worlds that can be reached; checks each."""
    first = World(tuple(Node() for _ in scenario.digests))
    found, due = {first}, [first]
    while due:
        world = due.pop()
        check(world, scenario)
        if world.error:
            continue
        for then in moves(world, scenario):
            if then not in found:
                found.add(then)
                due.append(then)
    return found
