"""Which gradients are results of a reduction already: those of a step that failed behind it, and is
taken again with them. To reduce them once more would change them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary


class _Note(NamedTuple):
    gradient: weakref.ref[torch.Tensor]
    version: int  # that torch counts: a gradient that was written since is another one
    is_whole: bool


_notes: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter


def note_reduced(parameters: Iterable[torch.Tensor], *, is_whole: bool) -> None:
    """Notes that the gradients are results, or that some of their elements may be."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            _notes[parameter] = _Note(weakref.ref(gradient), gradient._version, is_whole)


def forget_reduced(parameters: Iterable[torch.Tensor]) -> None:
    """Forgets what was noted, when the step is over."""
    for parameter in parameters:
        _notes.pop(parameter, None)


def state_of(parameter: torch.Tensor, *, partial: int) -> int:
    """Returns 1 when the parameter's gradient is a result, `partial` when a part of it may be, and
    0 when it is none."""
    note, gradient = _notes.get(parameter), parameter.grad
    if note is None or gradient is None:
        return 0
    if note.gradient() is not gradient or note.version != gradient._version:
        return 0
    return 1 if note.is_whole else partial
