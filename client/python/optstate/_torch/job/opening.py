"""Opens sessions of a job on all ranks together or on none."""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import Callable

from optstate import errors
from optstate._torch.ranks import Ranks
from optstate.held_session import HeldSession
from optstate.session import Session
from optstate.session_spec import SessionSpec


def place_of(endpoint: str | None) -> str:
    """Returns a name for the endpoint's daemon that is the same for every wire."""
    asked = endpoint or os.environ.get("OPTSTATE_ENDPOINT") or ""
    return asked[len("grpc:") :] if asked.startswith("grpc:unix:") else asked


def private_name() -> str:
    """Returns a unique job name."""
    return f"private-{secrets.token_hex(8)}"


def _open(spec: SessionSpec, take_over: Callable[[SessionSpec], bool]) -> Session:
    kind = Session if spec.held is None else HeldSession
    try:
        return kind.open(spec)
    except errors.AlreadyExistsError:  # the layout is the same: that was checked before
        if not take_over(spec):
            raise
    return kind.open(spec)


def open_together(
    ranks: Ranks,
    make_spec: Callable[[], SessionSpec],
    take_over: Callable[[SessionSpec], bool],
) -> tuple[Session, SessionSpec]:
    """Opens every rank's session, rank 0's first, or raises on every rank.

    `take_over` frees a rank that this process already holds, and returns whether it did.
    """
    error: Exception | None = None
    spec: SessionSpec | None = None
    session: Session | None = None
    try:
        spec = make_spec()
        if ranks.rank == 0:
            session = _open(spec, take_over)
    except Exception as failure:
        error = failure
    # Rank 0 has resolved the endpoint; an embedded daemon is a child of rank 0.
    endpoint = ranks.from_first(None if session is None else session.endpoint)
    if ranks.rank != 0 and error is None and endpoint is not None:
        assert spec is not None
        try:
            spec = dataclasses.replace(spec, endpoint=endpoint)
            session = _open(spec, take_over)
        except Exception as failure:
            error = failure
    try:
        ranks.agree(error)
        assert session is not None and spec is not None
    except BaseException:
        if session is not None:
            session.close()
        raise
    return session, spec
