"""An accelerator for tests: CPU tensors, and copies that threads make late.

A stream is a thread with a queue that mostly does nothing before someone waits for it, and then no
more than what is waited for; some copies are done as soon as they may, at random. So streams
complete out of order, and a wait that the optimizer leaves out shows: the target of a copy holds
NaN until the copy is done, and a copy reads its source when it is done, not when it is started.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import mmap
import os
import random
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import pytest
import torch
from optstate._torch.device import backends
from optstate._torch.device.interface import NotImported, NotRegistered
from optstate._torch.gradients import gathered
from optstate._torch.gradients import views as gradient_views
from optstate._torch.parameters import indirect, parameters
from optstate._torch.parameters import views as parameter_views
from optstate.session import Session
from torch.utils._python_dispatch import TorchDispatchMode

_PATIENCE_S = 60
_EAGER = 0.3  # the part of copies that are not late
# Seals: SHRINK, GROW, FUTURE_WRITE and SEAL: others may read the file, and nothing else.
_SEALS = 0x2 | 0x4 | 0x10 | 0x1


class EmulatedEvent:
    """See interface.Event. A query comes true after a few, whose number is random."""

    def __init__(self, stream: EmulatedStream, queries: int) -> None:
        self._stream = stream
        self._queries = queries
        self.place = 0
        self.done = threading.Event()

    def query(self) -> bool:
        if self._queries:
            self._queries -= 1
            return False
        self.finish()
        return True

    def synchronize(self) -> None:
        if not self.done.is_set():
            self._stream.note_wait()
        self.finish()

    def finish(self) -> None:
        """Waits; for what the device does by itself."""
        self._stream.finish(self)


class EmulatedStream:
    """See interface.Stream."""

    def __init__(self, backend: EmulatedBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._queue: collections.deque[Callable[[], Any]] = collections.deque()
        self._given = self._wanted = self._taken = 0
        self._condition = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def enqueue(self, work: Callable[[], Any]) -> int:
        with self._condition:
            self._queue.append(work)
            self._given += 1
            return self._given

    def finish(self, event: EmulatedEvent) -> None:
        with self._condition:
            self._wanted = max(self._wanted, event.place)
            self._condition.notify_all()
        assert event.done.wait(_PATIENCE_S), f"{self._name} waits for ever"

    def _run(self) -> None:
        while True:
            with self._condition:
                while self._taken >= self._wanted:
                    self._condition.wait()
                work = self._queue.popleft()
                self._taken += 1
            try:
                work()
            except BaseException as error:
                self._backend.faults.append(f"{self._name}: {error!r}")

    @property
    def is_idle(self) -> bool:
        return self._taken == self._given

    def note_wait(self) -> None:
        if not self._backend.may_wait:
            self._backend.faults.append(f"a thread waits for {self._name}")

    def follow(self) -> None:
        self.enqueue(self._backend.current.record().finish)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        host = target if self._name == "to_host" else source
        address, size = host.data_ptr(), host.numel() * host.element_size()
        if not self._backend.reaches(address, size):
            self._backend.faults.append(f"{self._name}: the copy needs registered memory")
        entry = (self._name, address, size)
        self._backend.under_way.append(entry)

        def work() -> None:
            target.detach().data.copy_(source.detach())
            self._backend.under_way.remove(entry)

        with torch.no_grad():
            # The work that the device was given before still reads the former values.
            if host is target or self._backend.current.is_idle:
                target.fill_(float("nan") if target.is_floating_point() else 1)
            else:
                torch.autograd.graph.increment_version(target)
        self.enqueue(work)
        if self._backend.random.random() < _EAGER:
            self.record().finish()
        self._backend.copies[self._name] += 1
        if self._name == "to_host" and self._backend.is_exported(address, size):
            self._backend.copies["for_daemon"] += 1
        if self._name == "to_device" and self._backend.is_imported(address, size):
            self._backend.copies["on_device"] += 1

    def copy_to_exported(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copy(target, source)

    def copy_all(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources):
            self.copy(target, source)

    def record(self) -> EmulatedEvent:
        event = EmulatedEvent(self, self._backend.random.randrange(3))
        event.place = self.enqueue(event.done.set)
        return event

    def lead(self, event: EmulatedEvent) -> None:
        self._backend.current.enqueue(event.finish)
        if not self._backend.computes_late:
            self._backend.catch_up()


class EmulatedMemory:
    """Memory of one of the daemon's emulated devices; see interface.ImportedMemory."""

    def __init__(self, backend: EmulatedBackend, file: int, size: int) -> None:
        self._backend = backend
        mapping = mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no tensors that cannot be written
            self.values = torch.frombuffer(mapping, dtype=torch.uint8)
        self.address, self.size = self.values.data_ptr(), size
        backend.imported.append(self)

    def close(self) -> None:
        end = self.address + self.size
        if any(self.address <= begin < end for _, begin, _ in self._backend.under_way):
            self._backend.faults.append("memory is unmapped while a copy is under way")
        self._backend.imported.remove(self)
        self.values = torch.empty(0, dtype=torch.uint8)  # and the mapping goes with it


