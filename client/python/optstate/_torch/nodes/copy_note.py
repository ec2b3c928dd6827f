"""A note beside a job that is a copy of another node's: which step of that job it is to become.

Nothing else in a daemon's files tells a copy that is half made from a job that has trained. The
note is a job of its own, without state, whose one parameter has the note as its name. It is made
when the copy has been made and nothing is loaded into it yet, says when its daemon made the copy,
and goes when the copy has taken a step with the other nodes. So a killed trainer leaves a job that
nothing was ever loaded into, which counts as none, or a note and the job that it is about: see
meaning_of(). A note about a job that is gone says nothing about another one of its name.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import logging
import re
import time
from typing import NamedTuple

from optstate import _native, _optctl, errors
from optstate._torch.nodes.positions import position_of
from optstate._torch.nodes.resolution import Position, Step
from optstate._torch.optimizer_info import infos
from optstate.job_position import find_position
from optstate.session import Session
from optstate.session_spec import ParameterSpec, SessionSpec

logger = logging.getLogger("optstate")

_SUFFIX = ".optstate-copy"
_JOB_NAME_BYTES_MAX = 128
# Where the machine is busy, the engine of a job that is deleted ends only some time later, and so
# does the daemon notice that ranks have ended.
_DELETED_WITHIN_S = 10.0
_PAUSE_S = 0.05
# A number has 64 bits. Any client can name a parameter, and int() refuses some thousand digits.
_NAME = re.compile(r"optstate\.copy/(\d{1,20})/([0-9a-f]{16})/([01])/(\d{1,20})/(\S+)")


class CopyNote(NamedTuple):
    """The aim of a copy: the committed step of the job that it is made of."""

    step: int
    digest: int
    found_inf: bool
    loads_finished: int
    made_at: str  # when the copy was made, as its daemon says

    @property
    def name(self) -> str:
        return (
            f"optstate.copy/{self.step}/{self.digest:016x}/{int(self.found_inf)}"
            f"/{self.loads_finished}/{self.made_at}"
        )


def note_from(name: str) -> CopyNote | None:
    """Returns the note whose `name` this is; None: it is none's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return CopyNote(int(match[1]), int(match[2], 16), match[3] == "1", int(match[4]), match[5])


class Copy(enum.Enum):
    """The state of the job beside a note."""

    NONE = "none"  # there is no such job
    HALF_MADE = "half made"
    WHOLE = "whole"
    OUTGROWN = "outgrown"  # it has taken steps since
    TRAINED = "trained"  # somebody has trained with it before it was whole
    ANOTHER = "another"  # a job that was made since, and that the note is not about


def meaning_of(note: CopyNote, position: Position | None, *, is_copy: bool) -> Copy:
    """Returns what the job beside a note is. is_copy: it is the job that the note is about.

    A copy gets its state by its first load. Another one, without content, has it begin where the
    job is that it is made of, as after a step without gradients, which has no digest. Trainers of
    earlier builds took that many loads and steps one by one.
    """
    if position is None:
        return Copy.NONE
    if not is_copy:
        return Copy.ANOTHER
    committed = position.committed
    if committed.step > note.step:
        return Copy.OUTGROWN
    is_no_update = committed.step == 0 or committed.found_inf or _norm_of(committed) == 0
    if committed.digest != 0 or not is_no_update:
        return Copy.TRAINED
    if committed.step == note.step and position.loads_finished >= note.loads_finished:
        return Copy.WHOLE
    return Copy.HALF_MADE if position.prepared is None else Copy.TRAINED


def has_nothing(position: Position) -> bool:
    """Returns whether nothing was ever loaded into a job: it has no state that could be lost."""
    is_new = position.committed.step == 0 and position.loads_finished == 0
    return is_new and position.prepared is None


def _norm_of(step: Step) -> float:
    return 0.0 if step.norm is None else step.norm.gradient_norm


def as_copied(note: CopyNote, position: Position) -> Position:
    """Returns the position of a whole copy: its last step counts as the one that it was made of,
    whose norm the note does not have."""
    return dataclasses.replace(position, committed=Step(note.step, note.digest, note.found_inf))


