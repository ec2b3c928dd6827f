"""The calls to torch.cuda, with a model of it: test_cuda.py makes them on a GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from optstate._torch.device import cuda, host_memory
from optstate._torch.device.cuda import CudaBackend
from optstate._torch.device.host_memory import HostMemory, page_ranges
from optstate._torch.device.interface import NotRegistered

PAGE = 4096
PORTABLE, READ_ONLY = 1, 8


class Tensor:
    """A tensor that notes what is done with it, and in which stream."""

    def __init__(self, cuda: ModelOfCuda, name: str, is_cuda: bool) -> None:
        self._cuda, self._name, self.is_cuda = cuda, name, is_cuda

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        self._cuda.note("copy", self._name, source._name, non_blocking, self._cuda.stream_now)

    def record_stream(self, stream: Any) -> None:
        self._cuda.note("record_stream", self._name, stream)


class ModelOfCuda:
    """Stands for torch.cuda."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.stream_now: Any = "default"
        self.results: list[int] = []  # of the next calls of the runtime; then 0
        self.streams = 0
        self.device_now = 0

    def note(self, *call: Any) -> None:
        self.calls.append(call)

    def Stream(self, device: int) -> Any:  # noqa: N802
        self.streams += 1
        outer, number = self, self.streams

        class Stream:
            def wait_stream(self, other: Any) -> None:
                outer.note("wait_stream", number, other)

            def __repr__(self) -> str:
                return f"stream {number}"

        return Stream()

    def Event(self, blocking: bool = False) -> Any:  # noqa: N802
        outer = self

        class Event:
            def record(self, stream: Any) -> None:
                outer.note("record", repr(stream), blocking)

        return Event()

    def current_stream(self, device: int) -> Any:
        outer, now = self, self.stream_now

        class Current:
            def wait_event(self, event: Any) -> None:
                outer.note("wait_event", device)

            def __eq__(self, other: object) -> bool:
                return other == f"current {device}"

            def __repr__(self) -> str:
                return now

        return Current()

    def set_stream(self, stream: Any) -> None:
        self.stream_now = repr(stream)

    @contextlib.contextmanager
    def stream(self, stream: Any):
        before, self.stream_now = self.stream_now, repr(stream)
        yield
        self.stream_now = before

    def current_device(self) -> int:
        return self.device_now

    def cudart(self) -> Any:
        outer = self

        class Runtime:
            def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802
                outer.note("register", *arguments)
                return outer.results.pop(0) if outer.results else 0

            def cudaHostUnregister(self, *arguments: int) -> int:  # noqa: N802
                outer.note("unregister", *arguments)
                return outer.results.pop(0) if outer.results else 0

            def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
                return f"error {error}"

        return Runtime()


@pytest.fixture
def model(monkeypatch):
    found = ModelOfCuda()
    names = ["Stream", "Event", "current_stream", "set_stream", "stream"]
    for name in [*names, "current_device", "cudart"]:
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(cuda, "_take_error", lambda: found.note("take_error"))
    return found


@pytest.mark.parametrize("device_now", [0, 1])
def test_copies_are_in_a_side_stream_that_keeps_the_devices_memory(model, device_now):
    model.device_now = device_now
    stream = CudaBackend().stream(torch.device("cuda", 1), "to_host")
    host, gradient = Tensor(model, "host", False), Tensor(model, "gradient", True)
    stream.follow()
    stream.copy(host, gradient)
    stream.lead(stream.record())
    (_, side, current), *rest = model.calls
    assert (side, current == "current 1") == (1, True)
    assert rest[0] == ("copy", "host", "gradient", True, "stream 1")
    assert rest[1][:2] == ("record_stream", "gradient") and repr(rest[1][2]) == "stream 1"
    assert rest[2:] == [("record", "stream 1", True), ("wait_event", 1)]
    assert model.stream_now == "default"


def test_memory_of_the_daemons_is_not_shown_to_torchs_allocator(model):
    """With cudaMallocAsync it is an error to record a stream for memory that is not its own."""
    stream = CudaBackend().stream(torch.device("cuda", 1), "to_device")
    stream.copy(Tensor(model, "parameter", True), Tensor(model, "imported", True))
    stream.copy(Tensor(model, "parameter", True), Tensor(model, "host", False))
    stream.copy_to_exported(Tensor(model, "exported", True), Tensor(model, "gradient", True))
    recorded = [name for call, name, *_ in model.calls if call == "record_stream"]
    assert recorded == ["parameter", "parameter", "gradient"]


