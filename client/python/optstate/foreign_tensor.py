"""Tensors of other libraries, as their protocols describe them: DLPack and the array interfaces.

Nothing here needs torch or numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from optstate import errors

# Types of devices of DLPack. Pinned memory of CUDA and ROCm is the host's.
_CPU, _CUDA, _CUDA_HOST, _ROCM, _ROCM_HOST, _CUDA_MANAGED = 1, 2, 3, 10, 11, 13
_HOST = (_CPU, _CUDA_HOST, _ROCM_HOST)
_DEVICES = {_CUDA: "cuda", _ROCM: "rocm", _CUDA_MANAGED: "cuda"}
_MAJOR_VERSION = 1
# Stands for all streams of a tensor's device.
ALL_STREAMS = -1
# Flags of DLManagedTensorVersioned.
_READ_ONLY, _IS_COPY = 1, 2

# By DLPack's code of a kind of numbers and the bits of one.
_DLPACK_DTYPES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16): "bfloat16",
    (6, 8): "bool",
}
# By the letter and the bytes of a typestr of the array interfaces.
_TYPESTR_DTYPES = {
    **{f"i{bytes_}": f"int{8 * bytes_}" for bytes_ in (1, 2, 4, 8)},
    **{f"u{bytes_}": f"uint{8 * bytes_}" for bytes_ in (1, 2, 4, 8)},
    **{f"f{bytes_}": f"float{8 * bytes_}" for bytes_ in (2, 4, 8)},
    "b1": "bool",
}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLTensor, with which DLManagedTensor begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _VersionedTensor(ctypes.Structure):
    """DLManagedTensorVersioned, of DLPack 1."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_is_valid.restype = ctypes.c_int
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer.restype = ctypes.c_void_p