def position_on_node(spec: SessionSpec) -> tuple[Position | None, bool]:
    """Returns how far this node's job is, and whether a note says so: it is a whole copy. A job
    that nothing was ever loaded into counts as none.

    Removes a copy that is half made, and a note that means nothing any more.
    FailedPreconditionError: somebody has trained with a half made copy.
    """
    note = read_note(spec)
    position = position_of(spec)
    if note is None:
        return (None if position is None or has_nothing(position) else position), False
    meaning = meaning_of(note, position, is_copy=made_at(spec) == note.made_at)
    if meaning is Copy.WHOLE:
        assert position is not None
        return as_copied(note, position), True
    if meaning is Copy.TRAINED:
        assert position is not None
        raise errors.FailedPreconditionError(
            f'job "{spec.job}" was being copied to this node for step {note.step} when its trainer'
            f" died, and somebody has trained with the half made copy, which is at step"
            f" {position.committed.step}: it is of no use. Delete it (optctl delete job"
            f" {spec.job}), and start the ranks of all nodes again, which copies it"
        )
    if meaning is Copy.HALF_MADE:
        logger.warning(
            'job "%s" was being copied to this node when its trainer died: the half made copy is'
            " removed, and the job is copied again",
            spec.job,
        )
        delete_job(spec, spec.job)
        position = None
    remove_note(spec)
    return (None if position is None or has_nothing(position) else position), False


def refuse_half_made(spec: SessionSpec) -> None:
    """Raises FailedPreconditionError when this node's job is a copy that is half made: its step is
    not that of its state."""
    note = read_note(spec)
    if note is None:
        return
    meaning = meaning_of(note, position_of(spec), is_copy=made_at(spec) == note.made_at)
    if meaning not in (Copy.HALF_MADE, Copy.TRAINED):
        return
    raise errors.FailedPreconditionError(
        f'job "{spec.job}" was being copied to this node for step {note.step} when its trainer'
        ' died, and is half made: start the ranks of all nodes with across_nodes="replicated",'
        f" which copies it again, or delete it (optctl delete job {spec.job})"
    )


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


def made_at(spec: SessionSpec) -> str | None:
    """Returns when this node's job was made, which tells it from others of its name; None: there
    is no such job.

    UnavailableError: its daemon does not say.
    """
    if find_position(spec) is None:
        return None
    found = _optctl.ask(spec.endpoint, "describe", "job", spec.job).get("created_at")
    if not found:
        raise errors.UnavailableError(
            f'the daemon does not say when job "{spec.job}" was made (optctl describe job'
            f" {spec.job}): start the ranks again"
        )
    return str(found)


def read_note(spec: SessionSpec) -> CopyNote | None:
    """Returns the note beside the job of `spec`; None: there is none."""
    address = _address(spec)
    try:
        if find_position(address) is None:
            return None
    except errors.UnimplementedError:  # a daemon that knows no jobs of several nodes
        return None
    except errors.UnavailableError as error:  # about a job that the user has named
        raise errors.UnavailableError(str(error).replace(address.job, spec.job)) from None
    found = _optctl.find_registered(spec.endpoint, address.job)
    if found is None or not found.parameters:
        return None
    return note_from(found.parameters[0]["parameter"]["name"])


def write_note(spec: SessionSpec, note: CopyNote) -> None:
    """Makes the note, which who may use the job may read and remove.

    FailedPreconditionError: there is a job of its name already.
    """
    session = Session.open(
        dataclasses.replace(
            _address(spec),
            optimizer=infos()["sgd"].kind,
            group_options=(0,),
            parameters=(ParameterSpec(note.name, (1,), 1, _native.FLOAT32, _native.FLOAT32, 0),),
            access=spec.access,
        )
    )
    session.close()
    if not session.created:
        raise errors.FailedPreconditionError(
            f'there is a job "{job_of_note(spec.job)}", which is the note of a copy of job'
            f' "{spec.job}": another script copies that to this node. End the one of the two that'
            " is not wanted"
        )


def delete_job(spec: SessionSpec, job: str) -> None:
    """Deletes a job of this node's daemon, if it is there, and waits until it is gone.

    FailedPreconditionError: ranks are attached to it, and stay so.
    """
    deadline = time.monotonic() + _DELETED_WITHIN_S
    while True:
        try:
            _optctl.change(spec.endpoint, "delete", "job", job)
            return
        except errors.NotFoundError:
            return
        # Among others, it is still being deleted, or ranks have just been killed.
        except (errors.UnavailableError, errors.FailedPreconditionError):
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)


def remove_note(spec: SessionSpec) -> None:
    delete_job(spec, job_of_note(spec.job))
