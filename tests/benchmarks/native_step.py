"""AdamW of optstate's kernels on torch tensors (tensors_step_c.h, by ctypes)."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Sequence

import torch

GRADIENTS_MAX = 8
BLOCK = 256  # of 8-bit state: elements with a scale of their own

# Numbers of proto/types/dtype.h.
DTYPES = {torch.float32: 1, torch.bfloat16: 2}
MASTER_FORMATS = {"float32": 1, "split": 2}
STATE_FORMATS = {"float32": 1, "bfloat16": 2, "dynamic8": 3}
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "dynamic8": torch.uint8}

# proto/shm/spread_mapping.h: where arrays lie decides up to half of everybody's speed.
_SLOT_BYTES, _SLOTS = 2 << 20, 128
_slots = itertools.cycle(range(_SLOTS))
# GradientLeadBytes() of proto/shm/segment_layout.h, for each of the first ranks.
LEAD_BYTES = 256


def spread(numel: int, dtype: torch.dtype, lead: int = 0) -> torch.Tensor:
    """Returns an uninitialised tensor, a large one where the daemon would put it for all sides.

    lead: bytes between the begin of a page and the first element.
    """
    size = numel * dtype.itemsize
    if size < _SLOT_BYTES:
        return torch.empty(numel, dtype=dtype)
    period = _SLOT_BYTES * _SLOTS
    pages = torch.empty(lead + size + period, dtype=torch.uint8)  # the untouched has no memory
    begin = (next(_slots) * _SLOT_BYTES - pages.data_ptr()) % period + lead
    return pages[begin : begin + size].view(dtype)


@dataclasses.dataclass
class Options:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


class Arrays:
    """One tensor's gradients, parameter, master and state, as a job has them."""

    def __init__(
        self,
        numel,
        dtype,
        *,
        gradients=1,
        lead=LEAD_BYTES,
        state="float32",
        master="float32",
        scale=1.0,
        seed=0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.gradients = [
            spread(numel, dtype, rank * lead).normal_(0, 1e-2 * scale, generator=generator)
            for rank in range(gradients)
        ]
        self.master = spread(numel, torch.float32).normal_(0, 1, generator=generator)
        self.parameter = self.master
        if dtype != torch.float32:
            self.parameter = spread(numel, dtype).copy_(self.master)
        self.master_format = master
        if master == "split":
            # Low halves of 0: the parameter is the master.
            self.master = spread(numel, torch.int16).zero_()
        self.state_format = state
        self.state = [spread(numel, STATE_DTYPES[state]).zero_() for _ in range(2)]
        self.scale = []
        if state == "dynamic8":
            self.scale = [torch.zeros(-(-numel // BLOCK)) for _ in range(2)]

    def tensors(self):
        return [*self.gradients, self.parameter, self.master, *self.state, *self.scale]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("gradients", ctypes.c_void_p * GRADIENTS_MAX),
        ("parameter", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("state", ctypes.c_void_p * 2),
        ("scale", ctypes.c_void_p * 2),
        ("numel", ctypes.c_uint64),
    ]

    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        self.parameter = arrays.parameter.data_ptr()
        self.master = arrays.master.data_ptr()
        self.numel = arrays.master.numel()
        for into, tensors in (
            (self.gradients, arrays.gradients),
            (self.state, arrays.state),
            (self.scale, arrays.scale),
        ):
            for index, tensor in enumerate(tensors):
                into[index] = tensor.data_ptr()


class _Format(ctypes.Structure):
    _fields_ = [
        ("dtype", ctypes.c_uint32),
        ("state", ctypes.c_uint32),
        ("gradients", ctypes.c_uint32),
        ("master", ctypes.c_uint32),
    ]


class _Input(ctypes.Structure):
    _fields_ = [
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("gradient_factor", ctypes.c_double),
        ("step", ctypes.c_int64),
    ]


class Library:
    def __init__(self, path: str) -> None:
        native = ctypes.CDLL(path)
        pointer, none = ctypes.c_void_p, None
        for name, result, arguments in (
            ("open", pointer, [ctypes.c_int]),
            ("close", none, [pointer]),
            ("plan", pointer, [pointer, pointer, pointer, ctypes.c_size_t]),
            ("drop", none, [pointer]),
            ("update", none, [pointer, pointer]),
            ("add_only", none, [pointer, ctypes.c_int]),
        ):
            function = getattr(native, f"optstate_bench_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


class Workers:
    """A pool of an engine's threads."""

    def __init__(self, library: Library, threads: int) -> None:
        self.library, self.threads = library, threads
        self.handle = library.open(threads)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        self.library.close(self.handle)


class Step:
    """One update of all of `arrays`, which have one format."""

    def __init__(
        self, workers: Workers, arrays: Sequence[Arrays], options: Options, factor: float = 1.0
    ) -> None:
        self._library, self._arrays = workers.library, list(arrays)  # their memory is used
        first = arrays[0]
        form = _Format(
            DTYPES[first.parameter.dtype],
            STATE_FORMATS[first.state_format],
            len(first.gradients),
            MASTER_FORMATS[first.master_format],
        )
        tensors = (_Tensor * len(arrays))(*map(_Tensor, arrays))
        self._plan = self._library.plan(workers.handle, ctypes.byref(form), tensors, len(arrays))
        if not self._plan:
            raise ValueError("no kernel has this format")
        self._input = _Input(
            options.lr, *options.betas, options.eps, options.weight_decay, factor, 0
        )

    def update(self) -> None:
        self._input.step += 1
        self._library.update(self._plan, ctypes.byref(self._input))

    def add_vectors(self) -> None:
        self._library.add_only(self._plan, 0)

    def add_blocks(self) -> None:
        self._library.add_only(self._plan, 1)

    def close(self) -> None:
        self._library.drop(self._plan)
