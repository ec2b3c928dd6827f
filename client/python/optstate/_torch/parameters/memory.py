"""Detects parameters that share memory: each has a master of its own in the daemon, so of the
updates that torch would apply to both, one would be lost."""

from __future__ import annotations

import contextlib
import fcntl
import math
import operator
import os
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from optstate._torch.shards import local_of

# Maximum number of elements of memory that are compared one by one. Beyond that, tensors are
# taken to overlap unless their strides exclude it.
_EXACT_MAX = 1 << 28
# Maximum number of storages whose locks a process holds: each takes a file descriptor.
_LOCKS_MAX = 64


class Place(NamedTuple):
    """The memory that a tensor's elements are in."""

    device: tuple[str, int]
    begin: int  # address of the first element
    end: int  # address behind the last element
    name: str
    tensor: torch.Tensor
    owner: int  # the id() of the parameter

    @property
    def is_dense(self) -> bool:
        return self.tensor.nbytes == self.end - self.begin


def place_of(parameter: torch.Tensor, name: str) -> Place | None:
    """Returns the place of this rank's part of a parameter; None when that has no elements or no
    memory."""
    tensor = local_of(parameter)
    if not tensor.numel() or not tensor.data_ptr():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin = tensor.data_ptr()
    device = (tensor.device.type, tensor.device.index or 0)
    return Place(
        device, begin, begin + (last + 1) * tensor.element_size(), name, tensor, id(parameter)
    )