class EmulatedExport:
    """Memory of an emulated device that the daemon may map; see interface.ExportedMemory."""

    def __init__(self, backend: EmulatedBackend, size: int) -> None:
        self._backend = backend
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.file = os.memfd_create("gradients", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self.file, 0, self.size)
        mapping = mmap.mmap(self.file, self.size)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
        self.values = torch.frombuffer(mapping, dtype=torch.uint8)
        self.address = self.values.data_ptr()
        backend.exported.append(self)

    def close(self) -> None:
        end = self.address + self.size
        if any(self.address <= begin < end for _, begin, _ in self._backend.under_way):
            self._backend.faults.append("memory is freed while a copy is under way")
        self._backend.exported.remove(self)
        self.values = torch.empty(0, dtype=torch.uint8)  # and the mapping goes with it
        os.close(self.file)


class EmulatedBackend:
    """See interface.Backend.

    computes_late: the test computes by compute(), and looks at tensors after catch_up(). Otherwise
    it may compute with tensors as always, because the current stream never lags behind.
    may_wait: False makes a thread that waits for a stream a fault.
    refuses: why register() fails; None: it does not.
    name: of the device, for the daemon; None: it has none.
    refuses_import: why import_memory() fails; None: it does not.
    refuses_export: why export_memory() fails; None: it does not.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.computes_late = False
        self.may_wait = True
        self.refuses: str | None = None
        self.name: str | None = None
        self.refuses_import: str | None = None
        self.refuses_export: str | None = None
        self.exported: list[EmulatedExport] = []
        self.imported: list[EmulatedMemory] = []
        self.imports = 0
        self.faults: list[str] = []
        self.copies: collections.Counter[str] = collections.Counter()
        self.under_way: list[tuple[str, int, int]] = []
        self.registered: dict[int, tuple[int, bool]] = {}
        self.registrations = 0
        self._pinned: list[torch.Tensor] = []
        self._streams: dict[tuple[torch.device, str], EmulatedStream] = {}
        self.current = EmulatedStream(self, "current")

    def stream(self, device: torch.device, direction: str) -> EmulatedStream:
        key = (device, direction)
        if key not in self._streams:
            self._streams[key] = EmulatedStream(self, direction)
        return self._streams[key]

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        if self.refuses is not None:
            raise NotRegistered(self.refuses)
        for begin, (there, _) in self.registered.items():
            if begin < address + size and address < begin + there:
                raise NotRegistered("already registered")
        self.registered[address] = (size, read_only)
        self.registrations += 1

    def unregister(self, address: int) -> None:
        size, _ = self.registered.pop(address)
        if any(begin < address + size and address < begin + n for _, begin, n in self.under_way):
            self.faults.append("memory is unregistered while a copy is under way")

    def pinned(self, size: int) -> torch.Tensor:
        self._pinned.append(torch.empty(size, dtype=torch.uint8))
        return self._pinned[-1]

    def name_for_daemon(self, device: torch.device) -> str | None:
        return self.name

    def import_memory(self, device: torch.device, file: int, size: int) -> EmulatedMemory:
        if self.refuses_import is not None:
            raise NotImported(self.refuses_import)
        self.imports += 1
        return EmulatedMemory(self, file, size)

    def export_memory(self, device: torch.device, size: int) -> EmulatedExport:
        if self.refuses_export is not None:
            raise NotImported(self.refuses_export)
        return EmulatedExport(self, size)

    def is_exported(self, address: int, size: int) -> bool:
        """Returns whether this is memory of a device, which the rank shares."""
        return any(
            each.address <= address and address + size <= each.address + each.size
            for each in self.exported
        )

    def is_imported(self, address: int, size: int) -> bool:
        """Returns whether this is memory of a device, which the daemon has."""
        return any(
            each.address <= address and address + size <= each.address + each.size
            for each in self.imported
        )

    def reaches(self, address: int, size: int) -> bool:
        """Returns whether copies reach this memory without the CPU."""
        if self.is_imported(address, size) or self.is_exported(address, size):
            return True
        there = [(begin, count) for begin, (count, _) in self.registered.items()]
        there += [(each.data_ptr(), each.numel()) for each in self._pinned]
        return any(begin <= address and address + size <= begin + n for begin, n in there)

    def check_settled(self, what: str) -> None:
        """Notes a fault if parameters are on their way while the daemon gets to write them."""
        if any(name == "to_device" for name, _, _ in self.under_way):
            self.faults.append(f"{what} while parameters are being copied")

    def compute(self, work: Callable[[], Any]) -> None:
        """Gives the current stream something to compute."""
        self.current.enqueue(work)

    def catch_up(self) -> None:
        """Waits for the current stream, as a script does that looks at a loss."""
        self.current.record().finish()

    def late(self, tensor: torch.Tensor) -> None:
        """Makes a tensor's values come late, from the current stream: until then it holds NaN."""
        values = tensor.detach().clone()
        tensor.detach().data.fill_(float("nan"))
        self.compute(lambda: tensor.detach().data.copy_(values))

    def forbid_synchronization(self) -> contextlib.AbstractContextManager[Any]:
        """Within, what reads a device's values by anything but a copy of a stream is a fault."""
        return _NoSynchronization(self)


