"""All that a node has of a job: the job itself, and parcels.

A parcel is a job of one rank that keeps parts of a job's state while they move: whole, and without
steps. Its layout begins with a parameter without elements, whose name says which part of which
run it is, at which step, and of which run it was made. It is whole when it has finished two loads:
that of the state, and one without content after its bits were compared.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from optstate import _native, _optctl, errors
from optstate._torch.nodes.moves.blocks import Block, Regions
from optstate._torch.nodes.moves.durability import durability_in
from optstate._torch.nodes.moves.making_note import MakingNote, note_of
from optstate._torch.nodes.part_names import Part, part_of
from optstate._torch.nodes.positions import position_of
from optstate._torch.nodes.resolution import Position
from optstate._torch.warn import warn
from optstate.job_position import find_position
from optstate.session_spec import LossScalerState, ParameterSpec, SessionSpec, Shard

# A number has 64 bits. Any client can name a parameter, and int() refuses some thousand digits.
_MARK = re.compile(
    r"optstate\.parcel/([0-9a-f]+)/(\d{1,20})of(\d{1,20})/(\d{1,20})/([0-9a-f]+)"
    r"/(?:-|([0-9a-f]{16})\.(\d{1,10})\.(\d{1,10}))"
    r"(?:/([0-9a-f]{16}))?(?:/d(\d{1,20}(?:\.\d{1,20})*))?(?:@0)?"
)
_SUFFIX = ".optstate-parcel-"
_JOB_NAME_BYTES_MAX = 128
_SUFFIX_BYTES_MAX = 48
_LOADS_OF_WHOLE = 2
_DTYPES = {
    "DTYPE_FLOAT32": _native.FLOAT32,
    "DTYPE_BFLOAT16": _native.BFLOAT16,
    "DTYPE_FLOAT16": _native.FLOAT16,
}
_PARTITIONS = {
    "PARTITION_MODE_GREEDY": _native.PARTITIONS["greedy"],
    "PARTITION_MODE_CONTIGUOUS": _native.PARTITIONS["contiguous"],
    "PARTITION_MODE_LOCAL": _native.PARTITIONS["local"],
    "PARTITION_MODE_REPLICATED": _native.REPLICATED,
}


class Mark(NamedTuple):
    """The contents of a parcel."""

    part: Part
    step: int
    source: str  # the run that it was made of, as HeldJob.run
    scaler: LossScalerState | None  # of a dynamic loss scaler
    last_step: str = ""  # last_step_of() the job that it was made of, if that was on one node
    durable: tuple[int, ...] = ()  # the steps at which durable jobs come back from their disks

    @property
    def name(self) -> str:
        scaler = "-"
        if self.scaler is not None:
            scale = struct.pack(">d", self.scaler.loss_scale).hex()
            scaler = f"{scale}.{self.scaler.good_steps}.{self.scaler.hysteresis_left}"
        run, number, count = self.part
        name = f"optstate.parcel/{run}/{number}of{count}/{self.step}/{self.source}/{scaler}"
        name += f"/{self.last_step}" if self.last_step else ""
        return f"{name}/d{'.'.join(map(str, self.durable))}" if self.durable else name

    @property
    def spec(self) -> ParameterSpec:
        """The parameter that says it. Muon takes only matrices."""
        nothing = Shard(0, (0, 0), (0, 0))
        return ParameterSpec(
            self.name, (0, 0), 0, _native.FLOAT32, _native.FLOAT32, 0, shard=nothing
        )


def mark_of(names: Sequence[str]) -> Mark | None:
    """Returns what the names of a job's parameters say; None: it is no parcel."""
    found = _MARK.fullmatch(names[0]) if names else None
    if found is None:
        return None
    run, number, count, step, source, scale, good, hysteresis, last_step, durable = found.groups()
    scaler = None
    if scale is not None:
        [loss_scale] = struct.unpack(">d", bytes.fromhex(scale))
        scaler = LossScalerState(loss_scale, int(good), int(hysteresis))
    part = Part(run, int(number), int(count))
    steps = tuple(map(int, durable.split("."))) if durable else ()
    return Mark(part, int(step), source, scaler, last_step or "", steps)


def last_step_of(position: Position) -> str:
    """Returns what identifies the last step of a job; empty: it updated nothing, as many do.

    A daemon that restores a job from disk makes it anew, so that it has another HeldJob.run where
    its layout names none.
    """
    step = position.committed
    if step.is_begun or step.found_inf or step.norm is None:
        return ""
    numbers = struct.pack(">QQdd", step.step, step.digest, *step.norm)
    return hashlib.blake2b(numbers, digest_size=8).hexdigest()


def stem_of(job: str) -> str:
    """Returns how names of jobs begin that are about the moving state of a job."""
    if len(job.encode()) + _SUFFIX_BYTES_MAX <= _JOB_NAME_BYTES_MAX:
        return job + _SUFFIX
    return hashlib.blake2b(job.encode(), digest_size=16).hexdigest() + _SUFFIX


