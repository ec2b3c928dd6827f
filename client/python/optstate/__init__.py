"""optstate: training's optimizer state in a daemon that outlives the trainer.

    import optstate

    optimizer = optstate.AdamW(model.parameters(), lr=3e-4, job="my-run")

stands where torch.optim.AdamW stood. Everything else of the training loop stays
as it is; after a crash the same script goes on from ``optimizer.committed_step``.

torch is imported when AdamW or Adam is first used, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optstate.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OptstateError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
)
from optstate.session import StepOutcome

if TYPE_CHECKING:
    from optstate.torch_optimizer import Adam, AdamW, ServedOptimizer

__all__ = [
    "AbortedError",
    "Adam",
    "AdamW",
    "AlreadyExistsError",
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OptstateError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "ServedOptimizer",
    "StepOutcome",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in ("Adam", "AdamW", "ServedOptimizer"):
        from optstate import torch_optimizer

        return getattr(torch_optimizer, name)
    if name == "__version__":
        from optstate import _native

        return _native.version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