class ForeignTensor(NamedTuple):
    """A tensor's memory. It stays while `owner` does."""

    address: int  # of the first element; 0: there is no element, or a device has the tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    dtype: str  # as "float32"
    itemsize: int
    device: str  # "cpu", or as "cuda:0"
    is_read_only: bool
    is_copy: bool  # writing it writes nothing of the object that was asked
    owner: Any
    # A stream of CUDA that the producer has the consumer wait for, or ALL_STREAMS; None: there is
    # none.
    stream: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Returns whether the elements follow each other, the last dimension's first."""
        return self.numel == 0 or all(
            size == 1 or stride == wanted
            for size, stride, wanted in zip(self.shape, self.strides, _row_major(self.shape))
        )

    @property
    def extent(self) -> int:
        """Returns the elements from the first one to the last one in memory, both included."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * each for size, each in zip(self.shape, self.strides))


def offers_tensor(value: Any) -> bool:
    """Returns whether foreign_tensor() knows a protocol of the object."""
    return any(
        hasattr(value, name)
        for name in ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
    )


def foreign_tensor(
    value: Any,
    what: str,
    *,
    stream: int | None = None,
    current: Callable[[int], AbstractContextManager] = contextlib.nullcontext,
) -> ForeignTensor:
    """Returns the memory of an object with ``__dlpack__`` and ``__dlpack_device__``, or else with
    ``__cuda_array_interface__`` or ``__array_interface__``. Nothing is copied here.

    `what`: the object, for texts. `stream`: the stream of CUDA, as DLPack numbers them, in which
    the caller uses a tensor of a GPU; without one the address of such a tensor is not asked by
    DLPack. `current`: makes a device of CUDA the current one, in whose streams libraries look for
    what they have to wait for. InvalidArgumentError: the object offers none of them, or what
    it says cannot be: a dtype, a byte order, strides, a masked array.
    """
    refusal = None
    if hasattr(value, "__dlpack__"):
        try:
            return _checked(_from_dlpack(value, what, stream, current), what)
        # numpy says so of an array that is read-only, and torch of another than the current device.
        except BufferError as error:
            refusal = error
    for name, device in (("__cuda_array_interface__", "cuda"), ("__array_interface__", "cpu")):
        interface = getattr(value, name, None)
        if interface is not None:
            return _checked(_from_interface(value, interface, device, what), what)
    if refusal is not None:
        raise errors.InvalidArgumentError(f"{what}: __dlpack__() refuses: {refusal}") from refusal
    raise errors.InvalidArgumentError(
        f"{what} is a {type(value).__name__}, without __dlpack__, __cuda_array_interface__ or"
        " __array_interface__"
    )


def check_writable(tensor: ForeignTensor, what: str) -> None:
    """Raises InvalidArgumentError unless each element can be written once."""
    if tensor.is_read_only:
        raise errors.InvalidArgumentError(f"{what} is read-only: values cannot be written to it")
    if tensor.is_copy:
        raise errors.InvalidArgumentError(
            f"{what} gives a copy of its memory by __dlpack__(): values would be lost with it"
        )
    repeats = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.strides))
    if tensor.numel and repeats:
        raise errors.InvalidArgumentError(
            f"{what} has several elements in one place (strides {tensor.strides}): values cannot"
            " be written to it"
        )


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _checked(tensor: ForeignTensor, what: str) -> ForeignTensor:
    if any(size < 0 for size in tensor.shape):
        raise errors.InvalidArgumentError(f"{what} has the shape {tensor.shape}")
    if tensor.numel == 0:
        return tensor._replace(address=0)
    if any(size > 1 and stride < 0 for size, stride in zip(tensor.shape, tensor.strides)):
        raise errors.InvalidArgumentError(
            f"{what} has negative strides {tensor.strides}: give a copy of it"
        )
    if tensor.device == "cpu" and (not tensor.address or tensor.address % tensor.itemsize):
        raise errors.InvalidArgumentError(
            f"{what} is at the address {tensor.address:#x}, where no {tensor.dtype} can be: give"
            " a copy of it"
        )
    return tensor


def _capsule_of(value: Any, **how: Any) -> Any:
    try:
        return value.__dlpack__(max_version=(_MAJOR_VERSION, 0), **how)
    except TypeError:  # a library from before DLPack 1
        return value.__dlpack__(**how)


def _from_dlpack(
    value: Any,
    what: str,
    stream: int | None,
    current: Callable[[int], AbstractContextManager],
) -> ForeignTensor:
    if not hasattr(value, "__dlpack_device__"):
        raise errors.InvalidArgumentError(f"{what} has __dlpack__, but not __dlpack_device__")
    kind, number = (int(each) for each in value.__dlpack_device__())
    device = "cpu"
    if kind not in _HOST:
        device = f"{_DEVICES.get(kind, f'DLPack device type {kind}')}:{number}"
        if stream is None or kind not in (_CUDA, _CUDA_MANAGED):
            # The memory is asked of the library that can wait for the device's streams.
            return ForeignTensor(0, (), (), "", 1, device, False, False, value)
        # The producer has this stream wait for what it has given the device.
        with current(number):
            capsule = _capsule_of(value, stream=stream)
    else:
        capsule = _capsule_of(value)
    flags = 0
    # The capsule keeps its name, so that it frees the tensor with itself.
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        address = _capsule_pointer(capsule, b"dltensor_versioned")
        versioned = _VersionedTensor.from_address(address)
        if versioned.major > _MAJOR_VERSION:
            raise errors.InvalidArgumentError(
                f"{what} gives DLPack {versioned.major}.{versioned.minor}, where 1.0 was asked"
            )
        flags, tensor = versioned.flags, versioned.tensor
    elif _capsule_is_valid(capsule, b"dltensor"):
        tensor = _Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    else:
        raise errors.InvalidArgumentError(
            f"{what}: __dlpack__() returned a {type(capsule).__name__}, no tensor's capsule"
        )
    dtype, bits = tensor.dtype, tensor.dtype.bits
    name = _DLPACK_DTYPES.get((dtype.code, bits))
    if name is None or dtype.lanes != 1:
        raise errors.InvalidArgumentError(
            f"{what} has a dtype that is not known here (DLPack's code {dtype.code}, {bits} bits,"
            f" {dtype.lanes} lanes)"
        )
    named = tensor.device.type
    if (named not in _HOST) if device == "cpu" else (named, tensor.device.id) != (kind, number):
        raise errors.InvalidArgumentError(
            f"{what} says that it is {'in host memory' if device == 'cpu' else f'on {device}'}, and"
            f" its capsule names a device of type {named} with number {tensor.device.id}"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _row_major(shape)
    return ForeignTensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=name,
        itemsize=bits // 8,
        device=device,
        is_read_only=bool(flags & _READ_ONLY),
        is_copy=bool(flags & _IS_COPY),
        owner=(value, capsule),
    )


def _from_interface(
    value: Any, interface: Mapping[str, Any], device: str, what: str
) -> ForeignTensor:
    missing = [key for key in ("shape", "typestr", "data") if interface.get(key) is None]
    if missing or not isinstance(interface["data"], tuple):
        raise errors.InvalidArgumentError(
            f"{what}: its array interface has no {', '.join(missing) or 'address'}"
        )
    if interface.get("mask") is not None:
        raise errors.InvalidArgumentError(f"{what} is a masked array")
    typestr = interface["typestr"]
    name = _TYPESTR_DTYPES.get(typestr[1:])
    if typestr[1:] == "V2" and str(getattr(value, "dtype", "")) in ("bfloat16", "torch.bfloat16"):
        name = "bfloat16"  # of numpy, with ml_dtypes, or of torch
    if name is None or (typestr[0] == ">" and typestr[2:] != "1"):
        raise errors.InvalidArgumentError(
            f"{what} has a dtype or byte order that is not known here ({typestr!r})"
        )
    itemsize = int(typestr[2:])
    shape = tuple(int(size) for size in interface["shape"])
    in_bytes = interface.get("strides")
    if in_bytes is None:
        strides = _row_major(shape)
    elif any(size > 1 and step % itemsize for size, step in zip(shape, in_bytes)):
        raise errors.InvalidArgumentError(
            f"{what} has strides {tuple(in_bytes)} in bytes, not of whole elements"
        )
    else:
        strides = tuple(step // itemsize for step in in_bytes)
    stream = interface.get("stream")
    if stream is not None and not (type(stream) is int and stream > 0):
        raise errors.InvalidArgumentError(f"{what} names the stream {stream!r}: no stream of CUDA")
    if device == "cuda" and (interface.get("version", 0) < 3 or "stream" not in interface):
        stream = ALL_STREAMS  # the version is too old to say
    address, is_read_only = interface["data"]
    return ForeignTensor(
        address=int(address or 0),
        shape=shape,
        strides=strides,
        dtype=name,
        itemsize=itemsize,
        device=device,
        is_read_only=bool(is_read_only),
        is_copy=False,
        owner=(value, interface),  # the interface may be what keeps the memory
        stream=stream,
    )
