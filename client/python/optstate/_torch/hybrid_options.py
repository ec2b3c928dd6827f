"""Keyword arguments of Megatron-LM's HybridDeviceOptimizer, for scripts that have them."""

from __future__ import annotations

from typing import Any

import torch

from optstate.errors import InvalidArgumentError, UnimplementedError

_CLASSES = ("cpu_optimizer_cls", "gpu_optimizer_cls")
# Facts that hold in any case, by the keyword that asks for them; False would ask for others.
_ALWAYS = {
    "param_update_in_fp32": (
        "16-bit parameters always have masters here, by which they are updated in float32"
        ' (master="float32" or "split"), and updates in 16 bits cannot be had'
    ),
    "pin_cpu_grads": (
        "gradients of a device always go to memory that is registered with its driver, or through"
        " pinned buffers where the driver refuses that"
    ),
    "pin_cpu_params": (
        "parameters always go to a device from memory that is registered with its driver, or"
        " through pinned buffers where the driver refuses that"
    ),
}
_OVERLAP = "overlap_cpu_optimizer_d2h_h2d"


def take_hybrid_options(
    options: dict[str, Any], *, overlap: bool, served: type[torch.optim.Optimizer]
) -> None:
    """Takes HybridDeviceOptimizer's keywords out of `options`, but for offload_fraction, which has
    the same meaning here. None of them changes anything: each asks for what is so in any case, or
    it is refused. served: torch's class whose rule is used.

    TypeError: not a bool. UnimplementedError: it asks for what optstate does not do.
    InvalidArgumentError: it needs another keyword, or contradicts one.
    """
    for name, always in _ALWAYS.items():
        if _taken_bool(options, name) is False:
            raise UnimplementedError(f"{name}=False: {always}. Leave {name} out")
    wanted = _taken_bool(options, _OVERLAP)
    if wanted and not overlap:
        raise InvalidArgumentError(
            f"{_OVERLAP}=True: give overlap=True (too). It copies and pushes each gradient during"
            " backward(), and parameters come back while others are updated; changes of gradients"
            " that leave no trace, as through .data, are then not in the step. Without it step()"
            " copies gradients, has all updated, and copies parameters"
        )
    if wanted is False and overlap:
        raise InvalidArgumentError(f"{_OVERLAP}=False contradicts overlap=True: leave one out")
    for name in _CLASSES:
        asked = options.pop(name, None)
        if asked is not None and asked is not served:
            raise UnimplementedError(
                f"{name}={getattr(asked, '__name__', asked)}: the CPU and the daemon's devices"
                f" update by one rule, that of {served.__name__}, with the same bits. Leave {name}"
                " out, or take the optimizer of optstate that has the rule you need"
            )


def _taken_bool(options: dict[str, Any], name: str) -> bool | None:
    """Takes a keyword out; None: it was not given."""
    if name not in options:
        return None
    value = options.pop(name)
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, not True or False")
    return value
