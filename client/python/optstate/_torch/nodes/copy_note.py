"""A note beside a job that is a copy of another node's: which step of that job it is to become.

Nothing else in a daemon's files tells a copy that is half made from a job that has trained. The
note is a job of its own, without state, whose one parameter has the note as its name. It is made
before the copy is begun, and goes when the copy has taken a step with the other nodes. So what a
killed trainer leaves is told by the note and the job beside it: see meaning_of().
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
import time
from typing import NamedTuple

from optstate import _native, _optctl, errors
from optstate._torch.nodes.resolution import Position, Step
from optstate._torch.optimizer_info import infos
from optstate.job_position import find_position
from optstate.session import Session
from optstate.session_spec import ParameterSpec, SessionSpec

_SUFFIX = ".optstate-copy"
_JOB_NAME_BYTES_MAX = 128
# Where the machine is busy, the engine of a job that is deleted ends only some time later.
_DELETED_WITHIN_S = 10.0
_PAUSE_S = 0.05
_NAME = re.compile(r"optstate\.copy/(\d+)/([0-9a-f]{16})/([01])/(\d+)")


class CopyNote(NamedTuple):
    """The aim of a copy: the committed step of the job that it is made of."""

    step: int
    digest: int
    found_inf: bool
    loads_finished: int

    @property
    def name(self) -> str:
        return (
            f"optstate.copy/{self.step}/{self.digest:016x}/{int(self.found_inf)}"
            f"/{self.loads_finished}"
        )


class Copy(enum.Enum):
    """The state of the job beside a note."""

    NONE = "none"  # there is no such job
    HALF_MADE = "half made"
    WHOLE = "whole"
    OUTGROWN = "outgrown"  # it has taken steps since
    ANOTHER = "another"  # a job that nobody copied


def meaning_of(note: CopyNote, position: Position | None) -> Copy:
    """Returns what the job beside a note is.

    A copy gets its state by its first load, then as many loads without content as the job that it
    is made of has had, and then steps without gradients, none of which has a digest.
    """
    if position is None:
        return Copy.NONE
    committed = position.committed
    if committed.step > note.step:
        return Copy.OUTGROWN
    if committed.digest == 0 and committed.step == note.step:
        if position.loads_finished >= note.loads_finished:
            return Copy.WHOLE
    is_idle = committed.step == 0 or committed.found_inf or _norm_of(committed) == 0
    if committed.digest == 0 and is_idle and position.prepared is None:
        return Copy.HALF_MADE
    return Copy.ANOTHER


def _norm_of(step: Step) -> float:
    return 0.0 if step.norm is None else step.norm.gradient_norm


def as_copied(note: CopyNote, position: Position) -> Position:
    """Returns the position of a whole copy: its last step counts as the one that it was made of."""
    step = Step(note.step, note.digest, note.found_inf, norm=position.committed.norm)
    return dataclasses.replace(position, committed=step)


def job_of_note(job: str) -> str:
    """Returns the name of the job that is the note of a job's copy."""
    name = job + _SUFFIX
    if len(name.encode()) <= _JOB_NAME_BYTES_MAX:
        return name
    return hashlib.blake2b(job.encode(), digest_size=16).hexdigest() + _SUFFIX


def _address(spec: SessionSpec) -> SessionSpec:
    return SessionSpec(
        job=job_of_note(spec.job),
        optimizer=0,
        group_options=(),
        parameters=(),
        endpoint=spec.endpoint,
        connect_timeout_s=spec.connect_timeout_s,
    )


def read_note(spec: SessionSpec) -> CopyNote | None:
    """Returns the note beside the job of `spec`; None: there is none."""
    address = _address(spec)
    try:
        if find_position(address) is None:
            return None
    except errors.UnimplementedError:  # a daemon that knows no jobs of several nodes
        return None
    found = _optctl.ask(spec.endpoint, "get", "params", address.job).get("parameters", [])
    names = [each["parameter"]["name"] for each in found[:1]]
    match = _NAME.fullmatch(names[0]) if names else None
    if match is None:
        return None
    return CopyNote(int(match[1]), int(match[2], 16), match[3] == "1", int(match[4]))


def write_note(spec: SessionSpec, note: CopyNote) -> None:
    """Makes the note; FailedPreconditionError: there is a job of its name already."""
    session = Session.open(
        dataclasses.replace(
            _address(spec),
            optimizer=infos()["sgd"].kind,
            group_options=(0,),
            parameters=(ParameterSpec(note.name, (1,), 1, _native.FLOAT32, _native.FLOAT32, 0),),
        )
    )
    session.close()


def delete_job(spec: SessionSpec, job: str) -> None:
    """Deletes a job of this node's daemon, if it is there, and waits until it is gone."""
    deadline = time.monotonic() + _DELETED_WITHIN_S
    while True:
        try:
            _optctl.change(spec.endpoint, "delete", "job", job)
            return
        except errors.NotFoundError:
            return
        except errors.UnavailableError:  # among others, it is still being deleted
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)


def remove_note(spec: SessionSpec) -> None:
    delete_job(spec, job_of_note(spec.job))
