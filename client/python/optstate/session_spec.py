"""The arguments that a session is opened with: its rank, its job, and the layout."""

from __future__ import annotations

import array
import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from optstate import _native
from optstate._access import Access
from optstate._interrupt import Interrupt
from optstate._storage import Storage


class Shard(NamedTuple):
    """The part of a global tensor that a parameter is; see v1.Shard."""

    owner: int
    global_shape: Sequence[int]
    offset: Sequence[int]
    is_flat: bool = False  # a range of the elements of a tensor, whose shape is not told


class ParameterSpec(NamedTuple):
    """One parameter of a layout; dtypes are codes of the C API."""

    name: str
    shape: Sequence[int]
    numel: int
    dtype: int
    gradient_dtype: int
    group: int
    shard: Shard | None = None  # set: the name and shape are the global tensor's and the shard's


class LossScalerState(NamedTuple):
    """The present state of a dynamic LossScaler; see v1.LossScalerState."""

    loss_scale: float
    good_steps: int
    hysteresis_left: int


@dataclasses.dataclass(frozen=True)
class LossScaler:
    """Loss scaling in the daemon, whose state survives with the job's.

    The defaults are torch.amp.GradScaler's. As in DeepSpeed, the scale shrinks only
    after ``hysteresis`` overflows and never goes below ``min_scale``.
    ``dynamic=False``: the scale stays at ``init_scale``.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 0.0
    dynamic: bool = True


@dataclasses.dataclass(frozen=True)
class SessionSpec:
    """Everything that opens a session; see optstate_session_options."""

    job: str
    optimizer: int
    group_options: Sequence[int]  # one for each group: bits of OptimizerInfo.options
    parameters: Sequence[ParameterSpec]
    endpoint: str | None = None
    partition: int = 1
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 0
    accumulate: bool = False
    ephemeral: bool = False
    extend: bool = False
    connect_timeout_s: float = 0
    step_timeout_s: float = 0
    state_format: int = 1
    loss_scaler: LossScaler | None = None
    master_format: int = 1
    accumulate_dtype: int = 1
    loss_scaler_state: LossScalerState | None = None
    change_detection: int = 0
    storage: Storage = Storage()
    speculative: bool = False
    held: Sequence[int] | None = None  # of HeldSession: parameters by index, ascending
    two_phase: bool = False  # commits prepare the step alone; see Session.decide
    access: Access | None = None  # of a new job
    fetches_parameters: bool = False  # one by one, with Session.fetch(PARAMETER, ...)


def _fill_parameters(parameters: Sequence[ParameterSpec]) -> tuple[ctypes.Array, array.array]:
    """Returns the C array, and the shapes that it points to."""
    structs = _native.array_of(_native.Parameter, len(parameters))
    shapes = array.array("q", (n for spec in parameters for n in spec.shape))
    for spec in parameters:
        if spec.shard is not None:
            shapes.extend((*spec.shard.global_shape, *spec.shard.offset))
    shapes.append(0)  # has an address in any case
    address, _ = shapes.buffer_info()
    of_shards = address + 8 * sum(len(spec.shape) for spec in parameters)
    for struct, spec in zip(structs, parameters):
        struct.name = spec.name.encode()
        struct.shape = address
        struct.ndim = len(spec.shape)
        struct.numel = spec.numel
        struct.dtype = spec.dtype
        struct.gradient_dtype = spec.gradient_dtype
        struct.group = spec.group
        address += 8 * len(spec.shape)
        if spec.shard is not None:
            struct.owner = spec.shard.owner
            struct.global_shape = of_shards
            struct.offset = of_shards + 8 * len(spec.shape)
            of_shards += 16 * len(spec.shape)
    return structs, shapes


def _native_access(access: Access | None) -> tuple[Any, Any]:
    """Returns a pointer to the C struct, or None, and what must outlive it."""
    if access is None:
        return None, None
    readers = (ctypes.c_char_p * len(access.readers))(*(each.encode() for each in access.readers))
    struct = _native.JobAccess(
        group=access.group.encode(),
        is_private=access.is_private,
        readers=readers,
        reader_count=len(readers),
    )
    return ctypes.pointer(struct), readers


def options_of(spec: SessionSpec, interrupt: Interrupt) -> tuple[_native.SessionOptions, Any]:
    """Returns the C struct, and the objects that must outlive it."""
    parameters, shapes = _fill_parameters(spec.parameters)
    groups = _native.array_of(_native.Group, len(spec.group_options))
    for group, bits in zip(groups, spec.group_options):
        group.options = bits
    scaler = None
    if spec.loss_scaler is not None:
        fields = dataclasses.asdict(spec.loss_scaler)
        if spec.loss_scaler_state is not None:
            begin = spec.loss_scaler_state._asdict()
            fields.update({f"begin_{name}": value for name, value in begin.items()})
        scaler = ctypes.pointer(_native.LossScaler(**fields))
    access, readers = _native_access(spec.access)
    options = _native.SessionOptions(
        endpoint=spec.endpoint.encode() if spec.endpoint else None,
        job=spec.job.encode(),
        optimizer=spec.optimizer,
        partition=spec.partition,
        rank=spec.rank,
        world_size=spec.world_size,
        local_world_size=spec.local_world_size,
        accumulate=spec.accumulate,
        ephemeral=spec.ephemeral,
        extend=spec.extend,
        groups=groups,
        group_count=len(groups),
        parameters=parameters,
        parameter_count=len(parameters),
        connect_timeout_s=spec.connect_timeout_s,
        step_timeout_s=spec.step_timeout_s,
        interrupted=interrupt.callback,
        state_format=spec.state_format,
        loss_scaler=scaler,
        master_format=spec.master_format,
        accumulate_dtype=spec.accumulate_dtype,
        change_detection=spec.change_detection,
        speculative=spec.speculative,
        fetches_parameters=spec.fetches_parameters,
        two_phase=spec.two_phase,
        access=access,
        **spec.storage._asdict(),
    )
    return options, (parameters, shapes, groups, scaler, access, readers)