def check_disjoint(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raises ValueError when two of these parameters share memory, or one shares memory with a
    parameter of another attached optimizer of this process.

    Views that interleave without a common element (the columns of a matrix) do not share. One
    Parameter may be in several optimizers: each sees what the other has written.
    """
    mine = set(map(id, parameters))
    own = [place_of(tensor, f'"{name}"') for tensor, name in zip(parameters, names)]
    others = [
        place_of(tensor, f'"{name}" of job "{trained.job}"')
        for trained in list(_trained)
        for tensor, name in zip(trained.parameters, trained.names)
        if id(tensor) not in mine
    ]
    places = sorted(
        (place for place in (*own, *others) if place is not None), key=operator.itemgetter(0, 1)
    )
    still_open: list[Place] = []
    for place in places:
        still_open = [
            each for each in still_open if each.device == place.device and place.begin < each.end
        ]
        for other in still_open:
            are_of_others = place.owner not in mine and other.owner not in mine
            if not are_of_others and overlap(place, other):
                raise ValueError(
                    f"parameters {other.name} and {place.name} share memory: each would be"
                    " updated from a value of its own in the daemon, and one update be lost. To"
                    " tie them, use the same Parameter for both; else give them memory of their"
                    " own (.clone())"
                )
        still_open.append(place)


def overlap(one: Place, other: Place) -> bool:
    """Returns whether two tensors whose extents overlap have a byte in common."""
    if one.is_dense and other.is_dense:
        return True
    size = math.gcd(one.tensor.element_size(), other.tensor.element_size())
    if (one.begin - other.begin) % size:
        size = 1
    layouts = [_in_units(place, size) for place in (one, other)]
    offset = (other.begin - one.begin) // size
    # Elements of each are at multiples of the strides' common divisor, from its own beginning.
    strides = [stride for layout in layouts for count, stride in layout if count > 1]
    divisor = math.gcd(*strides) if strides else 0
    if divisor and offset % divisor:
        return False
    if not divisor:
        return offset == 0  # each has one element
    layouts = [[(count, stride // divisor) for count, stride in layout] for layout in layouts]
    offset //= divisor
    extents = [sum((count - 1) * stride for count, stride in layout) + 1 for layout in layouts]
    total = max(extents[0], offset + extents[1]) - min(0, offset)
    if total > _EXACT_MAX:
        return True
    touched = torch.zeros(total, dtype=torch.bool, device="cpu")
    first = -min(0, offset)
    _elements(touched, layouts[0], first).fill_(True)
    return bool(_elements(touched, layouts[1], first + offset).any())


def _in_units(place: Place, size: int) -> list[tuple[int, int]]:
    """Returns (count, stride) of each dimension in units of `size` bytes; the last dimension
    is the units of an element."""
    units = place.tensor.element_size() // size
    dimensions = [
        (count, stride * units) for count, stride in zip(place.tensor.shape, place.tensor.stride())
    ]
    return [*dimensions, (units, 1)]


def _elements(memory: torch.Tensor, layout: Sequence[tuple[int, int]], offset: int) -> torch.Tensor:
    counts, strides = zip(*layout)
    return memory.as_strided(counts, strides, offset)


def _unlock(descriptor: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child inherits the lock's descriptor
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class SharedMemoryLock:
    """A lock held by the one process whose optimizer updates parameters in shared memory.

    It locks the file of the memory, and ends with the process that holds it.
    """

    def __init__(self, descriptor: int) -> None:
        self._pid = os.getpid()
        self._release = weakref.finalize(self, _unlock, descriptor, self._pid)

    @property
    def is_ours(self) -> bool:
        """Returns whether this process holds the lock, and not one that it was forked from."""
        return self._pid == os.getpid()

    def let_go(self) -> None:
        """Closes the descriptor of another process's lock, which would otherwise keep the lock
        after that process ends."""
        self._release()


# The locks of this process, by device and inode of the file.
_held: weakref.WeakValueDictionary[tuple[int, int], SharedMemoryLock] = (
    weakref.WeakValueDictionary()
)


def _lock(path: str, name: str) -> SharedMemoryLock | None:
    """Locks a file; RuntimeError when another process holds it. None: the file cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(descriptor)
    held = _held.get((status.st_dev, status.st_ino))
    if held is not None and held.is_ours:
        os.close(descriptor)
        return held
    if held is not None:
        held.let_go()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RuntimeError(
            f'parameter "{name}" is in shared memory (share_memory_(), or sent to a process), and'
            " an optimizer of another process updates it: each would overwrite what the other"
            " has done. For processes that train one model together construct the optimizer on"
            ' the ranks of torch.distributed with reduction="daemon", each with a model of its'
            " own (copy.deepcopy); or close() the other optimizer before"
        ) from None
    held = _held[status.st_dev, status.st_ino] = SharedMemoryLock(descriptor)
    return held


def _paths_of(addresses: Sequence[int]) -> dict[int, str]:
    """Returns paths that open the files mapped at these addresses."""
    found: dict[int, str] = {}
    mapped: dict[int, tuple[int, str]] = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            extent, _, _, _, inode, *path = line.split(maxsplit=5)
            begin, end = (int(each, 16) for each in extent.split("-"))
            for address in addresses:
                if begin <= address < end and inode != "0":
                    mapped[address] = (int(inode), path[0].strip() if path else "")
    # A file that was unlinked is reached through the descriptor that torch keeps of it.
    descriptors = {}
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors[os.stat(f"/proc/self/fd/{each}").st_ino] = f"/proc/self/fd/{each}"
    for address, (inode, path) in mapped.items():
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == inode:
                descriptors[inode] = path
        if inode in descriptors:
            found[address] = descriptors[inode]
    return found


def lock_shared_memory(
    parameters: Sequence[torch.Tensor], names: Sequence[str]
) -> list[SharedMemoryLock]:
    """Locks the parameters that other processes may have too; RuntimeError when one of these
    processes updates them (Hogwild)."""
    shared: dict[int, str] = {}
    for parameter, name in zip(parameters, names):
        if parameter.is_cpu and parameter.is_shared() and len(shared) < _LOCKS_MAX:
            shared.setdefault(parameter.untyped_storage().data_ptr(), name)
    if not shared:
        return []
    try:
        paths = _paths_of(list(shared))
    except OSError:  # no /proc
        return []
    locks = [_lock(path, shared[address]) for address, path in paths.items()]
    return [lock for lock in locks if lock is not None]


class Trained:
    """The parameters of an attached optimizer, known to other optimizers of the process."""

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str], job: str) -> None:
        """Raises RuntimeError when another process trains the parameters."""
        self.parameters, self.names, self.job = parameters, names, job
        self._locks = lock_shared_memory(list(map(local_of, parameters)), names)
        _trained.add(self)

    def leave(self) -> None:
        """Releases the parameters when the optimizer detaches. Idempotent."""
        _trained.discard(self)
        self._locks = []


_trained: weakref.WeakSet[Trained] = weakref.WeakSet()
