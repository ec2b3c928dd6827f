"""Recognizes the step that torch's distributed checkpoints take to create optimizer state."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from optstate._torch.shards import local_of

_FUNCTION = "_init_optim_state"
_MODULE = "torch.distributed.checkpoint.state_dict"


def is_initialization(param_groups: Sequence[dict[str, Any]]) -> bool:
    """Returns whether step() is called by torch's get_optimizer_state_dict() or a similar function.

    Such functions take a step with zero gradients and learning rates of 0, to see what entries
    the state has. A trainer's own step does not count, whatever its gradients and rates.
    """
    # This check is cheap and seldom passes, so that most steps do not inspect their callers.
    if not param_groups or not all(group.get("lr") == 0 for group in param_groups):
        return False
    if not _is_called():
        return False
    gradients = (
        local_of(parameter.grad)
        for group in param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )
    return not any(bool(gradient.any()) for gradient in gradients)


def _is_called() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _FUNCTION and frame.f_globals.get("__name__") == _MODULE:
            return True
        frame = frame.f_back
    return False
