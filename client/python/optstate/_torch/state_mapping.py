"""The mapping that torch sees as Optimizer.state when the state is in the daemon."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import torch

from optstate._torch.state_edits import StateEdits


class HasEdits(Protocol):
    """The optimizer that the mapping is the state of."""

    edits: StateEdits | None

    def attached(self) -> Any:
        """Raises RuntimeError when the state is in no daemon."""


class _PlainCopies(MutableMapping, dict):
    """A dict for isinstance() checks, which stores nothing in the dict itself."""

    def _plain(self) -> dict[Any, Any]:
        raise NotImplementedError

    def copy(self) -> dict[Any, Any]:
        return self._plain()

    __copy__ = copy

    def __or__(self, other: Any) -> dict[Any, Any]:
        return self._plain() | dict(other)

    def __ror__(self, other: Any) -> dict[Any, Any]:
        return dict(other) | self._plain()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))

    def __repr__(self) -> str:
        return repr(self._plain())

    __hash__ = None  # type: ignore[assignment]


class EntryView(_PlainCopies):
    """One parameter's entry: torch's keys, whose values are fetched on access, and keys of the
    user's own.

    A tensor stays the same until the next step. Values that are set, or changed in place, are
    sent before that step.
    """

    def __init__(self, state: ServedState, tensor: torch.Tensor) -> None:
        dict.__init__(self)
        self._state = state
        self._tensor = tensor

    def __getitem__(self, key: str) -> Any:
        return self._state._edits().value(self._tensor, key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._state._edits().set_value(self._tensor, key, value)

    def __delitem__(self, key: str) -> None:
        self._state._edits().delete_value(self._tensor, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state._edits().keys(self._tensor))

    def __len__(self) -> int:
        return len(self._state._edits().keys(self._tensor))

    def __contains__(self, key: object) -> bool:
        return key in self._state._edits().keys(self._tensor)

    def clear(self) -> None:
        self._state._edits().reset(self._tensor)

    def _plain(self) -> dict[Any, Any]:
        return {key: self[key] for key in self}

    def __reduce_ex__(self, _: Any) -> Any:
        return dict, (self._plain(),)


class ServedState(_PlainCopies, defaultdict):
    """Optimizer.state of an attached optimizer: an entry for each parameter that has state
    in the daemon, or is given some, and whatever else the user puts there.

    User writes take effect: entries of parameters are sent to the daemon before the next
    step, and shown by state_dict() at once; keys that the optimizer does not know are kept
    in this process.

    Threads: one at a time, like the optimizer.
    """

    def __init__(self, served: HasEdits) -> None:
        defaultdict.__init__(self, dict)
        self._served = weakref.ref(served)

    def _edits(self) -> StateEdits:
        served = self._served()
        if served is None:
            raise RuntimeError("the optimizer of this state is gone")
        served.attached()
        assert served.edits is not None
        return served.edits

    def __getitem__(self, key: Any) -> Any:
        edits = self._edits()
        if edits.is_parameter(key):
            return EntryView(self, key)
        return edits.others[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        edits = self._edits()
        if not edits.is_parameter(key):
            edits.others[key] = value
        elif isinstance(value, Mapping):
            edits.replace(key, value)
        else:
            raise TypeError(f"state of a parameter is a mapping, not {type(value).__name__}")

    def __delitem__(self, key: Any) -> None:
        edits = self._edits()
        if not edits.is_parameter(key):
            del edits.others[key]
        elif key in self:
            edits.reset(key)
        else:
            raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        edits = self._edits()
        return iter([*edits.parameters_with_entries(), *edits.others])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __contains__(self, key: object) -> bool:
        edits = self._edits()
        return bool(edits.keys(key)) if edits.is_parameter(key) else key in edits.others

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default

    def clear(self) -> None:
        self.assign({})

    def assign(self, state: Mapping[Any, Any]) -> None:
        """Replaces all state by this mapping: parameters without an entry in it start anew."""
        if state is self:
            return
        given = dict(state)
        present = list(self)
        for key, value in given.items():
            self[key] = value
        for key in present:
            if key not in given:
                del self[key]

    def _plain(self) -> dict[Any, Any]:
        return {
            key: dict(value) if isinstance(value, EntryView) else value
            for key, value in self.items()
        }

    def __reduce_ex__(self, _: Any) -> Any:
        return defaultdict, (dict, self._plain())

    def __deepcopy__(self, memo: dict) -> Any:
        return copy.deepcopy(defaultdict(dict, self._plain()), memo)
