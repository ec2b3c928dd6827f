"""A note beside a job of one node that is being made of parcels: of which ones.

The layout of a job of several nodes names its run, which parcels name too. That of a job of one
node does not, and nothing in a daemon's files tells a job that the mover makes from one that
another client has made and loaded. The note is a job of its own, whose one parameter has the note
as its name. It is there before anything is loaded into the job, and goes after the parcels. Beside
a durable job it is durable.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from optstate import _native, errors
from optstate._access import Access
from optstate._storage import Storage
from optstate._torch.optimizer_info import infos
from optstate._torch.state.arrays import ArrayTransfer
from optstate.session import Session
from optstate.session_spec import ParameterSpec, SessionSpec

_NAME = re.compile(r"optstate\.making/([0-9a-f]+)/([0-9a-f]+)")


class MakingNote(NamedTuple):
    """The run of the parcels, and of the job that is made of them."""

    parcels: str
    job: str

    @property
    def name(self) -> str:
        return f"optstate.making/{self.parcels}/{self.job}"


def note_of(name: str) -> MakingNote | None:
    """Returns the note whose `name` this is; None: it is none's."""
    found = _NAME.fullmatch(name)
    return None if found is None else MakingNote(found[1], found[2])


def write_note(
    address: SessionSpec, note: MakingNote, storage: Storage, access: Access | None
) -> None:
    """Makes the note. address: its job, and the daemon. storage: where it lies. access: who may
    use it.

    FailedPreconditionError: there is a job of its name already.
    """
    parameters = (ParameterSpec(note.name, (1,), 1, _native.FLOAT32, _native.FLOAT32, 0),)
    session = Session.open(
        SessionSpec(
            job=address.job,
            optimizer=infos()["sgd"].kind,
            group_options=(0,),
            parameters=parameters,
            endpoint=address.endpoint,
            connect_timeout_s=address.connect_timeout_s,
            storage=storage,
            access=access,
        )
    )
    try:
        if not session.created:
            raise errors.FailedPreconditionError(
                f'there is a job "{address.job}", which is a note about a job that is made of its'
                " parcels: another script makes it. End the one of the two that is not wanted"
            )
        # Only what is loaded can be durable.
        arrays = ArrayTransfer(session, parameters)
        session.begin_load()
        arrays.load_array(_native.MASTER, 0, torch.zeros(1, device="cpu"))
        arrays.flush_loads()
        session.finish_load()
    finally:
        session.close()