def parcel_of(job: str, part: Part) -> str:
    """Returns the name of the job that keeps this part of a job. A job that becomes one of one
    node has all in one parcel, of which there is never another."""
    of_run = "" if part.count == 1 else f"{part.run[:8]}-"
    return f"{stem_of(job)}{of_run}{part.number}of{part.count}"


def note_job_of(job: str) -> str:
    """Returns the name of the job that is the note beside a job that is made of parcels."""
    return f"{stem_of(job)}note"


class HeldJob(NamedTuple):
    """A job that a node has."""

    job: str
    part: Part | None  # of a job of several nodes
    mark: Mark | None  # of a parcel
    position: Position
    run: str  # what tells it from others of its name
    world_size: int
    partition: int
    placement: str
    durability: str  # as optctl takes it; empty: none
    blocks: tuple[Block, ...]  # in the order of its layout
    fits: bool = False  # whether the node's ranks want just this

    @property
    def step(self) -> int:
        return self.position.committed.step if self.mark is None else self.mark.step

    @property
    def is_whole(self) -> bool:
        """Whether a parcel has all that it is to keep."""
        return self.position.loads_finished >= _LOADS_OF_WHOLE

    def __str__(self) -> str:
        part = self.part if self.mark is None else self.mark.part
        text = "a job without parts" if part is None else str(part)
        if self.mark is not None:
            text += ", in a parcel" if self.is_whole else ", in a parcel that is half made,"
        text += f" at step {self.step}"
        durable = self.position.durable_step
        return text + (f", durable step {durable}" if durable else "")


class Holding(NamedTuple):
    """All that a node has of a job."""

    job: HeldJob | None = None
    parcels: tuple[HeldJob, ...] = ()
    note: MakingNote | None = None  # beside a job that is made of parcels
    # Names of jobs that were to be parcels and have nothing: they never became durable.
    leftovers: tuple[str, ...] = ()
    # Runs of which the node's parcels have all that its ranks want.
    ready: frozenset[str] = frozenset()

    def __str__(self) -> str:
        found = [*([self.job] if self.job else []), *self.parcels]
        return " and ".join(map(str, found)) or "no such job"


def _block(entry: dict[str, Any], *, names_part: bool, is_parcel: bool) -> Block:
    shape = tuple(map(int, entry["shape"]))
    name, shard = entry["name"], entry.get("shard")
    where = None
    if shard is not None:
        name = name.rpartition("@")[0]
        whole, offset = (tuple(map(int, shard[key])) for key in ("global_shape", "offset"))
        where = Shard(int(shard.get("owner", 0)), whole, offset)
    spec = ParameterSpec(
        name=name,
        shape=shape,
        numel=int(entry["numel"]),
        dtype=_DTYPES[entry["dtype"]],
        gradient_dtype=_DTYPES[entry["gradient_dtype"]],
        group=int(entry.get("group", 0)),
        shard=where,
    )
    owner = 0 if where is None else where.owner
    if is_parcel and not names_part:
        name, _, of = name.rpartition("#")
        owner = int(of)
    return Block("" if names_part else name, owner, spec)


def run_of(job: str, facts: dict[str, Any]) -> str:
    """Returns what tells a job from others of its name, where its layout does not say it. facts:
    what optctl says of it."""
    return hashlib.blake2b(f"{job} {facts['created_at']}".encode(), digest_size=8).hexdigest()


