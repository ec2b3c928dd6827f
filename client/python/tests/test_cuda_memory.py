"""The calls to CUDA's driver that share memory between processes, with a model of it: test_cuda.py
makes them on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import types

import pytest
import torch
from optstate._torch.device import cuda_memory
from optstate._torch.device.cuda_memory import CudaExport, CudaMemory
from optstate._torch.device.interface import NotImported

SIZE = 4 << 20
PAGE = 2 << 20
HANDLE, ADDRESS = 77, 1 << 40
# Each call, and the one that undoes it.
UNDOES = {
    "cuMemImportFromShareableHandle": "cuMemRelease",
    "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemMap": "cuMemUnmap",
}
EXPORT_UNDOES = {
    "cuMemCreate": "cuMemRelease",
    "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemMap": "cuMemUnmap",
}


class Driver:
    """Notes the calls; some fail."""

    def __init__(self, **errors: int) -> None:
        self.undoes = UNDOES
        self.created: tuple[int, ...] = ()
        self.errors = errors
        self.calls: list[str] = []
        self.flags: list[int] = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == "cuMemSetAccess":
                self.flags.append(
                    ctypes.cast(arguments[2], ctypes.POINTER(cuda_memory._Access))[0].flags
                )
                read_only = self.errors.get("read_only", 0)
                if read_only and self.flags[-1] == 1:
                    return read_only
            if name in self.errors:
                return self.errors[name]
            if name == "cuMemImportFromShareableHandle":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_ulonglong))[0] = HANDLE
                assert arguments[1:] == (9, 1)
            if name == "cuMemGetAllocationGranularity":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_size_t))[0] = PAGE
            if name == "cuMemCreate":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_ulonglong))[0] = HANDLE
                asked = ctypes.cast(arguments[2], ctypes.POINTER(cuda_memory._Properties))[0]
                where = asked.location
                self.created = (arguments[1], asked.type, asked.handle_types, where.type, where.id)
            if name == "cuMemExportToShareableHandle":
                assert arguments[1].value == HANDLE and arguments[2:] == (1, 0)
                file = ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))
                file[0] = os.open(os.devnull, os.O_RDONLY)
            if name == "cuMemAddressReserve":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_ulonglong))[0] = ADDRESS
            return 0

        return call

    @property
    def held(self) -> list[str]:
        """The calls that were not undone."""
        return [
            done
            for done, undone in self.undoes.items()
            if done not in self.errors and self.calls.count(done) != self.calls.count(undone)
        ]


class Values(dict):
    """Stands for a tensor of the memory."""

    def data_ptr(self) -> int:
        return self["data"][0]


@pytest.fixture
def use(monkeypatch):
    def install(driver):
        fake = types.SimpleNamespace(
            cuda=types.SimpleNamespace(
                current_device=lambda: 0,
                current_stream=lambda: None,
                device=lambda index: contextlib.nullcontext(),
            ),
            as_tensor=lambda interface, device: Values(interface.__cuda_array_interface__),
            device=torch.device,
            empty=torch.empty,
            uint8=torch.uint8,
        )
        monkeypatch.setattr(cuda_memory, "torch", fake)
        monkeypatch.setattr(cuda_memory, "_driver", lambda: driver)
        return driver

    return install


def test_memory_is_mapped_and_unmapped(use):
    driver = use(Driver())
    memory = CudaMemory(torch.device("cuda", 1), 9, SIZE)
    assert memory.values["data"] == (ADDRESS, False)
    assert memory.values["shape"] == (SIZE,)
    assert driver.flags == [1]
    assert driver.held == list(UNDOES)
    memory.close()
    assert not driver.held
    memory.close()
    assert not driver.held


def test_a_driver_that_maps_nothing_read_only(use):
    driver = use(Driver(read_only=801))
    memory = CudaMemory(torch.device("cuda", 1), 9, SIZE)
    assert driver.flags == [1, 3]
    memory.close()
    assert not driver.held


@pytest.mark.parametrize(
    "name",
    ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"],
)
def test_a_refusal_leaves_nothing_mapped(use, name):
    driver = use(Driver(**{name: 801}))
    with pytest.raises(NotImported, match=f"{name}: error 801"):
        CudaMemory(torch.device("cuda", 1), 9, SIZE)
    assert not driver.held


def exporting(**errors: int) -> Driver:
    driver = Driver(**errors)
    driver.undoes = EXPORT_UNDOES
    return driver


def test_memory_is_allocated_for_another_process(use):
    driver = use(exporting())
    memory = CudaExport(torch.device("cuda", 1), PAGE + 1)
    assert driver.created == (2 * PAGE, 1, 1, 1, 1)
    assert memory.size == 2 * PAGE
    assert memory.values["data"] == (ADDRESS, False)
    assert driver.flags == [3]  # this process writes it
    os.fstat(memory.file)
    file = memory.file
    assert driver.held == list(EXPORT_UNDOES)
    memory.close()
    assert not driver.held
    with pytest.raises(OSError):
        os.fstat(file)
    memory.close()
    assert not driver.held


@pytest.mark.parametrize(
    "name",
    [
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemExportToShareableHandle",
    ],
)
def test_a_refused_export_leaves_nothing_allocated(use, name):
    driver = use(exporting(**{name: 801}))
    with pytest.raises(NotImported, match=f"{name}: error 801"):
        CudaExport(torch.device("cuda", 1), SIZE)
    assert not driver.held


def test_a_torch_that_takes_no_such_memory(use, monkeypatch):
    driver = use(Driver())

    def refuse(*_, **__):
        raise TypeError("no")

    monkeypatch.setattr(cuda_memory.torch, "as_tensor", refuse)
    with pytest.raises(NotImported, match="torch takes no such memory: no"):
        CudaMemory(torch.device("cuda", 1), 9, SIZE)
    assert not driver.held


def test_a_copy_is_not_taken_for_the_memory(use, monkeypatch):
    """torch copies memory of another device, and a copy would keep its values."""
    driver = use(Driver())
    copied = Values(data=(2 * ADDRESS, False))
    monkeypatch.setattr(cuda_memory.torch, "as_tensor", lambda interface, device: copied)
    with pytest.raises(NotImported, match="elsewhere than on cuda:1"):
        CudaMemory(torch.device("cuda", 1), 9, SIZE)
    assert not driver.held


def test_without_a_driver_it_says_so(monkeypatch):
    def no_driver(name):
        raise OSError(f"{name} is not there")

    monkeypatch.setattr(cuda_memory.ctypes, "CDLL", no_driver)
    cuda_memory._driver.cache_clear()
    with pytest.raises(NotImported, match="libcuda.so.1 is not there"):
        cuda_memory._driver()
