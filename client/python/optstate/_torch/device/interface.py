"""The operations of an accelerator that an optimizer needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class NotRegistered(Exception):
    """Memory could not be registered with the accelerator; the text says why."""


class NotImported(Exception):
    """Memory of a device could not be shared with the daemon; the text says why."""


class Event(Protocol):
    """A point in a stream of copies."""

    def query(self) -> bool:
        """Returns whether all copies before it are done; does not wait."""

    def synchronize(self) -> None:
        """Waits, in the calling thread, until all copies before it are done."""


class Stream(Protocol):
    """Copies of one device in one direction, beside its computations.

    Threads: one at a time.
    """

    def follow(self) -> None:
        """Makes copies that are started from now on wait for what the calling thread's current
        stream has been given to compute."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts a copy and does not wait for it. The device's tensor keeps its memory until the
        copy is done, whatever becomes of the tensor; host memory, and memory that was imported,
        is the caller's business."""

    def copy_to_exported(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Does what copy() does, from a tensor of the device to memory there that was exported."""

    def copy_all(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Does what copy() does, for each pair of tensors that are all on the device: sooner than
        one after the other."""

    def record(self) -> Event:
        """Returns the point after all copies that were started."""

    def lead(self, event: Event) -> None:
        """Makes what the calling thread's current stream computes from now on wait for the
        event. The thread does not wait."""


class ImportedMemory(Protocol):
    """Memory of a device that the daemon has allocated there. It is there as long as this
    process has it mapped, also when the daemon dies."""

    values: torch.Tensor
    """All of it, as bytes on the device, which are only read."""

    def close(self) -> None:
        """Unmaps it; no copy may be under way."""


class ExportedMemory(Protocol):
    """Memory of a device that the daemon may map. It is there as long as either has it mapped, also
    when this process dies."""

    values: torch.Tensor
    """All of it, as bytes on the device."""
    file: int
    """The driver's file of it, for the daemon; this object's."""
    size: int

    def close(self) -> None:
        """Frees it; no copy of this process may be under way."""


class Backend(Protocol):
    """One kind of accelerator. Threads: safe."""

    def stream(self, device: torch.device, direction: str) -> Stream:
        """Returns the stream "to_host" or "to_device" of a device, one for all callers."""

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        """Registers whole pages of host memory, which copies then reach without the CPU.

        read_only: the process may not write the memory. NotRegistered: the driver refuses.
        """

    def unregister(self, address: int) -> None:
        """Undoes register(); no copy may be under way. NotRegistered: the driver refuses."""

    def pinned(self, size: int) -> torch.Tensor:
        """Returns new host memory, as bytes, that copies reach without the CPU."""

    def name_for_daemon(self, device: torch.device) -> str | None:
        """Returns the name by which the daemon knows the device too; None: it has none."""

    def import_memory(self, device: torch.device, file: int, size: int) -> ImportedMemory:
        """Maps `size` bytes of memory of the device that the daemon has exported as a file, which
        stays the caller's. NotImported: the driver refuses."""

    def export_memory(self, device: torch.device, size: int) -> ExportedMemory:
        """Allocates at least `size` bytes of memory of the device that the daemon may map.
        NotImported: the driver refuses, or too little would be left to the script."""
