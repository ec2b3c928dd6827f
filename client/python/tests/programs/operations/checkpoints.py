"""Checkpoints of the model and of the optimizer."""

from __future__ import annotations

import collections
import copy
import io
from typing import Any

import torch

from programs.registry import index, of, operation

slots = of(0, 1)


def _through_file(saved: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@operation(1.5, slot=slots)
def save_model(side: Any, slot: int) -> None:
    side.slots["model", slot] = copy.deepcopy(side.model.state_dict())


@operation(1.5, slot=slots)
def load_model(side: Any, slot: int) -> None:
    saved = side.slots.get(("model", slot))
    if saved is not None:
        side.model.load_state_dict(saved, strict=False)


@operation(2, slot=slots, by_file=of(True, False))
def save_optimizer(side: Any, slot: int, by_file: bool) -> None:
    said = side.optimizer.state_dict()
    side.slots["optimizer", slot] = _through_file(said) if by_file else copy.deepcopy(said)


@operation(2, slot=slots)
def load_optimizer(side: Any, slot: int) -> None:
    saved = side.slots.get(("optimizer", slot))
    if saved is not None:
        side.optimizer.load_state_dict(copy.deepcopy(saved))


@operation(1.5, slot=slots)
def load_both(side: Any, slot: int) -> None:
    """The model first, as the README says."""
    load_model(side, slot)
    load_optimizer(side, slot)


@operation(1.5)
def reload(side: Any) -> None:
    """Changes nothing."""
    side.optimizer.load_state_dict(side.optimizer.state_dict())


@operation(1.5)
def exchange(side: Any) -> None:
    """Each side takes the other's checkpoint."""
    if side.is_ours:
        theirs = copy.deepcopy(side.shared["peer"].optimizer.state_dict())
        side.shared["exchanged"] = copy.deepcopy(side.optimizer.state_dict())
        side.optimizer.load_state_dict(theirs)
    else:
        side.optimizer.load_state_dict(copy.deepcopy(side.shared["exchanged"]))


@operation(
    1, index=index, how=of("scale", "entry", "clear", "assign"), key=of("exp_avg", "step", "sum")
)
@torch.no_grad()
def write_state(side: Any, index: int, how: str, key: str) -> None:
    """Writes into optimizer.state, as a script may with torch's."""
    parameter = side.parameter(index)
    state = side.optimizer.state
    if side.program.optimizer == "Adagrad" and how in ("clear", "assign"):
        return  # torch's cannot step then
    if side.program.optimizer == "LAMB" and key == "step":
        return  # the reference's is a number
    if how in ("clear", "assign"):
        if how == "clear":
            state.clear()
        else:
            side.optimizer.state = collections.defaultdict(dict)
        if not side.is_ours:  # a master is part of an entry
            side.optimizer.masters.clear()
            side.optimizer.loaded.clear()
    elif parameter in state and key in state[parameter]:
        if how == "scale":
            state[parameter][key].mul_(2)
        else:
            state[parameter][key] = torch.full_like(state[parameter][key], 3.0)
