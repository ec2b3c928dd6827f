"""optstate: keeps the optimizer state of training in a daemon that outlives the trainer.

    import optstate

    optimizer = optstate.AdamW(model.parameters(), lr=3e-4, job="my-run")

replaces torch.optim.AdamW. The rest of the training loop stays as it is; after a
crash the same script continues from ``optimizer.committed_step``.

torch is imported when an optimizer is first used, not before.
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
from optstate.session_spec import LossScaler

if TYPE_CHECKING:
    from optstate._torch.flat_shards import flat_shard
    from optstate.ddp import ddp_hook
    from optstate.optimizers import (
        LAMB,
        SGD,
        Adafactor,
        Adagrad,
        Adam,
        AdamW,
        Lion,
        Muon,
        NAdam,
        RAdam,
        RMSprop,
    )
    from optstate.parameter_store import ParameterStore
    from optstate.torch_optimizer import ServedOptimizer
    from optstate.whole_state import whole_state_dict

_OF_TORCH = (
    "LAMB",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "ServedOptimizer",
)

__all__ = [
    "AbortedError",
    "LAMB",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "AlreadyExistsError",
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "Lion",
    "LossScaler",
    "Muon",
    "NAdam",
    "NotFoundError",
    "OptstateError",
    "OutOfRangeError",
    "ParameterStore",
    "PermissionDeniedError",
    "RAdam",
    "RMSprop",
    "ResourceExhaustedError",
    "ServedOptimizer",
    "StepOutcome",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
    "__version__",
    "ddp_hook",
    "flat_shard",
    "whole_state_dict",
]


def __getattr__(name: str) -> Any:
    if name in _OF_TORCH:
        from optstate import optimizers

        return getattr(optimizers, name)
    if name == "ParameterStore":
        from optstate.parameter_store import ParameterStore

        return ParameterStore
    if name == "ddp_hook":
        from optstate.ddp import ddp_hook

        return ddp_hook
    if name == "flat_shard":
        from optstate._torch.flat_shards import flat_shard

        return flat_shard
    if name == "whole_state_dict":
        from optstate.whole_state import whole_state_dict

        return whole_state_dict
    if name == "__version__":
        from optstate import _native

        return _native.version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
