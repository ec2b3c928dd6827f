"""The calls to the driver that map the daemon's memory, with a model of it: test_cuda.py makes them
on a GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from optstate._torch.device import cuda_memory
from optstate._torch.device.cuda_memory import CudaMemory
from optstate._torch.device.interface import NotImported

SIZE = 4096
HANDLE = 7
READ, READ_AND_WRITE = 1, 3
DEVICE = torch.device("cuda", 1)


class ModelOfDriver:
    """Stands for libcuda.so.1, in which memory is where `memory` is."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.calls: list[str] = []
        self.refused: set[Any] = set()  # names of functions, and accesses
        self.access: tuple[int, int, int] | None = None  # of the last call that was not refused

    def _answer(self, name: str, what: Any) -> int:
        self.calls.append(name)
        return 801 if what in self.refused else 0  # CUDA_ERROR_NOT_SUPPORTED

    def cuMemImportFromShareableHandle(self, handle: Any, *how: int) -> int:  # noqa: N802
        assert how == (5, 1)
        handle._obj.value = HANDLE
        return self._answer("import", "import")

    def cuMemAddressReserve(self, address: Any, size: int, *others: int) -> int:  # noqa: N802
        assert (size, others) == (SIZE, (0, 0, 0))
        error = self._answer("reserve", "reserve")
        if not error:
            address._obj.value = self._memory.data_ptr()
        return error

    def cuMemMap(self, address: Any, size: int, *what: Any) -> int:  # noqa: N802
        begin, handle, flags = what
        assert address.value == self._memory.data_ptr() and handle.value == HANDLE
        assert (size, begin, flags) == (SIZE, 0, 0)
        return self._answer("map", "map")

    def cuMemSetAccess(self, address: Any, size: int, access: Any, count: int) -> int:  # noqa: N802
        assert (size, count) == (SIZE, 1)
        location, flags = access._obj.location, access._obj.flags
        self.access = (location.type, location.id, flags)
        return self._answer("access", flags)

    def cuMemUnmap(self, address: Any, size: int) -> int:  # noqa: N802
        return self._answer("unmap", "unmap")

    def cuMemAddressFree(self, address: Any, size: int) -> int:  # noqa: N802
        return self._answer("free", "free")

    def cuMemRelease(self, handle: Any) -> int:  # noqa: N802
        assert handle.value == HANDLE
        return self._answer("release", "release")

    def cuGetErrorString(self, error: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"operation not supported"
        return 0


@pytest.fixture
def model(monkeypatch):
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    found = ModelOfDriver(memory)
    monkeypatch.setattr(cuda_memory, "_driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch, "as_tensor", lambda interface, device: memory)
    return found


def test_memory_is_mapped_to_be_read_and_given_back(model):
    memory = CudaMemory(DEVICE, 5, SIZE)
    assert memory.values.numel() == SIZE
    assert model.calls == ["import", "reserve", "map", "access"]
    assert model.access == (1, 1, READ)
    memory.close()
    memory.close()
    assert memory.values.numel() == 0
    assert model.calls[4:] == ["unmap", "free", "release"]


def test_a_driver_that_maps_for_writing_alone(model):
    model.refused = {READ}
    memory = CudaMemory(DEVICE, 5, SIZE)
    assert model.access == (1, 1, READ_AND_WRITE)
    memory.close()


@pytest.mark.parametrize(
    "refused, given_back",
    [
        ({"import"}, []),
        ({"reserve"}, ["release"]),
        ({"map"}, ["free", "release"]),
        ({READ, READ_AND_WRITE}, ["unmap", "free", "release"]),
    ],
    ids=["import", "reserve", "map", "access"],
)
def test_a_refusal_is_said_and_leaves_nothing(model, refused, given_back):
    model.refused = refused
    with pytest.raises(NotImported, match="error 801, operation not supported"):
        CudaMemory(DEVICE, 5, SIZE)
    assert [each for each in model.calls if each in ("unmap", "free", "release")] == given_back


def test_a_copy_is_not_taken_for_the_memory(model, monkeypatch):
    """torch copies memory of another device, and a copy keeps its values."""
    copied = torch.zeros(SIZE, dtype=torch.uint8)
    monkeypatch.setattr(torch, "as_tensor", lambda interface, device: copied)
    with pytest.raises(NotImported, match="elsewhere than on cuda:1"):
        CudaMemory(DEVICE, 5, SIZE)
    assert model.calls[4:] == ["unmap", "free", "release"]
