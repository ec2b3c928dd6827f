"""Tensors of other libraries as torch's, over the same memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from optstate import errors
from optstate.foreign_tensor import ForeignTensor, check_writable, foreign_tensor, offers_tensor


def torch_tensor(value: Any, what: str, *, writable: bool = False) -> torch.Tensor:
    """Returns a tensor over the memory of a tensor of any library, which it keeps.

    `value`: torch's tensor, which is returned; an object with DLPack or an array interface;
    without `writable` also what else torch.as_tensor() takes, such as a list. `what`: the object,
    for texts. InvalidArgumentError: its memory cannot be read or, with `writable`, written.
    UnimplementedError: it is on a device that this torch cannot reach.
    """
    if isinstance(value, torch.Tensor):
        return value
    if not writable and not offers_tensor(value):
        return torch.as_tensor(value)
    foreign = foreign_tensor(value, what)
    if writable:
        check_writable(foreign, what)
    if foreign.device != "cpu":
        return _on_device(value, foreign, what, writable)
    dtype = getattr(torch, foreign.dtype, None)
    if dtype is None:  # unsigned integers of older versions of torch
        raise errors.InvalidArgumentError(f"{what} is {foreign.dtype}, which torch has not")
    if foreign.numel == 0:
        return torch.empty(foreign.shape, dtype=dtype, device="cpu")
    size = foreign.extent * foreign.itemsize
    # A buffer of ctypes is writable, so that torch does not warn of memory that is only read.
    buffer = (ctypes.c_char * size).from_address(foreign.address)
    buffer.owner = foreign.owner  # lives as long as the tensor, which holds the buffer
    flat = torch.frombuffer(buffer, dtype=dtype, count=foreign.extent)
    return flat.as_strided(foreign.shape, foreign.strides)


def _on_device(value: Any, foreign: ForeignTensor, what: str, writable: bool) -> torch.Tensor:
    """Returns a device's tensor by torch's own reading, which orders it after the streams that
    wrote it."""
    try:
        if hasattr(value, "__dlpack__"):
            tensor = torch.from_dlpack(value)
        else:
            tensor = torch.as_tensor(value, device="cuda")
    except (RuntimeError, TypeError, ValueError, AssertionError, BufferError) as error:
        raise errors.UnimplementedError(
            f"{what} is on {foreign.device}, which this torch cannot reach: {error}"
        ) from error
    if writable and foreign.address and tensor.data_ptr() != foreign.address:
        raise errors.UnimplementedError(
            f"{what} is on another device than torch's present one, which copies it: values would"
            " be lost with the copy"
        )
    return tensor
