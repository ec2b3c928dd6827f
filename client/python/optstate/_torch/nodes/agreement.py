"""Brings the nodes of a job to one step, and takes each step on all of them or on none."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optstate import _native, errors
from optstate._torch.nodes import resolution
from optstate._torch.nodes.alike import find_unlike
from optstate._torch.nodes.places import Places
from optstate._torch.nodes.resolution import Position, Step, Verdict
from optstate._torch.ranks import Ranks
from optstate._torch.settings import Settings
from optstate._torch.tensors import bits_sum, in_memory
from optstate.session import Session, StepOutcome, bring_verdict, find_position
from optstate.session_spec import SessionSpec

# Rounds of questions and verdicts, before nodes that never settle are an error.
_ROUNDS_MAX = 8
# The daemon may notice the end of ranks that were killed only some time later.
_ENDS_WITHIN_S = 10.0
_PAUSE_S = 0.05

_PHASES = {
    _native.PHASE_LOADING: "half loaded",
    _native.PHASE_READY: "ready",
    _native.PHASE_FAILED: "failed",
}

# Of a checkpoint, by parameter: state by name.
Entries = Mapping[int, Any]


def check_across_nodes(settings: Settings, places: Places, *, is_sharded: bool) -> None:
    """Raises, on every rank alike, when a job cannot be had on these nodes."""
    if not places.several:
        return
    count = len(places.nodes)
    if settings.across_nodes is None:
        raise errors.UnimplementedError(
            f"the ranks run on {count} nodes, each with a daemon of its own: say"
            ' across_nodes="replicated", so that every node takes the same steps with the same,'
            " averaged gradients. (Nodes are told apart by the kernel's boot id or"
            " $OPTSTATE_NODE.)"
        )
    if is_sharded:
        raise errors.UnimplementedError(
            'sharded parameters (DTensors, partition="local") are served on one node alone'
        )
    if settings.reduction == "daemon":
        raise ValueError(
            f'reduction="daemon" sums the ranks of one node, and the job is on {count}: leave it'
            " out, with gradients averaged over all ranks (DistributedDataParallel)"
        )
    if settings.speculative:
        raise ValueError("speculative=True cannot be had on several nodes: leave it out")
    places.check_even()


def _position(spec: SessionSpec) -> Position | None:
    found = find_position(spec)
    if found is None:
        return None
    prepared = None
    if found.prepared_step:
        prepared = Step(found.prepared_step, found.prepared_digest, bool(found.prepared_found_inf))
    return Position(
        committed=Step(found.committed_step, found.digest, bool(found.found_inf)),
        prepared=prepared,
        loads_finished=found.loads_finished,
        durable_step=found.durable_step,
    )


class NodeAgreement:
    """The ranks of all nodes, which decide together. Threads: one at a time."""

    def __init__(self, ranks: Ranks, places: Places) -> None:
        self._ranks = ranks
        self._places = places
        self._loaded = 0  # identifies what this rank has loaded

    def check_spec(self, spec: SessionSpec) -> None:
        """Raises, on all ranks, when ranks ask for different jobs. Collective."""
        difference = find_unlike(self._ranks, self._places.names, spec)
        if difference is not None:
            raise errors.FailedPreconditionError(difference)

    def settle(self, spec: SessionSpec) -> None:
        """Brings all nodes to one step before the ranks attach. Collective.

        FailedPreconditionError, on all ranks: they cannot be; it names the nodes.
        """
        for _ in range(_ROUNDS_MAX):
            found = self._positions(spec)
            try:
                verdicts = resolution.resolve(found, self._places.nodes)
            except resolution.Unresolvable as error:
                raise errors.FailedPreconditionError(f'job "{spec.job}": {error}') from None
            if not verdicts:
                return
            self._bring(spec, found, verdicts)
        raise errors.AbortedError(
            f'the nodes of job "{spec.job}" do not settle: other ranks still take steps of it'
        )

    def _on_first(self, what: Callable[[], Any]) -> list[Any]:
        """Does it on the first rank of each node; returns the results by node, on every rank."""
        result: Any = None
        error: Exception | None = None
        if self._ranks.rank == self._places.first_rank:
            try:
                result = what()
            except Exception as failure:
                error = failure
        self._ranks.agree(error)
        found = self._ranks.gather(result)
        return [found[rank] for rank in self._places.first_ranks]

    def _positions(self, spec: SessionSpec) -> list[Position | None]:
        return self._on_first(lambda: _position(spec))

    def _bring(
        self,
        spec: SessionSpec,
        positions: list[Position | None],
        verdicts: dict[int, Verdict],
    ) -> None:
        mine = self._places.nodes.index(self._places.node)

        def bring() -> None:
            position = positions[mine]
            if mine not in verdicts or position is None or position.prepared is None:
                return
            prepared = position.prepared
            deadline = time.monotonic() + _ENDS_WITHIN_S
            while True:
                try:
                    bring_verdict(spec, prepared.step, prepared.digest, verdicts[mine])
                    return
                except errors.FailedPreconditionError:
                    return  # another rank was faster, which the next positions show
                except errors.UnavailableError:  # ranks are attached still
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_PAUSE_S)

        self._on_first(bring)

    def check_attached(self, session: Session) -> None:
        """Raises, on all ranks, when the ranks attached to jobs of other phases or steps."""
        phase = _PHASES.get(session.phase, "empty")
        self._check_alike("phase or step", f"{phase} at step {session.committed_step}", says=True)

    def check_parameters(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises, on all ranks, when nodes have other values of parameters. Collective."""
        self._check_alike("parameters", list(map(bits_sum, tensors)))

    def _check_alike(self, what: str, mine: Any, *, says: bool = False) -> None:
        """Raises FailedPreconditionError, on all ranks, when a value differs between nodes.

        says: the values are for people to read.
        """
        found = self._ranks.gather(mine)
        for rank, value in enumerate(found):
            if value != found[0]:
                here, there = self._places.names[0], self._places.names[rank]
                if says:
                    here, there = f"{here} is {found[0]}", f"{there} is {value}"
                raise errors.FailedPreconditionError(
                    f"the nodes of the job differ in {what}: {here} and {there}. Delete the job on"
                    " all nodes (optctl delete job) and begin it again from a checkpoint"
                )

    def take(self, session: Session, prepare: Callable[[], StepOutcome]) -> StepOutcome:
        """Prepares a step on this node, and takes it on all nodes or on none. Collective.

        Raises on every rank when it is taken on none: the rank's own error, or another's.
        """
        outcome: StepOutcome | None = None
        error: Exception | None = None
        try:
            outcome = prepare()
        except Exception as failure:
            error = failure
        with _interrupts_afterwards():
            try:
                votes = self._votes(outcome)
            except errors.UnavailableError as failure:
                raise error or _undecided(outcome, failure) from None
            verdict = resolution.decide(votes)
            if outcome is not None and outcome.prepared:
                try:
                    outcome = session.decide(outcome.step, outcome.digest, verdict)
                except Exception as failure:
                    error = error or failure
        if verdict is not Verdict.ABORT:
            if error is not None:
                raise error
            assert outcome is not None
            return outcome
        self._ranks.agree(error)
        raise errors.FailedPreconditionError(self._difference(votes))

    def note_load(self, parameters: Sequence[torch.Tensor], entries: Entries | None) -> None:
        """Notes what this rank has loaded into the job. The next votes compare it: nodes that
        load other values would step from other states for ever.

        entries: of a checkpoint, which replaces the state; so what was loaded before is forgotten.
        """
        values: list[Any] = list(parameters)
        if entries is not None:
            self._loaded = 0
        for index, entry in sorted((entries or {}).items()):
            values += [index, *(value for _, value in sorted((entry or {}).items()))]
        for value in values:
            if isinstance(value, torch.Tensor):
                content = in_memory(value).reshape(-1).view(torch.uint8).numpy()
            else:
                content = repr(value).encode()
            self._loaded = (self._loaded * 0x9E3779B97F4A7C15 + zlib.crc32(content) + 1) % (1 << 64)

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank when some rank has an error. Collective."""
        self._ranks.agree(error)

    def _votes(self, outcome: StepOutcome | None) -> list[Step | None]:
        mine = [0, 0, 0, 0]
        if outcome is not None:
            seen = outcome.digest ^ self._loaded
            digest = seen - (1 << 64 if seen >> 63 else 0)
            mine = [1, outcome.step, digest, int(outcome.found_inf)]
        return [
            Step(step, digest % (1 << 64), bool(found_inf)) if ok else None
            for ok, step, digest, found_inf in self._ranks.gather_numbers(mine)
        ]

    def _difference(self, votes: list[Step | None]) -> str:
        said = []
        for node, rank in zip(self._places.nodes, self._places.first_ranks):
            vote = votes[rank]
            assert vote is not None
            said.append(f"{node}: step {vote.step}, digest {vote.digest:016x}")
        return (
            f"the nodes have prepared different steps ({'; '.join(said)}), and the step is taken"
            " on none: gradients, options, or loads of state differ between nodes. Average the"
            " gradients over all ranks (DistributedDataParallel) and give all ranks equal options"
        )


def _undecided(
    outcome: StepOutcome | None, failure: errors.UnavailableError
) -> errors.UnavailableError:
    if outcome is None or not outcome.prepared:
        return failure
    return errors.UnavailableError(
        f"step {outcome.step} is prepared on this node, and this rank does not know what all have"
        f" decided: {failure}, with this step or without it on all nodes alike"
    )


@contextlib.contextmanager
def _interrupts_afterwards() -> Iterator[None]:
    """Has Ctrl-C wait: a rank that has voted must bring the decision to its daemon."""
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or former is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def raised_on_all(nodes: NodeAgreement | None) -> Iterator[None]:
    """Raises on the ranks of all nodes what is raised on one of them. Collective."""
    if nodes is None:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        error = failure
    nodes.agree(error)
