"""Brings the nodes of a job to one step, and takes each step on all of them or on none."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import struct
import sys
import time
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from optstate import _native, errors
from optstate._torch.nodes import resolution
from optstate._torch.nodes.alike import find_unlike
from optstate._torch.nodes.clipping import Clipping
from optstate._torch.nodes.copying import StateCopies
from optstate._torch.nodes.differing import Differences
from optstate._torch.nodes.moving import Moving
from optstate._torch.nodes.places import Places
from optstate._torch.nodes.positions import position_of
from optstate._torch.nodes.resolution import Position, Step, Verdict
from optstate._torch.nodes.together import (
    interrupts_afterwards,
    not_brought,
    of_node,
    raised_on_all,
    undecided,
)
from optstate._torch.nodes.without_others import settled_without_others
from optstate._torch.ranks import Ranks
from optstate._torch.state.checkpoint import PartialEntry
from optstate._torch.tensors import bits_sum, crc32_of
from optstate.job_position import bring_verdict, noted_digest
from optstate.session import Session, StepOutcome
from optstate.session_spec import SessionSpec

# Rounds of questions and verdicts, before nodes that never settle are an error.
ROUNDS_MAX = 8
# The daemon may notice the end of ranks that were killed only some time later.
_ENDS_WITHIN_S = 10.0
_PAUSE_S = 0.05

_PHASES = {
    _native.PHASE_LOADING: "half loaded",
    _native.PHASE_READY: "ready",
    _native.PHASE_FAILED: "failed",
}

# The entries of a checkpoint, by parameter: state by name.
Entries = Mapping[int, Any]


def hash_of(content: bytes) -> int:
    """Returns 64 bits that identify the content."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class NodeAgreement:
    """The ranks of all nodes, which decide together. Threads: one at a time.

    Size: one method for each thing that the ranks of all nodes decide or compare together, and
    for each stage of a step that they take.
    """

    group_norm_refusal = (
        "max_norm of a group cannot be had with shards on several nodes: each daemon"
        " knows the norm of its own shards alone. Give max_norm to the optimizer, or clip"
        " the group with torch.nn.utils.clip_grad_norm_ before step()"
    )

    def __init__(
        self,
        ranks: Ranks,
        places: Places,
        kinds: Sequence[int] | None = None,
        *,
        replaces_stale: bool = False,
    ) -> None:
        """kinds: by node, the first node that holds the same shards; None: every node holds all
        parameters, and loads the same. replaces_stale: see StateCopies."""
        self._ranks = ranks
        self._places = places
        self._kinds = kinds
        self._first_ranks = places.first_ranks
        # By rank: which have equal digests, of what they have loaded too. None: all.
        self._kinds_of_votes: Sequence[Hashable] | None = None
        if kinds is not None:
            seen: collections.Counter[int] = collections.Counter()
            of_votes: list[Hashable] = []
            for node in places.node_of:
                of_votes.append((kinds[node], seen[node]))
                seen[node] += 1
            self._kinds_of_votes = of_votes
        self._loaded = 0  # identifies what this rank has loaded
        self._loaded_alike = 0  # what of it is the same on all ranks, whatever they hold
        self._options = 0  # identifies what the step under way is taken with
        # The first rank of the first node of each kind.
        self._kind_ranks = [
            rank
            for node, rank in enumerate(places.first_ranks)
            if kinds is None or kinds[node] == node
        ]
        self._clipping = Clipping(ranks, self._kind_ranks)
        self._differences = Differences(ranks, places)
        # Nodes that all hold the same give one that has nothing what they have.
        self._copies = StateCopies(ranks, places, replaces_stale) if kinds is None else None
        # A step whose verdict this rank did not learn, or could not bring.
        self._undecided = 0
        # This brings a job's state to these nodes and ranks, where it was on others.
        self.moving: Moving | None = None
        self.moves_state = False  # whether it was looked for

    @property
    def spans_jobs(self) -> bool:
        """Whether several jobs take their steps together."""
        return False

    @property
    def of_job(self) -> NodeAgreement:
        """The ranks of this rank's job alone, which agree where it is."""
        return self

    @property
    def is_split(self) -> bool:
        """Whether nodes hold different parameters."""
        return self._kinds is not None and len(set(self._kinds)) > 1

    @property
    def is_undecided(self) -> bool:
        """Whether take() refuses all further steps, on all ranks."""
        return self.is_split and self._undecided != 0

    def note_layout(self, names: Sequence[str]) -> None:
        """Notes the names of this node's parameters or shards, in the order of its layout."""
        self._clipping.note_layout(names)

    def check_spec(self, spec: SessionSpec) -> None:
        """Raises, on all ranks, when ranks ask for different jobs: for other options, or, where
        all nodes hold the same, for another layout. Collective on several nodes."""
        self._differences.note_spec(spec)
        if not self._places.several:
            return
        difference = find_unlike(self._ranks, self._places.names, spec)
        if difference is not None:
            raise errors.FailedPreconditionError(difference)

    def settle(self, spec: SessionSpec) -> None:
        """Brings all nodes to one step before the ranks attach. Collective.

        FailedPreconditionError, on all ranks: they cannot be; it names the nodes.
        """
        if self.moving is not None:
            self.moving.move(spec)
        for rounds_left in reversed(range(ROUNDS_MAX)):
            found = self._positions(spec)
            try:
                verdicts = self._resolve(found)
            except resolution.Unresolvable as error:
                if self._copies is not None and self._copies.replace_stale(spec, found):
                    continue
                raise errors.FailedPreconditionError(f'job "{spec.job}": {error}') from None
            if not self.spans_jobs:
                verdicts = settled_without_others(
                    spec.job, verdicts, found, says=self._ranks.rank == 0
                )
            if verdicts:
                self.bring(spec, found, verdicts)
                continue
            try:
                if not self._give(spec, found):
                    return
            except Exception as failure:
                # An engine that dies while it is loaded is a delay.
                is_over = rounds_left == 0 or not isinstance(failure, errors.AbortedError)
                if any(self._ranks.gather(is_over)):
                    raise
        raise errors.AbortedError(
            f'the nodes of job "{spec.job}" do not settle: other ranks still take steps of it'
        )

    def on_first(self, what: Callable[[], Any]) -> list[Any]:
        """Does it on the first rank of each node; returns the results by node, on every rank."""
        result: Any = None
        error: Exception | None = None
        if self._ranks.rank == self._places.first_rank:
            try:
                result = what()
            except Exception as failure:
                error = of_node(failure, self._places)
        self._ranks.agree(error)
        found = self._ranks.gather(result)
        return [found[rank] for rank in self._first_ranks]

    def _positions(self, spec: SessionSpec) -> list[Position | None]:
        ask = position_of if self._copies is None else self._copies.position
        return self.on_first(lambda: ask(spec))

    def _resolve(self, positions: Sequence[Position | None]) -> dict[int, Verdict]:
        if self._copies is not None:  # a node without the job gets what the others settle on
            return resolution.resolve_present(positions, self._places.nodes)
        return resolution.resolve(positions, self._places.nodes, self._kinds)

    def _give(self, spec: SessionSpec, positions: Sequence[Position | None]) -> bool:
        """Copies the job to the nodes that lack it; returns whether there was one. Collective."""
        return self._copies is not None and self._copies.give(spec, positions)

    def _decide(self, votes: Sequence[Step | None]) -> Verdict:
        return resolution.decide(votes, self._kinds_of_votes)

    def bring(
        self,
        spec: SessionSpec,
        positions: list[Position | None],
        verdicts: dict[int, Verdict],
    ) -> None:
        """Brings verdicts about prepared steps to their nodes, which all are by number.
        Collective."""
        mine = self._places.nodes.index(self._places.node)

        def bring() -> None:
            position = positions[mine]
            if mine not in verdicts or position is None or position.prepared is None:
                return
            prepared, verdict = position.prepared, verdicts[mine]
            norm = resolution.noted_norm(positions) if verdict is Verdict.CLIP else None
            digest = prepared.digest
            if prepared.norm is not None:
                digest = noted_digest(digest, prepared.norm)
            deadline = time.monotonic() + _ENDS_WITHIN_S
            while True:
                try:
                    bring_verdict(spec, prepared.step, digest, verdict, norm)
                    return
                except errors.FailedPreconditionError:
                    return  # another rank was faster, which the next positions show
                except errors.UnavailableError:  # ranks are attached still
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_PAUSE_S)

        self.on_first(bring)

    def check_attached(self, session: Session) -> None:
        """Raises, on all ranks, when the ranks attached to jobs of other phases, steps or loss
        scales. Collective."""
        phase = _PHASES.get(session.phase, "empty")
        facts = {
            "phase or step": f"{phase} at step {session.committed_step}",
            "loss scaler": session.loss_scaler_state() or session.loss_scale,
        }
        self._check_alike(facts)

    def check_parameters(self, keys: Sequence[Hashable], tensors: Sequence[torch.Tensor]) -> None:
        """Raises, on all ranks, when ranks have other values of what both hold. Collective.

        keys: which part of which parameter each of the tensors is.
        """
        self._check_alike({key: bits_sum(tensor) for key, tensor in zip(keys, tensors)})

    def _check_alike(self, mine: dict[Any, Any]) -> None:
        """Raises FailedPreconditionError, on all ranks, when nodes have other values of a key: a
        parameter's, or a text, whose values people can read."""
        known: dict[Any, tuple[int, Any]] = {}
        for rank, of_rank in enumerate(self._ranks.gather(mine)):
            for key, value in of_rank.items():
                first, expected = known.setdefault(key, (rank, value))
                if value == expected:
                    continue
                here, there = self._places.names[first], self._places.names[rank]
                if isinstance(key, str):
                    what, here, there = key, f"{here} is {expected}", f"{there} is {value}"
                else:
                    what = f'parameter "{key[0]}"'
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
            self.check_decided(session)
            outcome = prepare()
        except Exception as failure:
            error = failure
        with interrupts_afterwards():
            is_brought = not self._undecided
            if self.is_split:
                self._undecided = self._undecided or session.committed_step + 1
            try:
                votes = self._votes(outcome)
            except errors.UnavailableError as failure:
                raise error or undecided(outcome, failure) from None
            verdict = self._decide(votes)
            if verdict is Verdict.COMMIT and self.is_split:
                assert outcome is not None
                outcome = self._clip(session, outcome)
            if outcome is not None and outcome.prepared:
                try:
                    outcome = session.decide(outcome.step, outcome.digest, verdict)
                except Exception as failure:
                    error, is_brought = error or failure, False
            if verdict is Verdict.ABORT:
                is_brought = self._all_dropped(session, is_brought, votes[self._places.rank])
            if is_brought:
                self._undecided = 0
            if verdict is Verdict.ABORT:
                self._ranks.agree(error)
        if verdict is not Verdict.ABORT and error is None:
            self._note_step()
        if verdict is not Verdict.ABORT:
            if error is not None:
                raise error
            assert outcome is not None
            if verdict is Verdict.SKIP and self.is_split:  # its norm is this node's
                return dataclasses.replace(outcome, gradient_norm=self._clipping.combined_norm())
            return outcome
        raise errors.FailedPreconditionError(self._difference(votes))

    def _note_step(self) -> None:
        """Notes that all nodes have taken a step together."""
        if self._copies is not None:
            self._copies.note_step()

    def _clip(self, session: Session, outcome: StepOutcome) -> StepOutcome:
        """Has every node note the norm of all nodes' gradients for the step that all have
        prepared, and returns the outcome with it. Collective.

        Raises, on each rank whose node has the step still prepared, when it is not known that all
        nodes have: then no node commits the step before the nodes settle.
        """
        error: Exception | None = None
        noted: list[list[int]] = []
        try:
            norm = self._clipping.norm_of_all(session, outcome)
            if outcome.prepared:
                outcome = session.decide(outcome.step, outcome.digest, Verdict.CLIP, norm)
                if not outcome.prepared:  # to earlier builds this verdict said more
                    raise errors.UnimplementedError(
                        f"the daemon of {self._places.node} is of an earlier build, which has taken"
                        f" step {outcome.step} before all nodes had agreed: upgrade optstated on"
                        " all nodes, and construct the optimizer anew, which settles the step"
                    )
        except Exception as failure:
            error = failure
        try:
            noted = self._ranks.gather_numbers([int(error is None)])
        except errors.UnavailableError as failure:
            if error is None or isinstance(error, errors.UnavailableError):
                error = undecided(outcome, error or failure)
            raise error from None
        if not all(of_rank[0] for of_rank in noted):
            lacking = [rank for rank, [is_noted] in enumerate(noted) if not is_noted]
            raise error or undecided(
                outcome,
                f"the daemon of rank {lacking[0]} has not noted the norm of all gradients."
                " Construct the optimizer anew on all ranks of all nodes, which go on",
            )
        return outcome

    def _all_dropped(self, session: Session, is_brought: bool, vote: Step | None) -> bool:
        """Returns whether no node has the step prepared any more, nor will prepare it. Collective.

        Nodes that hold the same tell attempts at a step apart by their digests.
        """
        if not self.is_split:
            return True
        self._ranks.gather_numbers([0])  # every rank has brought what it can
        if vote is None:
            try:
                session.abort(session.committed_step + 1)
            except errors.OptstateError:
                is_brought = False
        return all(brought for [brought] in self._ranks.gather_numbers([int(is_brought)]))

    def check_decided(self, session: Session, *, spreads: bool = False) -> None:
        """Raises FailedPreconditionError when another attempt at a step could meet the one that
        other nodes may have taken, or still have prepared: nothing in the files of nodes that hold
        different shards would tell the two apart. spreads: see not_brought()."""
        if not self.is_split:
            return
        if self._undecided > session.committed_step:
            raise not_brought(self._undecided, self._places.node, spreads=spreads)
        self._undecided = 0

    def note_options(
        self, hyperparams: Any, loss_scale: float, how: dict[str, Any]
    ) -> dict[str, Any]:
        """Notes what the next step is taken with, which nodes that hold different shards compare
        (the digests of the others tell). hyperparams: the groups', as a ctypes array. Returns what
        this node's daemon is to take the step with.

        UnimplementedError: a group is to be clipped by a norm that no daemon has.
        """
        self._differences.note_options(hyperparams, loss_scale, how)
        if self._kinds is None:
            return how
        if self.is_split and any(group.max_norm for group in hyperparams):
            raise errors.UnimplementedError(self.group_norm_refusal)
        self._clipping.note_options(**how)
        alike = {name: value for name, value in how.items() if name != "found_inf"}
        values = repr((loss_scale, sorted(alike.items()))).encode()
        self._options = hash_of(bytes(hyperparams) + values)
        return {**how, "max_norm": 0.0, "awaits_norm": True} if self.is_split else how

    def note_alike(self, content: bytes) -> None:
        """Notes what else is the same on all nodes in the step that note_options() was about."""
        self._options ^= hash_of(content)

    def of_all_shards(self, fetch: Callable[[], list[Any]]) -> list[Any]:
        """Returns what the first node of each kind has of its shards, one after the other. fetch
        returns this node's. Collective when nodes hold different ones, also when fetch raises."""
        if not self.is_split:
            return fetch()
        with raised_on_all(self._ranks):
            of_node = fetch()
        found = self._ranks.gather(of_node)
        return [each for rank in self._kind_ranks for each in found[rank]]

    def note_load(self, parameters: Sequence[torch.Tensor], entries: Entries | None) -> None:
        """Notes what this rank has loaded into the job. The next votes compare it: nodes that
        load other values would step from other states for ever.

        entries: of a checkpoint, which replaces the state; so what was loaded before is forgotten.
        """
        values: list[Any] = list(parameters)
        if entries is not None:
            self._loaded = 0
            if not any(isinstance(entry, PartialEntry) for entry in entries.values()):
                steps = {i: float(e["step"]) for i, e in entries.items() if e and "step" in e}
                self._loaded_alike = hash_of(repr(sorted(steps.items())).encode())
        for index, entry in sorted((entries or {}).items()):
            values += [index, *(value for _, value in sorted((entry or {}).items()))]
        for value in values:
            is_tensor = isinstance(value, torch.Tensor)
            crc32 = crc32_of(value) if is_tensor else zlib.crc32(repr(value).encode())
            self._loaded = (self._loaded * 0x9E3779B97F4A7C15 + crc32 + 1) % (1 << 64)

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank when some rank has an error. Collective."""
        self._ranks.agree(error)

    def any_rank(self, flag: bool) -> bool:
        """Returns whether the flag is set on some rank. Collective."""
        return self._ranks.any(flag)

    def on_all(self, what: Callable[[], None]) -> None:
        """Does on every rank what the ranks of each job do together; raises on every rank when it
        fails for some job. Collective."""
        error: Exception | None = None
        try:
            what()
        except Exception as failure:
            error = failure
        self.agree(error)

    def _clip_numbers(self) -> list[int]:
        """Returns what identifies how all jobs clip the step; nothing where there is one job."""
        return []

    def _votes(self, outcome: StepOutcome | None) -> list[Step | None]:
        """Returns what each rank's node has prepared. One small all-gather."""
        clip = self._clip_numbers()
        mine = [0] * (6 + len(clip))
        if outcome is not None:
            alike = 0 if self._kinds is None else self._options ^ self._loaded_alike
            norm = int.from_bytes(struct.pack("=d", outcome.gradient_norm), sys.byteorder)
            numbers = [outcome.digest ^ self._loaded, alike, norm, *clip]
            signed = [number - (1 << 64 if number >> 63 else 0) for number in numbers]
            mine = [1, outcome.step, int(outcome.found_inf), *signed]
        found = self._ranks.gather_numbers(mine)
        bits = [found[rank][5] % (1 << 64) for rank in self._kind_ranks]
        norms = [struct.unpack("=d", each.to_bytes(8, sys.byteorder))[0] for each in bits]
        self._clipping.note_norms(norms)
        return [
            Step(step, digest % (1 << 64), bool(found_inf), alike, clip=tuple(rest)) if ok else None
            for ok, step, found_inf, digest, alike, _, *rest in found
        ]

    def _difference(self, votes: list[Step | None]) -> str:
        """Returns why there is no one step that all have prepared. Collective."""
        said = []
        for node, rank in zip(self._places.nodes, self._first_ranks):
            vote = votes[rank]
            assert vote is not None
            said.append(f"{node}: step {vote.step}, digest {vote.digest:016x}")
        prepared = [vote for vote in votes if vote is not None]
        kinds = self._kinds_of_votes
        return self._differences.describe(prepared, kinds, self._loaded, "; ".join(said))