def test_copies_on_the_device_are_started_together(model, monkeypatch):
    def copy_all(targets, sources, non_blocking):
        for target, source in zip(targets, sources):
            target.copy_(source, non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", copy_all)
    stream = CudaBackend().stream(torch.device("cuda", 0), "to_device")
    targets = [Tensor(model, f"parameter {i}", True) for i in range(2)]
    stream.copy_all(targets, [Tensor(model, f"imported {i}", True) for i in range(2)])
    copies = [call for call in model.calls if call[0] == "copy"]
    assert copies == [
        ("copy", f"parameter {i}", f"imported {i}", True, "stream 1") for i in range(2)
    ]
    recorded = [name for call, name, *_ in model.calls if call == "record_stream"]
    assert recorded == ["parameter 0", "parameter 1"]


def test_a_device_has_one_stream_for_each_direction(model):
    backend = CudaBackend()
    pairs = [(torch.device("cuda", i), way) for i in (0, 1) for way in ("to_host", "to_device")]
    streams = [backend.stream(*pair) for pair in pairs]
    assert len(set(map(id, streams))) == 4
    assert streams == [backend.stream(*pair) for pair in pairs]
    # A device without a number is the current one.
    assert backend.stream(torch.device("cuda"), "to_host") is streams[0]


def test_read_only_memory_is_registered_as_the_driver_takes_it(model):
    backend = CudaBackend()
    backend.register(PAGE, PAGE, read_only=False)
    backend.register(2 * PAGE, PAGE, read_only=True)
    model.results = [801]  # cudaErrorNotSupported
    backend.register(3 * PAGE, PAGE, read_only=True)
    assert model.calls == [
        ("register", PAGE, PAGE, PORTABLE),
        ("register", 2 * PAGE, PAGE, PORTABLE | READ_ONLY),
        ("register", 3 * PAGE, PAGE, PORTABLE | READ_ONLY),
        ("take_error",),
        ("register", 3 * PAGE, PAGE, PORTABLE),
    ]


def test_a_refusal_leaves_no_error_for_the_script(model):
    backend = CudaBackend()
    model.results = [801, 1]
    with pytest.raises(NotRegistered, match="cudaHostRegister: error 801"):
        backend.register(PAGE, PAGE, read_only=True)
    assert model.calls.count(("take_error",)) == 2
    model.results = [713]
    with pytest.raises(NotRegistered, match="cudaHostUnregister: error 713"):
        backend.unregister(PAGE)


def test_ranges_are_whole_pages_apart_from_each_other():
    assert page_ranges([]) == []
    assert page_ranges([(PAGE + 1, 0)]) == []
    assert page_ranges([(PAGE + 1, 1)]) == [(PAGE, PAGE)]
    assert page_ranges([(PAGE, PAGE)]) == [(PAGE, PAGE)]
    assert page_ranges([(PAGE + 1, PAGE)]) == [(PAGE, 2 * PAGE)]
    # The places are on one page, on neighbours and on others, in any order.
    places = [(9 * PAGE, 5), (PAGE + 100, 8), (PAGE, 8), (2 * PAGE, PAGE), (5 * PAGE, 1)]
    assert page_ranges(places) == [(PAGE, 2 * PAGE), (5 * PAGE, PAGE), (9 * PAGE, PAGE)]
    assert page_ranges([(0, 10 * PAGE), (PAGE, 1)]) == [(0, 10 * PAGE)]


class Refusing:
    """A backend that refuses the n-th range."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.registered: list[int] = []

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        self._number -= 1
        if self._number == 0:
            raise NotRegistered("too much")
        self.registered.append(address)

    def unregister(self, address: int) -> None:
        self.registered.remove(address)


def test_memory_is_registered_whole_or_not_at_all(monkeypatch):
    monkeypatch.setattr(host_memory, "_said", set())
    backend = Refusing(3)
    memory = HostMemory("gradients", read_only=False)
    memory.hold(backend, [(i * 10 * PAGE, 1) for i in range(1, 5)])
    assert memory.is_held and not memory.is_registered and not backend.registered
    memory.release()
    memory.hold(backend, [(PAGE, 1)])
    assert memory.is_registered and backend.registered == [PAGE]
    # A forked child leaves its parent's registration alone.
    monkeypatch.setattr(host_memory.os, "getpid", lambda: -1)
    memory.release()
    assert backend.registered == [PAGE]
