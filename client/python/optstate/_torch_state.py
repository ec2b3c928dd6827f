"""What torch sees as Optimizer.state of an optimizer whose state is in the daemon."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from optstate._torch_served import Served


class Opaque:
    """Takes a value past the casts of torch's load_state_dict unchanged."""

    def __init__(self, value: Any) -> None:
        self.value = value


def hide_entries(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    hidden = {key: Opaque(value) for key, value in state_dict["state"].items()}
    return {**state_dict, "state": hidden}


class ServedState(defaultdict):
    """Optimizer.state without what is in the daemon, but true when there is some.

    torch.distributed.checkpoint takes a step with zeros to make the state of an optimizer
    that seems to have none.
    """

    def __init__(self, served: Served, entries: Mapping[Any, Any] = {}) -> None:
        super().__init__(dict, entries)
        self._served = weakref.ref(served)

    def __bool__(self) -> bool:
        served = self._served()
        return len(self) > 0 or (served is not None and served.has_state())

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))
