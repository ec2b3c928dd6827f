"""CUDA through torch, which has the runtime that the tensors belong to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

from optstate._torch.device.cuda_memory import CudaExport, CudaMemory
from optstate._torch.device.interface import NotImported, NotRegistered

# The part of a device's memory that gradients for the daemon leave free to the script.
_LEFT_FREE = 0.1
# cudaHostRegisterPortable: for all devices of the process; cudaHostRegisterReadOnly.
_PORTABLE, _READ_ONLY = 0x01, 0x08


class CudaStream:
    """One side stream of a device; see interface.Stream."""

    def __init__(self, index: int) -> None:
        self._index = index  # torch takes longer to find it in a torch.device
        self._stream = torch.cuda.Stream(index)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._index))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # Where both are on the device, the source was imported.
        self._copy(target, source, target if target.is_cuda else source)

    def copy_to_exported(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(target, source, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, own: torch.Tensor) -> None:
        with self._current():
            target.copy_(source, non_blocking=True)
        # torch's allocator would otherwise give freed memory to the current stream at once. Not
        # every allocator of torch takes memory that is none of its own (cudaMallocAsync).
        own.record_stream(self._stream)

    def copy_all(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with self._current():
            torch._foreach_copy_(targets, sources, non_blocking=True)  # few launches
        for each in targets:
            each.record_stream(self._stream)

    def record(self) -> torch.cuda.Event:
        # Blocking: a waiting thread sleeps and leaves its core to the daemon.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def lead(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._index).wait_event(event)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """As torch.cuda.stream(), which takes longer than a copy: it looks for devices."""
        if torch.cuda.current_device() != self._index:
            with torch.cuda.stream(self._stream):
                yield
            return
        before = torch.cuda.current_stream(self._index)
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)


class CudaBackend:
    """See interface.Backend."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, str], CudaStream] = {}
        self._lock = threading.Lock()  # hooks run in one thread for each device

    def stream(self, device: torch.device, direction: str) -> CudaStream:
        index = torch.cuda.current_device() if device.index is None else device.index
        with self._lock:
            key = (index, direction)
            if key not in self._streams:
                self._streams[key] = CudaStream(index)
            return self._streams[key]

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        # Read-only pages can be registered only as such, which not every driver can.
        flags = [_PORTABLE | _READ_ONLY, _PORTABLE] if read_only else [_PORTABLE]
        refusals = []
        for each in flags:
            refusal = self._call("cudaHostRegister", address, size, each)
            if refusal is None:
                return
            refusals.append(refusal)
        raise NotRegistered(refusals[0])

    def unregister(self, address: int) -> None:
        refusal = self._call("cudaHostUnregister", address)
        if refusal is not None:
            raise NotRegistered(refusal)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def name_for_daemon(self, device: torch.device) -> str | None:
        # Before torch 2.4 there is none.
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        return None if uuid is None else str(uuid).lower()

    def import_memory(self, device: torch.device, file: int, size: int) -> CudaMemory:
        return CudaMemory(device, file, size)

    def export_memory(self, device: torch.device, size: int) -> CudaExport:
        # torch has what the script has used so far, free or not.
        free, total = torch.cuda.mem_get_info(device)
        if free - size < _LEFT_FREE * total:
            raise NotImported(
                f"{size >> 20} MiB of memory would be taken there, of which {free >> 20} MiB are"
                f" free: {_LEFT_FREE:.0%} of {total >> 20} MiB are left to the script"
            )
        return CudaExport(device, size)

    def _call(self, name: str, *arguments: int) -> str | None:
        """Calls the runtime; returns the text of its error, or None."""
        runtime = torch.cuda.cudart()
        error = getattr(runtime, name)(*arguments)
        if int(error) == 0:
            return None
        text = f"{name}: {runtime.cudaGetErrorString(error)}"
        _take_error()
        return text


def _take_error() -> None:
    """Makes the runtime forget an error that was handled: torch's check after the next kernel, of
    the script, would raise it. The kernel launched here takes it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
