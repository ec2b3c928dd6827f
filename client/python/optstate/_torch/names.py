"""Names in messages."""

from __future__ import annotations

from collections.abc import Sequence

# Number of names that a message has.
_NAMES_MAX = 5


def quoted(names: Sequence[str]) -> str:
    """Returns the first names in quotes, and how many more there are."""
    shown = [f'"{name}"' for name in names[:_NAMES_MAX]]
    if len(names) > _NAMES_MAX:
        shown.append(f"{len(names) - _NAMES_MAX} more")
    return ", ".join(shown)
