"""Steps that update nothing, by which a job that is made of another's state gets to its step.

A load does not change the number of a job's step. A step that is skipped does, and changes nothing
else but a loss scaler, which is why the last steps are chosen to bring that to its place.
"""

from __future__ import annotations

import ctypes
import dataclasses

from optstate import _native, errors
from optstate._torch.optimizer_info import by_kind
from optstate.session_spec import LossScaler, LossScalerState, SessionSpec

# Limits of a loss scaler: with them it keeps its scale through steps that are skipped.
HYSTERESIS_MAX = (1 << 24) - 1
_GROWTH_INTERVAL_MAX = (1 << 32) - 1


def idle(scaler: LossScaler) -> LossScaler:
    """Returns a scaler whose scale no skipped step changes, and that another one replaces which
    then keeps the scale."""
    return dataclasses.replace(
        scaler, hysteresis=HYSTERESIS_MAX, growth_interval=_GROWTH_INTERVAL_MAX
    )


def with_idle_scaler(spec: SessionSpec, state: LossScalerState | None) -> SessionSpec:
    """Returns the spec of a new job that keeps this scale through skipped steps; None: it has no
    dynamic scaler."""
    if state is None:
        return spec
    assert spec.loss_scaler is not None
    return dataclasses.replace(
        spec,
        loss_scaler=idle(spec.loss_scaler),
        loss_scaler_state=LossScalerState(state.loss_scale, 0, HYSTERESIS_MAX),
    )


def last_steps(
    spec: SessionSpec, state: LossScalerState | None, step_count: int
) -> tuple[int, int]:
    """Returns how many skipped steps, and then good ones, bring a scaler that has just been given
    its scale to this state."""
    scaler = spec.loss_scaler
    if scaler is None or not scaler.dynamic:
        return 0, 0
    if state is None:
        raise errors.UnimplementedError(
            f'the daemon that has job "{spec.job}" does not say where its loss scaler is, so that'
            " the job cannot be copied to another node: upgrade optstated on all nodes"
        )
    skipped, good = scaler.hysteresis - state.hysteresis_left, state.good_steps
    if skipped < 0 or skipped + good > step_count or step_count - skipped - good >= HYSTERESIS_MAX:
        raise errors.UnimplementedError(
            f'the loss scaler of job "{spec.job}" is at {state} after {step_count} steps, to where'
            " steps alone do not bring it, so that the job cannot be copied to another node: delete"
            " the job on all nodes (optctl delete job) and begin it again from a checkpoint"
        )
    return skipped, good


def hyperparams(spec: SessionSpec) -> ctypes.Array:
    """Returns valid hyperparameters for steps that update nothing."""
    defaults = by_kind(spec.optimizer).defaults
    groups = _native.array_of(_native.Hyperparams, len(spec.group_options))
    for group in groups:
        group.value[: len(defaults)] = defaults
    return groups