class _NoSynchronization(TorchDispatchMode):
    """Finds item(), tolist() and comparisons, which wait for a whole device."""

    def __init__(self, backend: EmulatedBackend) -> None:
        super().__init__()
        self._backend = backend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal):
            tensor = args[0]
            if not self._backend.reaches(tensor.data_ptr(), tensor.element_size()):
                self._backend.faults.append(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def _checked(method: Callable[..., Any], backend: EmulatedBackend) -> Callable[..., Any]:
    def checked(*arguments: Any, **options: Any) -> Any:
        backend.check_settled(method.__name__)
        return method(*arguments, **options)

    return checked


@contextlib.contextmanager
def emulated(seed: int) -> Iterator[EmulatedBackend]:
    """Makes CPU tensors those of an accelerator; nothing is in host memory then."""
    backend = EmulatedBackend(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends.FACTORIES, "cpu", lambda: backend)
        backends.forget_backends()
        patch.setattr(indirect, "EARLY_ELEMENTS_MIN", 1)
        for module in (gathered, gradient_views, parameter_views, parameters):
            patch.setattr(module, "is_cpu", lambda _: False)
        for name in ("push", "commit", "finish_load"):
            patch.setattr(Session, name, _checked(getattr(Session, name), backend))
        yield backend
        assert not backend.faults, backend.faults
    backends.forget_backends()
