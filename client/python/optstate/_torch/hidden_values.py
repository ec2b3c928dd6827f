"""Hides values of a state_dict from torch's load_state_dict(), which would cast them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class _Opaque:
    """Wraps a value so that torch's load_state_dict does not cast it."""

    def __init__(self, value: Any) -> None:
        self.value = value


def hide_values(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hides optstate's values from torch's casts; torch casts the user's own values.

    It is a pre-hook of load_state_dict.
    """
    keys = optimizer._served.torch_keys()
    hidden = {
        key: {name: _Opaque(each) if name in keys else each for name, each in value.items()}
        if isinstance(value, Mapping)
        else value
        for key, value in state_dict["state"].items()
    }
    return {**state_dict, "state": hidden}


def opened(entry: Any) -> Any:
    """Returns an entry without the wrappers that hide_values() put around its values."""
    if not isinstance(entry, dict):
        return entry
    return {
        key: value.value if isinstance(value, _Opaque) else value for key, value in entry.items()
    }
