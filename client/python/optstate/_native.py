"""The C API (client/c_api.h and what is beside it) through ctypes: structs, prototypes, loading.

Threads: the library may be called from several threads; the GIL is released
for the length of each call. Nothing here needs torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)

from optstate import _interrupt, errors

PACKAGE_DIRECTORY = pathlib.Path(__file__).resolve().parent

FLOAT32, BFLOAT16, FLOAT16 = 1, 2, 3
PARTITIONS = {"greedy": 1, "contiguous": 2, "local": 4}
REPLICATED = 3  # the daemon sums what all ranks push whole
CHANGE_DETECTIONS = {"off": 0, "sample": 1, "exact": 2}
ACCUMULATE_DTYPES = {"float32": 1, "gradient": 2}
STATE_FORMATS = {"float32": 1, "bfloat16": 2, "dynamic8": 3}
MASTER_FORMATS = {"float32": 1, "split": 2}
HYPERPARAMS_MAX = 12
MASTER, STATE_0, STEP_COUNT, SCALAR, GRADIENT_NORM, PARAMETER = 1, 2, 5, 6, 7, 8
PREPARED_SUM = 9
PHASE_EMPTY, PHASE_LOADING, PHASE_READY, PHASE_FAILED = 1, 2, 3, 4


class _Versioned(Structure):
    """A struct whose first field tells the library how much of it this client knows."""

    def __init__(self, **fields: object) -> None:
        super().__init__(struct_size=sizeof(type(self)), **fields)


class Parameter(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("shape", c_void_p),
        ("ndim", c_size_t),
        ("numel", c_int64),
        ("dtype", c_int32),
        ("gradient_dtype", c_int32),
        ("group", c_uint32),
        ("global_shape", c_void_p),
        ("offset", c_void_p),
        ("owner", c_uint32),
    )


class Group(Structure):
    _fields_ = (("struct_size", c_size_t), ("options", c_uint32))


class HyperparamInfo(Structure):
    _fields_ = (("struct_size", c_size_t), ("name", c_char_p), ("default_value", c_double))


class OptimizerInfo(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("optimizer", c_int32),
        ("name", c_char_p),
        ("hyperparams", POINTER(HyperparamInfo)),
        ("hyperparam_count", c_size_t),
        ("state_arrays", POINTER(c_char_p)),
        ("state_options", POINTER(c_uint32)),
        ("state_array_count", c_size_t),
        ("options", POINTER(c_char_p)),
        ("option_count", c_size_t),
        ("scalar", c_char_p),
    )


class LossScaler(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("dynamic", c_int32),
        ("init_scale", c_double),
        ("growth_factor", c_double),
        ("backoff_factor", c_double),
        ("growth_interval", c_uint32),
        ("hysteresis", c_uint32),
        ("min_scale", c_double),
        ("begin_loss_scale", c_double),
        ("begin_good_steps", c_uint32),
        ("begin_hysteresis_left", c_uint32),
    )


class JobAccess(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("group", c_char_p),
        ("is_private", c_int32),
        ("readers", POINTER(c_char_p)),
        ("reader_count", c_size_t),
    )


class SessionOptions(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("endpoint", c_char_p),
        ("job", c_char_p),
        ("optimizer", c_int32),
        ("partition", c_int32),
        ("rank", c_uint32),
        ("world_size", c_uint32),
        ("local_world_size", c_uint32),
        ("accumulate", c_int32),
        ("ephemeral", c_int32),
        ("extend", c_int32),
        ("groups", POINTER(Group)),
        ("group_count", c_size_t),
        ("parameters", POINTER(Parameter)),
        ("parameter_count", c_size_t),
        ("connect_timeout_s", c_double),
        ("step_timeout_s", c_double),
        ("daemon_path", c_char_p),
        ("interrupted", _interrupt.CALLBACK),
        ("interrupted_context", c_void_p),
        ("state_format", c_int32),
        ("loss_scaler", POINTER(LossScaler)),
        ("master_format", c_int32),
        ("accumulate_dtype", c_int32),
        ("change_detection", c_int32),
        ("placement", c_int32),
        ("durability", c_int32),
        ("host_budget_bytes", c_uint64),
        ("sub_group_elements", c_uint64),
        ("durability_steps", c_uint32),
        ("durability_interval_ms", c_uint32),
        ("speculative", c_int32),
        ("parameter_cache_bytes", c_uint64),
        ("parameters_on_disk", c_int32),
        ("fetches_parameters", c_int32),
        ("has_offload_fraction", c_int32),
        ("offload_fraction", c_double),
        ("two_phase", c_int32),
        ("device_budget_bytes", c_uint64),
        ("access", POINTER(JobAccess)),
    )


class Outcome(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("step", c_uint64),
        ("applied", c_int32),
        ("found_inf", c_int32),
        ("gradient_norm", c_double),
        ("clip_coefficient", c_double),
        ("update_ns", c_uint64),
        ("loss_scale", c_double),
        ("durable_step", c_uint64),
        ("prepared", c_int32),
        ("digest", c_uint64),
    )


class JobAddress(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("endpoint", c_char_p),
        ("job", c_char_p),
        ("timeout_s", c_double),
        ("daemon_path", c_char_p),
        ("interrupted", _interrupt.CALLBACK),
        ("interrupted_context", c_void_p),
    )


class JobPosition(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("committed_step", c_uint64),
        ("phase", c_int32),
        ("found_inf", c_int32),
        ("digest", c_uint64),
        ("prepared_step", c_uint64),
        ("prepared_digest", c_uint64),
        ("prepared_found_inf", c_int32),
        ("loads_finished", c_uint32),
        ("durable_step", c_uint64),
        ("gradient_norm", c_double),
        ("clip_coefficient", c_double),
        ("prepared_gradient_norm", c_double),
        ("prepared_clip_coefficient", c_double),
        ("prepared_is_clipped", c_int32),
        ("prepared_awaits_norm", c_int32),
    )


class Verdict(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("step", c_uint64),
        ("digest", c_uint64),
        ("verdict", c_int32),
        ("gradient_norm", c_double),
        ("clip_coefficient", c_double),
    )


class SleepProgress(Structure):
    _fields_ = (("context", c_void_p), ("bytes", c_uint64), ("bytes_total", c_uint64))


SLEEP_PROGRESS = CFUNCTYPE(None, POINTER(SleepProgress))


class SleepOptions(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("whole_timeout_s", c_double),
        ("progress", SLEEP_PROGRESS),
        ("progress_context", c_void_p),
        ("expected_created_at_ns", c_uint64),
        ("expected_step", c_uint64),
    )


class SleepResult(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("memory_bytes", c_uint64),
        ("was_so", c_int32),
        ("created_at_ns", c_uint64),
        ("committed_step", c_uint64),
        ("directory", c_char_p),
    )


class SessionInfo(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("committed_step", c_uint64),
        ("phase", c_int32),
        ("created", c_int32),
        ("piece_count", c_size_t),
        ("endpoint", c_char_p),
        ("wire", c_char_p),
        ("commit_open", c_int32),
        ("loss_scale", c_double),
        ("good_steps", c_uint32),
        ("hysteresis_left", c_uint32),
        ("load_required_from", c_uint32),
        ("connections", c_uint32),
    )


class Piece(Structure):
    """optstate_piece without the gradient, for whose memory the library would wait."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("parameter", c_uint32),
        ("begin", c_uint64),
        ("numel", c_uint64),
    )


