"""Gradients in the memory shared with the daemon: views of a rank's gradient area."""

from __future__ import annotations

import array
import atexit
import bisect
import contextlib
import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from optstate import _native, errors
from optstate._torch.gradients.gathered import Gradients
from optstate._torch.tensors import is_cpu
from optstate._torch.warn import warn
from optstate.session import Piece, Session

# A smaller gradient is copied in step() faster than a hook is called for it. Tests lower it.
BYTES_MIN = 256 << 10
# Number of steps in a row in which something replaces a view before no more are made of it.
_REPLACED_MAX = 2


class _Place(NamedTuple):
    """Facts about a gradient that may be a view."""

    size: int  # bytes
    buffer: Any  # ctypes type of the memory
    shape: torch.Size
    dtype: torch.dtype


class _Mapping:
    """Memory that shows the gradient area: every tensor in it holds this object, the last one
    frees it."""

    def __init__(self, handle: ctypes.c_void_p, distance: int) -> None:
        self._handle = handle
        self.distance = distance  # from the gradient area
        self._put = _native.library().optstate_gradient_views_put
        free = _native.library().optstate_gradient_views_free
        weakref.finalize(self, free, handle).atexit = False

    def put(self, address: int, gradient: torch.Tensor, size: int) -> None:
        """Copies a contiguous gradient in host memory to an address in this memory."""
        _native.check(self._put(self._handle, address, gradient.data_ptr(), size))

    def keep(self, addresses: array.array, sizes: array.array) -> None:
        """Makes the memory private; these parts of it keep their values."""
        _native.check(
            _native.library().optstate_gradient_views_keep(
                self._handle,
                addresses.buffer_info()[0],
                sizes.buffer_info()[0],
                len(addresses),
            )
        )