def _describe(endpoint: str | None, job: str, position: Position) -> HeldJob | None:
    """Returns a job that a node has; None: there is none that is registered.

    FailedPreconditionError: its layout is none of those that jobs of several nodes have.
    """
    found = _optctl.find_registered(endpoint, job)
    if found is None or not found.parameters:
        return None
    try:
        return _held(job, position, found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise errors.FailedPreconditionError(
            f'job "{job}" has a layout of which this build can make nothing ({error!r:.200}):'
            f" another program or build has made it. Look at it (optctl get params {job}), and"
            " delete it or choose another name (job=)"
        ) from error


def _held(job: str, position: Position, found: _optctl.RegisteredJob) -> HeldJob:
    facts = found.facts
    entries = [each["parameter"] for each in found.parameters]
    names = [entries[0]["name"]]
    part, mark = part_of(names), mark_of(names)
    names_itself = part is not None or mark is not None
    storage = facts.get("storage", {})
    return HeldJob(
        job=job,
        part=part,
        mark=mark,
        position=position,
        run=mark.part.run if mark else part.run if part else run_of(job, facts),
        world_size=int(facts["world_size"]),
        partition=_PARTITIONS[facts["partition"]],
        placement=storage.get("placement", ""),
        durability=durability_in(storage),
        blocks=tuple(
            _block(each, names_part=names_itself and index == 0, is_parcel=mark is not None)
            for index, each in enumerate(entries)
        ),
    )


def address_of(endpoint: str | None, job: str, timeout_s: float) -> SessionSpec:
    return SessionSpec(
        job=job,
        optimizer=0,
        group_options=(),
        parameters=(),
        endpoint=endpoint,
        connect_timeout_s=timeout_s,
    )


def _is_empty(address: SessionSpec) -> bool:
    """Returns whether a job has no layout."""
    found = find_position(address)
    return found is not None and found.phase == _native.PHASE_EMPTY


def _around(endpoint: str | None, job: str, timeout_s: float) -> Holding:
    """Returns all that a node has of a job but the job itself."""
    try:
        listed = _optctl.ask(endpoint, "get", "jobs")
    except errors.UnavailableError:
        if endpoint or os.environ.get("OPTSTATE_ENDPOINT"):
            raise
        return Holding()  # there is no daemon of the node
    # An operator sees the jobs of others too.
    names = {each["name"] for each in listed.get("jobs", [])}
    parcels, leftovers, note = [], [], None
    for name in sorted(each for each in names if each.startswith(stem_of(job))):
        address = address_of(endpoint, name, timeout_s)
        if _is_empty(address):
            leftovers.append(name)
            continue
        position = position_of(address)
        held = None if position is None else _describe(endpoint, name, position)
        if held is not None and held.mark is not None:
            parcels.append(held)
        elif held is not None:
            note = note_of(held.blocks[0].spec.name) or note
    return Holding(None, tuple(parcels), note, tuple(leftovers))


def _by_name(blocks: Sequence[Block]) -> dict[str, list[tuple]]:
    found: dict[str, list[tuple]] = {}
    for each in blocks:
        # Ranks of a job that is not cut own other parts of it, whichever they are.
        owner = None if each.spec.shard is None else each.owner
        # A part without elements begins anywhere.
        offset = each.offset if each.spec.numel else None
        found.setdefault(each.name, []).append((owner, offset, each.shape))
    return found


def _fits(held: Sequence[Block], wanted: Sequence[Block] | None) -> bool:
    """Returns whether a job cuts its parameters as the ranks want, as far as both have them. None:
    they want them whole."""
    if wanted is None:
        return all(each.spec.shard is None for each in held)
    there, here = _by_name(held), _by_name(wanted)
    return all(there[name] == here[name] for name in there.keys() & here.keys() if name)


def _ready(parcels: Sequence[HeldJob], wanted: Sequence[Block] | None) -> frozenset[str]:
    runs = {each.run for each in parcels}
    ready = set()
    for run in runs:
        have = Regions(each.blocks for each in parcels if each.run == run and each.is_whole)
        if wanted is not None and all(have.covers(each) for each in wanted if each.name):
            ready.add(run)
    return frozenset(ready)


def find_holding(
    endpoint: str | None,
    job: str,
    timeout_s: float,
    expected: Part | None,
    wanted: Sequence[Block] | None,
) -> Holding:
    """Returns what this rank's node has of a job.

    expected: the node's part, whatever the run; None: there is one node. wanted: the blocks of the
    job as the node's ranks want it; None: whole parameters.
    """
    if (endpoint or os.environ.get("OPTSTATE_ENDPOINT")) == "embedded":
        return Holding()  # that daemon begins with the session
    position = position_of(address_of(endpoint, job, timeout_s))
    held = None if position is None else _describe(endpoint, job, position)
    if held is not None:
        part = None if held.part is None else held.part[1:]
        is_part = part == (None if expected is None else expected[1:])
        held = held._replace(fits=is_part and _fits(held.blocks, wanted))
    found = _around(endpoint, job, timeout_s)
    return found._replace(job=held, ready=_ready(found.parcels, wanted))


def created_run(spec: SessionSpec) -> str:
    """Returns HeldJob.run of this node's job, whose layout names none.

    UnavailableError: it is gone, or its daemon does not say when it was made.
    """
    found = _optctl.find_registered(spec.endpoint, spec.job)
    if found is None or not found.facts.get("created_at"):
        raise errors.UnavailableError(
            f'the daemon does not say when job "{spec.job}" was made, into which state moves'
            f" (optctl describe job {spec.job}): start the ranks again"
        )
    return run_of(spec.job, found.facts)


def has_whole_parcel(spec: SessionSpec, *, is_new: bool) -> bool:
    """Returns whether the node has a parcel of the job that is to become one of one node, or is
    making the job of several. is_new: there was no job of the name, so that any parcel of it has
    state that the job would be made without."""
    if _is_registered(spec, parcel_of(spec.job, Part("", 1, 1))):
        return True
    # Parcels of several parts, whose names only the daemon's list tells, leave a note beside it.
    has_note = _is_registered(spec, note_job_of(spec.job))
    if not is_new and not has_note:
        return False
    try:
        return bool(_around(spec.endpoint, spec.job, spec.connect_timeout_s).parcels)
    except errors.OptstateError as error:
        if has_note:
            raise
        warn(
            f'job "{spec.job}" is new, and it is not known whether this node has parcels of an'
            f" earlier one of the name (optctl get jobs): {error}"
        )
        return False


def _is_registered(spec: SessionSpec, job: str) -> bool:
    try:
        found = find_position(address_of(spec.endpoint, job, spec.connect_timeout_s))
    except errors.UnimplementedError:  # a daemon that knows no jobs of several nodes
        return False
    # One that never became durable is empty after a loss of power.
    return found is not None and found.phase != _native.PHASE_EMPTY
