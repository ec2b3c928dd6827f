"""Accessors for attributes of many tensors at once, and for the memory of tensors."""

from __future__ import annotations

import ctypes
import operator
import zlib
from collections.abc import Sequence

import torch

from optstate._torch.layout import DTYPE_CODES

DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}

# With 100,000 parameters the interpreter takes most of a step: map() over these functions runs
# no bytecode for each tensor, and keeps no shapes that would trigger the garbage collector.
dtype_of = operator.attrgetter("dtype")
gradient_of = operator.attrgetter("grad")
is_cpu = operator.attrgetter("is_cpu")
layout_of = operator.attrgetter("layout")
shape_of = operator.attrgetter("shape")
version_of = operator.attrgetter("_version")
pointer_of = torch.Tensor.data_ptr
is_contiguous = torch.Tensor.is_contiguous
is_negated = torch.Tensor.is_neg  # whether the memory has the negated values

# Compares (address, address, bytes); 0 when both hold the same.
compare_memory = ctypes.CDLL(None).memcmp
compare_memory.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def parts_of(count: int) -> list[slice]:
    """Splits tensors into parts that are processed one after the other: small enough to stay
    in the core's cache until another attribute of the same tensors is read."""
    return [slice(begin, begin + 256) for begin in range(0, count, 256)]


def memory_view(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a flat tensor over memory that the caller keeps alive."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    buffer = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=numel)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns values in contiguous host memory; shares the tensor's memory if it is that."""
    return tensor.detach().cpu().resolve_neg().contiguous()


def crc32_of(tensor: torch.Tensor) -> int:
    """Returns a checksum of the tensor's bits, in the order of its elements."""
    flat = in_memory(tensor).reshape(-1)
    # A view of no elements may keep a stride that no view of bytes has.
    return zlib.crc32(flat.view(torch.uint8).numpy() if flat.numel() else b"")


def integer_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's memory (a copy if it is negated) as integers."""
    bits = torch.int32 if tensor.dtype.itemsize == 4 else torch.int16
    return tensor.detach().resolve_neg().view(bits)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return integer_bits(in_memory(tensor))


def bits_sum(tensor: torch.Tensor) -> int:
    """Returns a sum that tensors of equal bits share, and other tensors seldom."""
    return int(_bits(tensor).sum(dtype=torch.int64))


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def increment_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Tells autograd that the tensors changed, as an in-place operation would."""
    bump = torch.autograd.graph.increment_version
    try:
        bump(tensors)
    except (TypeError, AttributeError):  # torch < 2.5 takes one tensor
        for tensor in tensors:
            bump(tensor)