class GradientViews:
    """Makes gradients views of a session's gradient area when backward() has made them.

    A gradient of backward() is copied there, and `grad` becomes a view on it: what happens to it
    before step() is then in the area, and step() copies nothing. Each view is a storage of its
    own. While anything holds a storage that is no longer its parameter's gradient, nothing may
    overwrite the memory: leave() first makes all views the process's own memory, at the same
    addresses, and later views are made in another mapping of the area.

    Threads: one at a time, like the optimizer; any thread may use the tensors. A fork by another
    thread waits for take().
    """

    def __init__(
        self,
        session: Session,
        parameters: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
        owned: Mapping[int, Piece],
    ) -> None:
        """Finds the parameters whose gradients can be views: none where that is impossible."""
        self._session = session
        self._parameters = parameters
        self._places: dict[int, _Place] = {}
        # Over gRPC, copies are what users expect.
        owned = owned if session.wire == "shm" and _most_holders() else {}
        for index, piece in owned.items():
            parameter, size = parameters[index], piece.numel * dtypes[index].itemsize
            # A hook that runs before ours may keep the gradient that ours replaces.
            if (
                piece.numel == parameter.numel()
                and size >= BYTES_MIN
                and is_cpu(parameter)
                and parameter.requires_grad
                and parameter.is_contiguous()
                and not parameter._post_accumulate_grad_hooks
            ):
                self._places[index] = _Place(
                    size, ctypes.c_char * size, parameter.shape, dtypes[index]
                )
        # The memory of each view that was made in the present mapping, and may be gone.
        self._memory: dict[int, weakref.ref[Any]] = {}
        self._replaced: dict[int, int] = {}
        self._mapping: _Mapping | None = None
        self._leaves = False  # leave() was called and has not returned
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._addresses: Mapping[int, int] = {}  # in the gradient area, when it is mapped
        _living.add(self)

    @property
    def indices(self) -> Iterable[int]:
        """The parameters whose gradients may become views, ascending."""
        return sorted(self._places)

    def take(self, index: int) -> None:
        """Makes the gradient that backward() has just made a view, if that makes no difference."""
        place = self._places.get(index)
        parameter = self._parameters[index]
        gradient = parameter.grad
        if place is None or gradient is None or not _is_new(gradient, place):
            return
        with self._lock:
            if self._is_held(index):
                self._part_with_held()
                return
            if self._mapping is None and not self._map():
                return
            assert self._mapping is not None
            address = self._address(index)
            # After the copy the core has none of this code in its cache.
            view = self._view(index, place, address)
            self._mapping.put(address, gradient, place.size)
            parameter.grad = view

    def settle(self, found: Gradients) -> None:
        """Puts the places of views into gradients to be pushed, in place of the views' addresses.

        Called before they are pushed: views that the push might overwrite are left first.
        """
        if self._leaves:
            self.leave()
        if self._mapping is None:
            return
        in_place: list[tuple[int, int]] = []
        is_safe = True
        for index, reference in list(self._memory.items()):
            at = _position(found.indices, index)
            is_view = at >= 0 and found.pointers[at] == self._address(index)
            if is_view and reference() is not None:
                in_place.append((at, self._addresses[index]))
                self._replaced.pop(index, None)
            elif self._parameters[index].grad is not None:
                is_safe = is_safe and reference() is None
                self._note_replaced(index)
            elif reference() is None:
                del self._memory[index]
        # A view that is not its parameter's gradient may be kept by the script, or be another
        # parameter's gradient, whole or in part.
        if is_safe:
            for at, address in in_place:
                found.pointers[at] = address
        else:
            self._part_with_held()

    def leave(self) -> None:
        """Makes all views this process's own memory, at their addresses: what is written there
        is not in the area any more, and the area's changes are not there.

        ResourceExhaustedError: there is no memory for that, and the views are as before.
        """
        with self._lock:
            if os.getpid() != self._pid:
                return
            # A signal may end this call anywhere: settle() calls it again then.
            self._leaves = True
            if self._mapping is None:
                self._memory, self._leaves = {}, False
                return
            held = [index for index in self._memory if self._is_held(index)]
            if held:
                addresses = array.array("Q", map(self._address, held))
                sizes = array.array("Q", (self._places[index].size for index in held))
                self._mapping.keep(addresses, sizes)
            self._mapping = None
            self._memory, self._leaves = {}, False

    def end(self) -> None:
        """Makes no more views; those that exist keep their values."""
        if not _exits:
            # Without memory for copies views stay in the area, which has no other user any more.
            with contextlib.suppress(errors.ResourceExhaustedError):
                self.leave()
        self._places = {}

    @property
    def size(self) -> int:
        """Bytes of the gradients that are views now."""
        return sum(self._places[i].size for i in list(self._memory) if self._is_gradient(i))

    def _map(self) -> bool:
        """Maps the gradient area, whose pages it waits for; makes no views any more where that is
        impossible."""
        try:
            self._mapping = _Mapping(*self._session.map_gradient_views())
            self._addresses = self._session.gradient_addresses()
        except (errors.UnimplementedError, errors.ResourceExhaustedError) as error:
            logging.getLogger("optstate").warning("gradients are copied: %s", error)
            self._mapping, self._places = None, {}
        return self._mapping is not None

    def _view(self, index: int, place: _Place, address: int) -> torch.Tensor:
        memory = place.buffer.from_address(address)
        memory.mapping = self._mapping
        self._memory[index] = weakref.ref(memory)
        storage = torch.frombuffer(memory, dtype=place.dtype).untyped_storage()
        return torch.empty(0, dtype=place.dtype, device="cpu").set_(storage, 0, place.shape)

    def _address(self, index: int) -> int:
        assert self._mapping is not None
        return self._addresses[index] + self._mapping.distance

    def _is_held(self, index: int) -> bool:
        """Returns whether anything uses the memory of a view in the present mapping."""
        reference = self._memory.get(index)
        return reference is not None and reference() is not None

    def _is_gradient(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        return gradient is not None and gradient.data_ptr() == self._address(index)

    def _part_with_held(self) -> None:
        """Leaves all views, and makes no more of gradients that the script keeps."""
        kept = [i for i in self._memory if self._is_held(i) and not self._is_gradient(i)]
        self.leave()
        for index in kept:
            self._places.pop(index, None)

    def _note_replaced(self, index: int) -> None:
        """Notes that a view was made for nothing: something else is the gradient."""
        if self._is_held(index):
            return
        del self._memory[index]
        self._replaced[index] = self._replaced.get(index, 0) + 1
        if self._replaced[index] >= _REPLACED_MAX:
            del self._places[index]


def _is_new(gradient: torch.Tensor, place: _Place) -> bool:
    """Returns whether backward() has just made the gradient, nothing else has its memory, and
    the job takes it as it is.

    A gradient to which backward() has added has another version: a script may know it, as a part
    of a buffer that it reduces.
    """
    return (
        gradient._version == 0
        and type(gradient) is torch.Tensor
        and gradient.dtype is place.dtype
        and gradient.layout is torch.strided
        and is_cpu(gradient)
        and not gradient.requires_grad
        and gradient.shape == place.shape
        and gradient.is_contiguous()
        and not gradient.is_neg()
        and _holders(gradient.untyped_storage()) <= _most_holders()
    )


def _position(indices: array.array, index: int) -> int:
    """Returns where an ascending array has the value, or -1."""
    if index < len(indices) and indices[index] == index:
        return index
    at = bisect.bisect_left(indices, index)
    return at if at < len(indices) and indices[at] == index else -1


def _holders(storage: torch.UntypedStorage) -> int:
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else count(storage._cdata)


@functools.cache
def _most_holders() -> int:
    """Returns what _holders() says of a gradient that backward() has just made, and that nothing
    else uses; 0: this torch cannot tell."""
    counts: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        probe = torch.zeros(2, device="cpu", requires_grad=True)
        probe.register_post_accumulate_grad_hook(
            lambda each: counts.append(_holders(each.grad.untyped_storage()))
        )
        (probe * 2).sum().backward()
    return counts[0]


_living: weakref.WeakSet[GradientViews] = weakref.WeakSet()
# Non-empty when the interpreter exits: no code computes with gradients any more.
_exits: list[bool] = []


def _before_fork() -> None:
    """Leaves all views before a fork, so that a child does not write its parent's gradients."""
    for views in tuple(_living):
        try:
            views.leave()
        except errors.OptstateError as error:
            warn(f"a forked process will share its parent's gradients: {error}")


os.register_at_fork(before=_before_fork)
atexit.register(_exits.append, True)
