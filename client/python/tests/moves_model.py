"""A model of nodes between which the state of one job moves, while ranks are killed and power is
lost at random.

The rule is the real one (choosing.choose). What ranks do by it is modelled as moves/mover.py,
moves/parcelling.py and moves/handing_over.py have it: by one change of one node at a time, and in
turns that all nodes end before any begins the next. The parameter is one vector, of which nodes
have equal parts.

Assumed: a daemon writes what is durable to its disk in order, also when ranks have been killed;
power is lost on all nodes; ranks start on all nodes that have something, and perhaps on more.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from optstate._torch.nodes.moves.blocks import Block
from optstate._torch.nodes.moves.choosing import Choice, Source, choose
from optstate._torch.nodes.moves.durability import WHILE_MOVING
from optstate._torch.nodes.moves.holdings import (
    HeldJob,
    Holding,
    Mark,
    last_step_of,
    parcel_of,
)
from optstate._torch.nodes.moves.making_note import MakingNote
from optstate._torch.nodes.part_names import Part
from optstate._torch.nodes.resolution import Position, Step
from optstate.job_position import NodesNorm
from optstate.session_spec import ParameterSpec, Shard

JOB = "gpt"
ELEMENTS = 12  # of which 1, 2 and 3 nodes have equal parts
_EVERY = 2  # durable steps
_WHOLE = 2  # loads of a whole parcel


@dataclasses.dataclass
class Kept:
    """A job or parcel, as its daemon has it."""

    run: str
    part: Part | None  # of a job of several nodes
    begin: int
    end: int
    durability: str
    mark: Mark | None = None
    step: int = 0
    digest: int = 0
    norm: float = 0.0
    loads: int = 0
    durable_step: int = 0
    content: int | None = None  # the step whose state it has
    disk: Kept | None = None
    coming: Kept | None = None  # on its way to the disk
    has_come_back: bool = False  # from the disk

    def write(self) -> None:
        """Begins to write it to the disk, if it is durable."""
        if self.durability:
            self.coming = dataclasses.replace(self, disk=None, coming=None, durable_step=self.step)

    def flush(self) -> None:
        """Returns when what was written is durable."""
        if self.coming is not None:
            self.disk, self.coming = self.coming, None
            self.durable_step = self.disk.step

    def held(self, name: str, wanted: tuple[Part | None, int, int]) -> HeldJob:
        norm = NodesNorm(self.norm, 1.0)
        last = Step(self.step, self.digest, norm=norm)
        position = Position(last, None, self.loads, self.durable_step)
        size, shard = self.end - self.begin, Shard(0, (ELEMENTS,), (self.begin,))
        block = Block("w", 0, ParameterSpec("w", (size,), size, 1, 1, 0, shard=shard))
        numbers = (None if self.part is None else self.part[1:], self.begin, self.end)
        fits = self.mark is None and numbers == wanted
        run, durability = self.run, self.durability
        return HeldJob(
            name, self.part, self.mark, position, run, 1, 4, "", durability, (block,), fits
        )


class Node:
    """One node: its job, its parcels by name, and the note beside a job that is made."""

    def __init__(self) -> None:
        self.job: Kept | None = None
        self.parcels: dict[str, Kept] = {}
        self.note: MakingNote | None = None

    @property
    def everything(self) -> list[Kept]:
        return [*([self.job] if self.job else []), *self.parcels.values()]

    @property
    def has_something(self) -> bool:
        return bool(self.everything) or self.note is not None


class World:
    """broken: a mistake of the ranks, to see that it is noticed: "early", former jobs are deleted
    before all parcels are whole; "late", parcels when ranks have trained; "unwritten", jobs begin
    and nobody waits until they are durable."""

    def __init__(self, chosen: random.Random, durability: str, broken: str = "") -> None:
        self.random = chosen
        self.durability = durability
        self.broken = broken
        self.nodes = [Node() for _ in range(3)]
        self.step = 0  # that all have reached
        self.least = 0  # the step to which they come back at least
        self.has_begun = False
        self.said: list[str] = []
        self._runs = 0

    def run(self) -> str:
        self._runs += 1
        return f"{self._runs:08x}"

    def lose_power(self) -> None:
        self.said.append("power was lost")
        for node in self.nodes:
            node.job = self._from_disk(node.job)
            found = {name: self._from_disk(each) for name, each in node.parcels.items()}
            node.parcels = {name: each for name, each in found.items() if each is not None}

    def _from_disk(self, kept: Kept | None) -> Kept | None:
        if kept is None:
            return None
        written = [kept.disk, *([kept.coming] if kept.coming else [])]
        chosen = self.random.choice(written)
        if chosen is None:
            return None
        found = dataclasses.replace(chosen, has_come_back=True)
        found.disk = dataclasses.replace(found)
        if found.mark is None and found.part is None:
            found.run = self.run()  # it was made anew
        return found

    def is_unknown(self) -> bool:
        """Whether a job of one node has come from its disk that its last step does not identify."""
        jobs = [node.job for node in self.nodes if node.job is not None and node.job.part is None]
        wanted = (None, 0, ELEMENTS)
        return any(
            each.has_come_back and not last_step_of(each.held(JOB, wanted).position)
            for each in jobs
        )

    def start(self, nodes: Sequence[int]) -> Iterator[None]:
        """Starts ranks on these nodes, which train when they have the state. Each step of the
        iterator is a change of one node; ranks are killed where it is left."""
        for each in (kept for node in self.nodes for kept in node.everything):
            each.flush()
        wanted = [self._wanted(place, len(nodes)) for place in range(len(nodes))]
        found = [self._holding(node, want) for node, want in zip(nodes, wanted)]
        choice = choose(JOB, [f"node{node}" for node in nodes], found, len(nodes))
        if choice is None:
            assert not self.has_begun, f"the state is lost: {self.said}"
            yield from self._begin(nodes, wanted)
            return
        self._check(choice, nodes)
        yield from self._turn(self._deletion(nodes, each) for each in choice.debris)
        if not choice.stays:
            yield from self._carry(choice, nodes, wanted)
        for node in nodes:
            self.nodes[node].note = None
            yield
        yield from self._train(nodes)

    def _check(self, choice: Choice, nodes: Sequence[int]) -> None:
        """Whether it is the state of one step, and of no step that is too old."""
        kept = [self._kept(nodes, each) for each in choice.sources]
        elements = {i for each in kept for i in range(each.begin, each.end)}
        assert len(elements) == ELEMENTS, f"elements are missing: {self.said}"
        steps = {each.content for each in kept}
        assert steps == {choice.step}, f"steps {steps} at step {choice.step}: {self.said}"
        assert self.least <= choice.step <= self.step, f"too old, {choice.step}: {self.said}"
        self.step = choice.step
        where = "as it is" if choice.stays else "moves"
        self.said.append(f"run {choice.run} {where} at step {choice.step} on {nodes}")

    def _wanted(self, place: int, count: int) -> tuple[tuple[int, int] | None, int, int]:
        size = ELEMENTS // count
        return (place + 1, count) if count > 1 else None, place * size, (place + 1) * size

    def _holding(self, node: int, wanted: tuple) -> Holding:
        here = self.nodes[node]
        job = None if here.job is None else here.job.held(JOB, wanted)
        parcels = tuple(each.held(name, wanted) for name, each in sorted(here.parcels.items()))
        whole = [each for each in here.parcels.values() if each.loads >= _WHOLE]
        elements: dict[str, set[int]] = {}
        for each in whole:
            elements.setdefault(each.run, set()).update(range(each.begin, each.end))
        ready = [run for run, all_of in elements.items() if all_of >= {*range(*wanted[1:])}]
        return Holding(job, parcels, here.note, (), frozenset(ready))

    def _kept(self, nodes: Sequence[int], source: Source) -> Kept:
        here = self.nodes[nodes[source.node]]
        kept = here.job if source.held.mark is None else here.parcels[source.held.job]
        assert kept is not None
        return kept

    def _turn(self, changes: Iterable[Callable[[], object]]) -> Iterator[None]:
        """Makes changes of nodes, in any order."""
        changes = list(changes)
        self.random.shuffle(changes)
        for change in changes:
            change()
            yield

    def _deletion(self, nodes: Sequence[int], source: Source) -> Callable[[], object]:
        here = self.nodes[nodes[source.node]]
        if source.held.mark is None:
            return lambda: setattr(here, "job", None)
        return lambda: here.parcels.pop(source.held.job)

    def _make(self, node: int, run: str, want: tuple) -> Kept:
        """Makes a node's job, into which nothing is loaded yet."""
        numbers, begin, end = want
        part = None if numbers is None else Part(run, *numbers)
        run = self.run() if part is None else run
        self.nodes[node].job = made = Kept(run, part, begin, end, self.durability)
        return made

    def _begin(self, nodes: Sequence[int], wanted: Sequence[tuple]) -> Iterator[None]:
        """Begins a new job, and loads it on all nodes at once."""
        self.said.append(f"begins on {nodes}")
        self.has_begun = True
        run = self.run()
        made = [self._make(node, run, want) for node, want in zip(nodes, wanted)]
        for each in made:
            each.loads, each.content = 1, 0
            each.write()
            each.flush()
        yield from self._train(nodes)

    def _carry(
        self, choice: Choice, nodes: Sequence[int], wanted: Sequence[tuple]
    ) -> Iterator[None]:
        run, step = choice.run, choice.step
        parcels = [(each.node, each.held.job) for each in choice.sources]
        if not choice.is_local:
            run = self.run()
            parcels = yield from self._make_parcels(choice, nodes, wanted, run)
        for node, want in zip(nodes, wanted):
            self._make(node, run, want)
            yield
        if len(nodes) == 1:
            here = self.nodes[nodes[0]]
            here.note = None
            yield
            here.note = MakingNote(run, here.job.run)
            yield
        jobs = [self.nodes[node].job for node in nodes]
        for each in jobs:
            each.durability = WHILE_MOVING if each.durability else ""
            yield
            each.loads, each.content = 1, step
            each.write()
            yield
        for each in jobs:
            each.step = step
            each.write()
            yield
        for each in jobs:
            each.durability = self.durability
            each.write()
            if self.broken != "unwritten":
                each.flush()
            yield
        self.least = step
        if self.broken == "late":
            yield from self._train(nodes)
        yield from self._turn(
            lambda place=place, name=name: self.nodes[nodes[place]].parcels.pop(name)
            for place, name in parcels
        )

    def _make_parcels(
        self, choice: Choice, nodes: Sequence[int], wanted: Sequence[tuple], run: str
    ) -> Iterator[None]:
        """Returns the places of nodes and the names of parcels."""
        step, sources = choice.step, choice.sources
        is_alone = len(sources) == 1 and not (sources[0].held.part or sources[0].held.mark)
        if is_alone:
            former = self._kept(nodes, sources[0])
            former.write()
            former.flush()
        last_step = last_step_of(sources[0].held.position) if is_alone else ""
        made, names = [], []
        for place, (node, (numbers, begin, end)) in enumerate(zip(nodes, wanted)):
            part = Part(run, *(numbers or (1, 1)))
            mark = Mark(part, step, choice.run, None, last_step, _durable_steps(sources))
            names.append((place, parcel_of(JOB, part)))
            made.append(self._make_parcel(node, names[-1][1], mark, begin, end))
            yield
        deletions = [self._deletion(nodes, each) for each in sources]
        if self.broken == "early":
            yield from self._turn(deletions)
        yield from _load(made)
        self.least = step
        if self.broken != "early":
            yield from self._turn(deletions)
        return names

    def _make_parcel(self, node: int, name: str, mark: Mark, begin: int, end: int) -> Kept:
        assert name not in self.nodes[node].parcels, f"{name} is there: {self.said}"
        durability = "step" if self.durability else ""
        made = Kept(mark.part.run, None, begin, end, durability, mark, content=mark.step)
        self.nodes[node].parcels[name] = made
        return made

    def _train(self, nodes: Sequence[int]) -> Iterator[None]:
        jobs = [self.nodes[node].job for node in nodes]
        for _ in range(self.random.randrange(4)):
            self.step += 1
            for place, each in enumerate(jobs):
                each.step = each.content = self.step
                each.digest = 0 if len(nodes) == 1 else 10 * self.step + place
                each.norm = 1.0 + self.step
                if self.step % _EVERY == 0:
                    each.write()
                    each.flush()
            if not self.durability or self.step % _EVERY == 0:
                self.least = self.step
            yield
        if len(nodes) > 1 and self.random.random() < 0.3:
            yield from self._hand_over(nodes)

    def _hand_over(self, nodes: Sequence[int]) -> Iterator[None]:
        places = range(len(nodes))
        leaving = set(self.random.sample(places, self.random.randrange(1, len(nodes))))
        staying = [place for place in places if place not in leaving]
        jobs = [self.nodes[node].job for node in nodes]
        gives_all = bool(self.durability) and any(each.durable_step < self.step for each in jobs)
        self.said.append(f"{[nodes[place] for place in sorted(leaving)]} leave at {self.step}")
        gives = [*(staying if gives_all else ()), *sorted(leaving)]
        durable = sorted({jobs[place].durable_step for place in gives}) if self.durability else ()
        made = []
        for place in gives:
            job, heir = jobs[place], self.random.choice(staying) if place in leaving else place
            mark = Mark(job.part, self.step, job.run, None, "", tuple(durable))
            name = parcel_of(JOB, job.part)
            made.append(self._make_parcel(nodes[heir], name, mark, job.begin, job.end))
            yield
        yield from _load(made)
        self.least = self.step
        for place in places if gives_all else sorted(leaving):
            self.nodes[nodes[place]].job = None
            yield


def _load(parcels: Sequence[Kept]) -> Iterator[None]:
    for loads in (1, _WHOLE):
        for each in parcels:
            each.loads = loads
            each.write()
            yield
        for each in parcels:
            each.flush()
            yield


def _durable_steps(sources: Sequence[Source]) -> tuple[int, ...]:
    held = [each.held for each in sources if each.held.mark is None and each.held.durability]
    return tuple(sorted({each.position.durable_step for each in held}))
