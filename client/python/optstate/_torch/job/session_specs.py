"""The spec of a session, from the settings of an optimizer and the place of its rank."""

from __future__ import annotations

from typing import Any

from optstate import _native
from optstate._torch.nodes.places import Places
from optstate._torch.settings import Settings
from optstate.session_spec import SessionSpec


def session_spec(settings: Settings, places: Places, **layout: Any) -> SessionSpec:
    """Returns the spec of this rank's session with the job of its node.

    layout: the fields that follow from the parameters, and two_phase.
    """
    return SessionSpec(
        endpoint=settings.endpoint,
        rank=places.local_rank,
        world_size=places.local_world_size,
        local_world_size=places.local_world_size,
        accumulate=settings.accumulate,
        connect_timeout_s=settings.connect_timeout or 0,
        step_timeout_s=settings.step_timeout or 0,
        state_format=_native.STATE_FORMATS[settings.state_format],
        loss_scaler=settings.loss_scaler,
        loss_scaler_state=settings.loss_scaler_state,
        master_format=_native.MASTER_FORMATS[settings.master_format],
        accumulate_dtype=_native.ACCUMULATE_DTYPES[settings.accumulate_dtype or "float32"],
        change_detection=_native.CHANGE_DETECTIONS[settings.detect_changes],
        storage=settings.storage,
        access=settings.access,
        speculative=settings.speculative,
        **layout,
    )
