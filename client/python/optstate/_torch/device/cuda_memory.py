"""Memory of a GPU that processes share, by the driver's own functions: CUDA's runtime, and torch,
have none for this."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

import torch

from optstate import cuda_driver
from optstate._torch.device.interface import NotImported

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_LOCATION_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_HANDLE_FILE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
# CU_MEM_ACCESS_FLAGS_PROT_READ, which not every driver takes, and _READWRITE.
_READ, _READ_WRITE = 1, 3

_address = ctypes.c_ulonglong
_FUNCTIONS = {
    "cuMemImportFromShareableHandle": (
        ctypes.POINTER(ctypes.c_ulonglong),
        ctypes.c_void_p,
        ctypes.c_int,
    ),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
        ctypes.c_int,
    ),
    "cuMemCreate": (
        ctypes.POINTER(ctypes.c_ulonglong),
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_ulonglong,
    ),
    "cuMemExportToShareableHandle": (
        ctypes.c_void_p,
        ctypes.c_ulonglong,
        ctypes.c_int,
        ctypes.c_ulonglong,
    ),
    "cuMemAddressReserve": (
        ctypes.POINTER(_address),
        ctypes.c_size_t,
        ctypes.c_size_t,
        _address,
        ctypes.c_ulonglong,
    ),
    "cuMemMap": (
        _address,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_ulonglong,
        ctypes.c_ulonglong,
    ),
    "cuMemSetAccess": (_address, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
    "cuMemUnmap": (_address, ctypes.c_size_t),
    "cuMemAddressFree": (_address, ctypes.c_size_t),
    "cuMemRelease": (ctypes.c_ulonglong,),
}


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Access(ctypes.Structure):
    """A CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Properties(ctypes.Structure):
    """A CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return cuda_driver.opened(_FUNCTIONS)
    except cuda_driver.Refused as refusal:
        raise NotImported(f"the driver cannot share memory: {refusal}") from refusal


def _call(name: str, *arguments: object) -> None:
    driver = _driver()
    try:
        cuda_driver.call(driver, name, *arguments)
    except cuda_driver.Refused as refusal:
        raise NotImported(str(refusal)) from refusal


class _Interface:
    """Memory, as torch takes it to make a tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class _SharedMemory:
    """Memory with a handle of the driver's, as a tensor of bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._handle = ctypes.c_ulonglong()
        self._address = _address()
        self._is_mapped = False
        self.values: torch.Tensor

    def _map(self, index: int, accesses: Sequence[int]) -> None:
        _call("cuMemAddressReserve", ctypes.byref(self._address), self._size, 0, 0, 0)
        _call("cuMemMap", self._address, self._size, 0, self._handle, 0)
        self._is_mapped = True
        self._allow(index, accesses)
        self.values = self._tensor(torch.device("cuda", index))

    def _allow(self, index: int, accesses: Sequence[int]) -> None:
        refusal: NotImported | None = None
        for flags in accesses:
            access = _Access(_Location(_LOCATION_DEVICE, index), flags)
            try:
                _call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), 1)
                return
            except NotImported as error:
                refusal = error
        assert refusal is not None
        raise refusal

    def _tensor(self, device: torch.device) -> torch.Tensor:
        try:
            values = torch.as_tensor(_Interface(self._address.value, self._size), device=device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise NotImported(f"torch takes no such memory: {error}") from error
        # A copy would keep the values of now: torch makes one of memory of another device.
        if values.data_ptr() != self._address.value:
            raise NotImported(f"torch finds the memory elsewhere than on {device}")
        return values

    def close(self) -> None:
        self.values = torch.empty(0, dtype=torch.uint8)
        driver = _driver()
        if self._is_mapped:
            driver.cuMemUnmap(self._address, self._size)
        if self._address.value:
            driver.cuMemAddressFree(self._address, self._size)
        if self._handle.value:
            driver.cuMemRelease(self._handle)
        self._is_mapped = False
        self._address, self._handle = _address(), ctypes.c_ulonglong()


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class CudaMemory(_SharedMemory):
    """See interface.ImportedMemory."""

    def __init__(self, device: torch.device, file: int, size: int) -> None:
        super().__init__(size)
        index = _index_of(device)
        with torch.cuda.device(index):
            torch.cuda.current_stream()  # the device has a context from now on
            _call("cuMemImportFromShareableHandle", ctypes.byref(self._handle), file, _HANDLE_FILE)
            try:
                self._map(index, (_READ, _READ_WRITE))
            except BaseException:
                self.close()
                raise


class CudaExport(_SharedMemory):
    """See interface.ExportedMemory."""

    def __init__(self, device: torch.device, size: int) -> None:
        index = _index_of(device)
        properties = _Properties(_PINNED, _HANDLE_FILE, _Location(_LOCATION_DEVICE, index))
        with torch.cuda.device(index):
            torch.cuda.current_stream()  # the device has a context from now on
            page = ctypes.c_size_t()
            _call(
                "cuMemGetAllocationGranularity",
                ctypes.byref(page),
                ctypes.byref(properties),
                _MINIMUM,
            )
            super().__init__(-(-size // page.value) * page.value)
            self.size = self._size
            self.file = -1
            _call(
                "cuMemCreate", ctypes.byref(self._handle), self._size, ctypes.byref(properties), 0
            )
            try:
                self._map(index, (_READ_WRITE,))
                file = ctypes.c_int(-1)
                _call(
                    "cuMemExportToShareableHandle",
                    ctypes.byref(file),
                    self._handle,
                    _HANDLE_FILE,
                    0,
                )
                self.file = file.value
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        super().close()
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)
