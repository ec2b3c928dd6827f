"""Questions of a script to its optimizer."""

from __future__ import annotations

from typing import Any

from programs.registry import index, operation


@operation(2)
def look(side: Any) -> dict[str, Any]:
    """The whole state."""
    return side.state()


@operation(2, index=index)
def fetch_state(side: Any, index: int) -> dict[str, Any] | None:
    """Returns the state of one parameter."""
    parameter = side.parameter(index)
    held = [each for group in side.optimizer.param_groups for each in group["params"]]
    if not any(parameter is each for each in held):
        return None
    if side.is_ours:
        return dict(side.optimizer.fetch_state(parameter))
    return dict(side.optimizer.state.get(parameter, {}))


@operation(0.5)
def count_hooks(side: Any) -> dict[str, int] | None:
    if side.program.scaler is not None:
        return None  # README: a step that is skipped is a call of step() where the daemon unscales
    return dict(side.counted)


@operation(0.5)
def show(side: Any) -> None:
    """repr() must not raise."""
    repr(side.optimizer)
