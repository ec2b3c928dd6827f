"""Copies between host memory and tensors on a GPU, by CUDA's driver alone: torch is not needed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from optstate import cuda_driver, errors
from optstate.cuda_driver import Refused
from optstate.foreign_tensor import ALL_STREAMS, ForeignTensor

# The legacy default stream, as DLPack, the array interface and the driver name it. Copies are done
# in it, so that they come after what a producer has it wait for.
STREAM = 1

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

_device_address = ctypes.c_ulonglong
_FUNCTIONS = {
    "cuInit": (ctypes.c_uint,),
    "cuPointerGetAttribute": (ctypes.c_void_p, ctypes.c_int, _device_address),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxSynchronize": (),
    "cuStreamSynchronize": (ctypes.c_void_p,),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _device_address, ctypes.c_size_t),
    "cuMemcpyHtoD_v2": (_device_address, ctypes.c_void_p, ctypes.c_size_t),
}


def copy_to_host(tensor: ForeignTensor, address: int, what: str) -> None:
    """Copies a contiguous tensor of a GPU to host memory, behind what its producer has the device
    do. Waits for it. `what`: the tensor, for texts.

    UnimplementedError: there is no driver, or no such device. InvalidArgumentError: the memory is
    not the device's. InternalError: the device failed.
    """
    with _on_device_of(tensor, what):
        _call("cuMemcpyDtoH_v2", address, tensor.address, tensor.numel * tensor.itemsize)


def copy_to_device(address: int, tensor: ForeignTensor, what: str) -> None:
    """Copies host memory to a contiguous tensor of a GPU; see copy_to_host()."""
    with _on_device_of(tensor, what):
        _call("cuMemcpyHtoD_v2", tensor.address, address, tensor.numel * tensor.itemsize)
        _call("cuStreamSynchronize", STREAM)


@contextlib.contextmanager
def current_device(ordinal: int) -> Iterator[None]:
    """Makes a device the current one of this thread, for libraries that look for their streams
    there. Does nothing where there is no such device: the copy says why."""
    try:
        _call("cuInit", 0)
        _call("cuCtxPushCurrent_v2", _context(ordinal))
    except Refused:
        yield
        return
    try:
        yield
    finally:
        _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@contextlib.contextmanager
def _on_device_of(tensor: ForeignTensor, what: str) -> Iterator[None]:
    try:
        context = _context(_ordinal_of(tensor.address))
    except Refused as refusal:
        if refusal.error == _INVALID_VALUE:
            raise errors.InvalidArgumentError(
                f"{what} is at {tensor.address:#x}, where no device has memory: {refusal}"
            ) from None
        raise errors.UnimplementedError(
            f"{what} is on {tensor.device}, which cannot be reached: {refusal}. Copy the tensor to"
            " host memory"
        ) from None
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            if tensor.stream == ALL_STREAMS:
                _call("cuCtxSynchronize")
            elif tensor.stream is not None:  # that of the producer
                _call("cuStreamSynchronize", tensor.stream)
            yield
        finally:
            _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    except Refused as refusal:
        kind = errors.InternalError
        if refusal.error == _INVALID_VALUE:
            kind = errors.InvalidArgumentError
        raise kind(f"{what} on {tensor.device}: {refusal}") from None


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return cuda_driver.opened(_FUNCTIONS)
    except Refused as refusal:
        raise Refused(f"there is no driver of NVIDIA ({refusal})") from refusal


def _call(name: str, *arguments: object) -> None:
    cuda_driver.call(_driver(), name, *arguments)


def _ordinal_of(address: int) -> int:
    _call("cuInit", 0)
    ordinal = ctypes.c_int(-1)
    _call("cuPointerGetAttribute", ctypes.byref(ordinal), _DEVICE_ORDINAL, address)
    return ordinal.value


@functools.cache
def _context(ordinal: int) -> int | None:
    """Returns the device's primary context, which libraries share; it is kept."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), ordinal)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context.value
