"""Hooks that receive gradients while backward() is still running."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


class GradientHooks:
    """Calls a method for each parameter whose gradient backward() has accumulated.

    The hooks do not keep the method's object alive, which would keep its rank attached; they
    are removed with this object. Threads: one at a time.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def install(
        self, tensors: Iterable[tuple[int, torch.Tensor]], method: Callable[[int], None]
    ) -> None:
        """Calls `method(index)` for these from now on, in place of what was installed before."""
        self.remove()
        reference = weakref.WeakMethod(method)

        def hook_of(index: int) -> Callable[[torch.Tensor], None]:
            def hook(_: torch.Tensor) -> None:
                present = reference()
                if present is not None:
                    present(index)

            return hook

        self._hooks += [
            tensor.register_post_accumulate_grad_hook(hook_of(index))
            for index, tensor in tensors
            if tensor.requires_grad
        ]
        weakref.finalize(self, _remove, self._hooks)

    def remove(self) -> None:
        """Removes all hooks. Idempotent."""
        _remove(self._hooks)


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()
