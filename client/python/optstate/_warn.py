"""Warnings that point at the user's script."""

from __future__ import annotations

import os
import sys
import warnings

import torch

_NOT_THE_SCRIPT = tuple(os.path.dirname(path) + os.sep for path in (__file__, torch.__file__))


def warn(text: str) -> None:
    """Issues a UserWarning located at the nearest caller outside of optstate and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
