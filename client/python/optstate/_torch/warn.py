"""Warnings that point at the user's script."""

from __future__ import annotations

import os
import sys
import warnings

import torch

import optstate

_NOT_THE_SCRIPT = tuple(os.path.dirname(each.__file__) + os.sep for each in (optstate, torch))


def warn(text: str) -> None:
    """Issues a UserWarning located at the nearest caller outside of optstate and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
