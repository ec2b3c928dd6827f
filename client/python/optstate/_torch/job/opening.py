"""Opens sessions of a job on all ranks together or on none."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Sequence
from typing import Callable, NamedTuple

from optstate import errors
from optstate._torch.nodes.agreement import NodeAgreement
from optstate._torch.nodes.copy_note import delete_job, refuse_half_made
from optstate._torch.nodes.moves.holdings import has_whole_parcel
from optstate._torch.nodes.places import Places
from optstate._torch.ranks import Ranks
from optstate.held_session import HeldSession
from optstate.job_position import find_position
from optstate.session import Session
from optstate.session_spec import SessionSpec

# In the daemon's error of a job that has shards of other ranks.
_OTHER_SHARDS = "a job with other shards"


class Existing(NamedTuple):
    """A job that must exist: none is made of its name."""

    endpoint: str | None  # where it was found; None: the default one


def place_of(endpoint: str | None) -> str:
    """Returns a name for the endpoint's daemon that is the same for every wire."""
    asked = endpoint or os.environ.get("OPTSTATE_ENDPOINT") or ""
    return asked[len("grpc:") :] if asked.startswith("grpc:unix:") else asked


def private_name() -> str:
    """Returns a unique job name."""
    return f"private-{secrets.token_hex(8)}"


def check_names(asked: Sequence[str | None]) -> None:
    """Raises ValueError, on every rank alike, when ranks name different jobs."""
    for rank, name in enumerate(asked):
        if name != asked[0]:
            there, here = ("none" if each is None else f'"{each}"' for each in (asked[0], name))
            raise ValueError(f"rank {rank} asks for job {here}, rank 0 for {there}: give all one")


def _open(spec: SessionSpec, take_over: Callable[[SessionSpec], bool]) -> Session:
    kind = Session if spec.held is None else HeldSession
    try:
        return kind.open(spec)
    except errors.FailedPreconditionError as error:
        # The daemon knows the one way that other clients have too.
        if spec.held is None or _OTHER_SHARDS not in str(error) or spec.ephemeral:
            raise
        raise errors.FailedPreconditionError(
            f'{error}. Or say across_nodes="sharded", also on one node, which moves the state to'
            " these ranks as they attach"
        ) from None
    except errors.AlreadyExistsError:  # the layout is the same: that was checked before
        if not take_over(spec):
            raise
    return kind.open(spec)


def gone(job: str) -> errors.NotFoundError:
    """Returns the error of a job that must exist and does not."""
    return errors.NotFoundError(
        f'there is no job "{job}" any more: it was deleted meanwhile, and its state with it. No new'
        " one is made in its place: start again from a checkpoint"
    )


def check_exists(spec: SessionSpec, existing: Existing | None) -> None:
    """Raises NotFoundError when the job of `spec` is one that must exist and does not.

    A job that is deleted between this and the opening is made anew all the same: sessions say so
    (Session.created), and what asks for an existing job looks at that too.
    """
    if existing is None:
        return
    endpoint = existing.endpoint or spec.endpoint
    try:
        found = find_position(dataclasses.replace(spec, endpoint=endpoint))
    except errors.UnimplementedError:  # an earlier build's daemon, which does not say
        return
    if found is None:
        raise gone(spec.job)


def _refuse_half_moved(spec: SessionSpec, session: Session) -> None:
    """Raises FailedPreconditionError when the job's state was moving to this node: the job is not
    whole, and may just have been made anew."""
    if not has_whole_parcel(spec, is_new=session.created):
        return
    session.close()
    if session.created:
        delete_job(spec, spec.job)
    raise errors.FailedPreconditionError(
        f'the state of job "{spec.job}" was moving to this node when its ranks ended: start them'
        ' with across_nodes="sharded", which ends the move'
    )


def open_together(
    ranks: Ranks,
    places: Places,
    agreement: NodeAgreement,
    make_spec: Callable[[], SessionSpec],
    take_over: Callable[[SessionSpec], bool],
    *,
    compares: bool,
    settles: bool,
    existing: Existing | None = None,
) -> tuple[Session, SessionSpec]:
    """Opens every rank's session, that of each node's first rank first, or raises on every rank.

    `compares`: ranks of several nodes compare what they ask for before. `settles`: besides, nodes
    are brought to one step. A node that is alone may be what is left of several, with a step that
    waits for its verdict.
    `agreement`: of all ranks that agree, which may be of other jobs too.
    `take_over` frees a rank that this process already holds, and returns whether it did.
    `existing`: NotFoundError, on every rank, instead of a new job; see check_exists().
    """
    error: Exception | None = None
    spec: SessionSpec | None = None
    session: Session | None = None
    is_first = ranks.rank == places.first_rank
    if compares:
        try:
            spec = make_spec()
        except Exception as failure:
            error = failure
        agreement.agree(error)
        assert spec is not None
        agreement.check_spec(spec)
        # An embedded daemon begins with the session; other jobs may have others.
        if settles and (agreement.spans_jobs or place_of(spec.endpoint) != "embedded"):
            agreement.settle(spec)
    try:
        spec = spec or make_spec()
        if is_first:
            check_exists(spec, existing)
            session = _open(spec, take_over)
            if not settles and not session.created and not spec.ephemeral:
                refuse_half_made(dataclasses.replace(spec, endpoint=session.endpoint))
            if not agreement.moves_state and not spec.ephemeral:
                _refuse_half_moved(dataclasses.replace(spec, endpoint=session.endpoint), session)
    except Exception as failure:
        error = failure
    # The first rank has resolved the endpoint; an embedded daemon is its child.
    opened = None if session is None else session.endpoint
    if places.several:
        endpoint = ranks.gather(opened)[places.first_rank]
    else:
        endpoint = ranks.from_first(opened)
    if not is_first and error is None and endpoint is not None:
        assert spec is not None
        try:
            spec = dataclasses.replace(spec, endpoint=endpoint)
            session = _open(spec, take_over)
        except Exception as failure:
            error = failure
    try:
        agreement.agree(error)
        assert session is not None and spec is not None
        if places.several or agreement.spans_jobs:
            agreement.check_attached(session)
    except BaseException:
        if session is not None:
            session.close()
        raise
    return session, spec
