"""Keeps what is durable of a job durable while its state moves.

A durable job has three forms on its way, and a loss of power on all nodes leaves one of them whole:

    the former jobs     at their last durable step, until all parcels are whole
    the parcels         by each of their loads, of which a whole one has had two
    the new jobs        at the step at which they begin, before parcels are deleted

Parcels say at which steps former jobs come back from their disks, and those that do are deleted
beside whole parcels as others are. A job of one node is known again by its last step alone, so it
is made durable at that first.

The daemon writes each load of a durable job to its disk, also the one by which a new job begins at
its step, but only with durability "step" does it wait for that. So a new job's durability is set
when it has begun, which waits. Until then it has another one that no script asks for: by that a job
of one node, whose layout does not name its run, is known as half made when it comes from its disk.
"""

from __future__ import annotations

import os
from typing import Any

from optstate import _optctl, errors
from optstate._storage import Storage
from optstate._torch.nodes.positions import position_of
from optstate.session_spec import SessionSpec

# A new job has this durability until it is whole, and durable. No script can ask for it.
WHILE_MOVING = "every 4294967295"
_STEP = 2
# The daemon writes a job's state for as long, at most, before it answers.
_DURABLE_WITHIN_S = 300.0


def durability_asked(storage: Storage) -> str:
    """Returns the durability that a script asks for, as optctl takes it; empty: none."""
    if storage.durability < _STEP:
        return ""
    return {
        _STEP: "step",
        3: f"every {storage.durability_steps}",
        4: f"interval {storage.durability_interval_ms}ms",
    }[storage.durability]


def as_of_loads(storage: Storage) -> Storage:
    """Returns where something lies each load of which is durable before it ends, if a durability
    is asked for."""
    durability = _STEP if durability_asked(storage) else storage.durability
    return _with_durability(storage, durability)


def as_it_is(storage: Storage) -> Storage:
    """Returns the settings of a session that takes any durability."""
    return _with_durability(storage, 0)


def _with_durability(storage: Storage, durability: int) -> Storage:
    return storage._replace(durability=durability, durability_steps=0, durability_interval_ms=0)


def set_durability(spec: SessionSpec, text: str, step: int) -> None:
    """Gives a durable job a durability, and returns when its present step is durable, which is
    this one. spec: the job and its daemon.

    UnimplementedError: the daemon is of an earlier build. UnavailableError: it does not answer, or
    its disk takes too long."""
    _optctl.change(
        spec.endpoint, "set", "job", spec.job, f"durability={text}", within_s=_DURABLE_WITHIN_S
    )
    position = position_of(spec)
    if position is None or position.durable_step != step:
        found = "gone" if position is None else f"durable at step {position.durable_step}"
        raise errors.UnimplementedError(
            f'job "{spec.job}" was to be made durable at step {step}, at which its state moves,'
            f" and is {found}: its daemon is of an earlier build, or another script uses the job."
            " Upgrade optstated on all nodes (optctl upgrade), end other scripts, and start the"
            " ranks again"
        )


def durability_in(storage: dict[str, Any]) -> str:
    """Returns a job's durability as optctl takes it, from what optctl says of its storage; empty:
    none."""
    kind = storage.get("durability", "")
    if kind == "DURABILITY_KIND_EVERY":
        return f"every {storage['every_steps']}"
    if kind == "DURABILITY_KIND_INTERVAL":
        return f"interval {storage['interval_ms']}ms"
    return "step" if kind == "DURABILITY_KIND_STEP" else ""


def make_present_step_durable(spec: SessionSpec) -> None:
    """Makes the present step of this node's job durable, if there is such a job and it is a
    durable one."""
    if (spec.endpoint or os.environ.get("OPTSTATE_ENDPOINT")) == "embedded":
        return  # that daemon begins with the session
    position = position_of(spec)
    if position is None:
        return
    found = _optctl.find_registered(spec.endpoint, spec.job)
    durability = durability_in(found.facts.get("storage", {})) if found else ""
    if durability:
        set_durability(spec, durability, position.committed.step)