class PieceWithGradient(Piece):
    _fields_ = (("gradient", c_void_p),)


class DeviceRange(Structure):
    """Elements [begin, end) of a parameter, from a byte of a device's memory on."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("begin", c_uint64),
        ("end", c_uint64),
        ("offset_bytes", c_uint64),
    )


class Hyperparams(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("value", c_double * HYPERPARAMS_MAX),
        ("max_norm", c_double),
        ("clips_with", c_uint32),
    )


class Part(Structure):
    """Elements [begin, end) of a parameter; see optstate_commit_options."""

    _fields_ = (
        ("context", c_void_p),
        ("parameter", c_uint32),
        ("begin", c_uint64),
        ("end", c_uint64),
    )


PART_READY = CFUNCTYPE(None, POINTER(Part))


class CommitOptions(_Versioned):
    _fields_ = (
        ("struct_size", c_size_t),
        ("step", c_uint64),
        ("groups", POINTER(Hyperparams)),
        ("group_count", c_size_t),
        ("grad_scale", c_double),
        ("max_norm", c_double),
        ("found_inf", c_int32),
        ("max_value", c_double),
        ("norm_type", c_double),
        ("read_parameters", c_void_p),
        ("read_destinations", c_void_p),
        ("read_count", c_size_t),
        ("part_ready", PART_READY),
        ("part_ready_context", c_void_p),
        ("awaits_norm", c_int32),
    )


# Arrays of integers and pointers are passed as addresses (array.array owns them),
# so that a step with 100,000 parameters does not make a ctypes object for each.
_PROTOTYPES = {
    "optstate_version": (c_char_p, ()),
    "optstate_last_error": (c_char_p, ()),
    "optstate_optimizer": (c_int, (c_size_t, POINTER(OptimizerInfo))),
    "optstate_session_open": (c_int, (POINTER(SessionOptions), POINTER(c_void_p))),
    "optstate_session_close": (None, (c_void_p,)),
    "optstate_session_get_info": (c_int, (c_void_p, POINTER(SessionInfo))),
    "optstate_session_pieces": (c_int, (c_void_p, POINTER(Piece), c_size_t)),
    "optstate_session_parameter": (
        c_int,
        (c_void_p, c_uint32, POINTER(c_void_p), POINTER(c_size_t)),
    ),
    "optstate_views_map": (c_int, (c_void_p, POINTER(c_void_p))),
    "optstate_views_parameter": (
        c_int,
        (c_void_p, c_uint32, POINTER(c_void_p), POINTER(c_size_t)),
    ),
    "optstate_views_find_written": (
        c_int,
        (c_void_p, c_void_p, c_void_p, c_size_t, POINTER(c_size_t)),
    ),
    "optstate_views_release": (c_int, (c_void_p,)),
    "optstate_views_keep": (c_int, (c_void_p,)),
    "optstate_views_leave": (c_int, (c_void_p,)),
    "optstate_views_free": (None, (c_void_p,)),
    "optstate_gradient_views_map": (
        c_int,
        (c_void_p, POINTER(c_void_p), POINTER(c_int64)),
    ),
    "optstate_gradient_views_put": (c_int, (c_void_p, c_void_p, c_void_p, c_size_t)),
    "optstate_gradient_views_keep": (c_int, (c_void_p, c_void_p, c_void_p, c_size_t)),
    "optstate_gradient_views_free": (None, (c_void_p,)),
    "optstate_device_parameters_map": (c_int, (c_void_p, c_char_p, POINTER(c_void_p))),
    "optstate_device_parameters_memory": (c_int, (c_void_p, POINTER(c_int), POINTER(c_uint64))),
    "optstate_device_parameters_is_over": (c_int, (c_void_p, POINTER(c_int32))),
    "optstate_device_parameters_find": (
        c_int,
        (c_void_p, c_void_p, c_uint32, POINTER(DeviceRange), c_size_t, POINTER(c_size_t)),
    ),
    "optstate_device_parameters_find_whole": (
        c_int,
        (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p),
    ),
    "optstate_device_parameters_free": (None, (c_void_p,)),
    "optstate_device_gradients_share": (
        c_int,
        (c_void_p, c_char_p, c_int, c_uint64, POINTER(c_void_p)),
    ),
    "optstate_device_gradients_mark": (
        c_int,
        (c_void_p, c_uint64, c_void_p, c_void_p, c_size_t),
    ),
    "optstate_device_gradients_clear": (c_int, (c_void_p, c_void_p, c_size_t)),
    "optstate_device_gradients_is_shared": (c_int, (c_void_p, c_void_p, POINTER(c_int32))),
    "optstate_device_gradients_give_up": (c_int, (c_void_p,)),
    "optstate_device_gradients_free": (None, (c_void_p,)),
    "optstate_push": (c_int, (c_void_p, c_uint64, c_uint32, c_uint32, c_uint32)),
    "optstate_push_gradients": (
        c_int,
        (c_void_p, c_uint64, c_uint32, c_void_p, c_void_p, c_size_t),
    ),
    "optstate_flush": (c_int, (c_void_p,)),
    "optstate_end_micro_step": (c_int, (c_void_p, c_uint64, c_uint32)),
    "optstate_commit": (c_int, (c_void_p, POINTER(CommitOptions), POINTER(Outcome))),
    "optstate_commit_wait": (c_int, (c_void_p, POINTER(Outcome))),
    "optstate_decide": (c_int, (c_void_p, POINTER(Verdict), POINTER(Outcome))),
    "optstate_find_position": (c_int, (POINTER(JobAddress), POINTER(JobPosition))),
    "optstate_bring_verdict": (
        c_int,
        (POINTER(JobAddress), POINTER(Verdict), POINTER(Outcome)),
    ),
    "optstate_sleep_job": (
        c_int,
        (POINTER(JobAddress), POINTER(SleepOptions), POINTER(SleepResult)),
    ),
    "optstate_wake_job": (
        c_int,
        (POINTER(JobAddress), POINTER(SleepOptions), POINTER(SleepResult)),
    ),
    "optstate_writes_parameters": (c_int, (c_void_p, POINTER(c_int32))),
    "optstate_abort": (c_int, (c_void_p, c_uint64)),
    "optstate_read_parameters": (c_int, (c_void_p, c_void_p, c_void_p, c_size_t)),
    "optstate_find_changed": (
        c_int,
        (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, POINTER(c_size_t)),
    ),
    "optstate_note_copies": (c_int, (c_void_p, c_void_p, c_size_t)),
    "optstate_begin_load": (c_int, (c_void_p,)),
    "optstate_begin_same_load": (c_int, (c_void_p,)),
    "optstate_load": (c_int, (c_void_p, c_int32, c_uint32, c_int32, c_void_p)),
    "optstate_load_many": (
        c_int,
        (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_size_t),
    ),
    "optstate_finish_load": (c_int, (c_void_p,)),
    "optstate_finish_load_at": (c_int, (c_void_p, c_uint64, c_uint32)),
    "optstate_prefetch": (c_int, (c_void_p, c_void_p, c_size_t)),
    "optstate_release": (c_int, (c_void_p, c_void_p, c_size_t)),
    "optstate_fetch": (
        c_int,
        (c_void_p, c_int32, c_uint32, c_void_p, c_size_t, POINTER(c_uint64)),
    ),
    "optstate_fetch_many": (
        c_int,
        (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, POINTER(c_uint64)),
    ),
}


def library_path() -> str:
    """Returns $OPTSTATE_LIBRARY, else the path of liboptstate.so inside the package."""
    return os.environ.get("OPTSTATE_LIBRARY") or str(PACKAGE_DIRECTORY / "liboptstate.so")


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise errors.UnavailableError(
            f"cannot load the optstate client library: {error}"
            " (it is part of the wheel; $OPTSTATE_LIBRARY names another)"
        ) from error
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def library() -> ctypes.CDLL:
    """Returns the client library; loads it at the first call.

    Raises UnavailableError when the library cannot be loaded.
    """
    return _load(library_path())


def check(status: int) -> None:
    """Raises the exception for a status code other than 0, with this thread's error text."""
    if status != 0:
        text = library().optstate_last_error() or b""
        raise errors.from_status(status, text.decode("utf-8", "replace"))


def version() -> str:
    """Returns the version of the client library."""
    return library().optstate_version().decode()


def array_of(structure: type[Structure], count: int) -> ctypes.Array:
    """Returns `count` zeroed structs, each with its struct_size set."""
    array = (structure * count)()
    for element in array:
        element.struct_size = sizeof(structure)
    return array
