"""Parameters in the daemon's memory: views of a private mapping of the parameter file."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from optstate import _native, errors
from optstate._torch.tensors import is_cpu
from optstate._torch.warn import warn
from optstate.session import Session


class _Mapping:
    """Keeps mapped memory alive: every tensor in it holds this object, the last one frees it."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        free = _native.library().optstate_views_free
        weakref.finalize(self, free, handle).atexit = False
        self.addresses: set[int] = set()  # where tensors begin
        _mappings.add(self)


class ParameterViews:
    """A mapping of a session's parameters, in which tensors may have their memory.

    The mapping shows what the engine writes. Writes of this process go to private copies of
    pages, which written() finds.

    Threads: one at a time, like the optimizer; any thread may use the tensors.
    """

    def __init__(self, session: Session) -> None:
        """Maps the parameters; errors.UnimplementedError says why where that is impossible."""
        self._library = _native.library()
        self._session = session
        self._handle = session.map_views()
        self._pid = os.getpid()
        self._mapping = _Mapping(self._handle)
        self.is_kept = False
        self.is_private = False  # whether every page is a private copy of this process
        _living.add(self)

    def tensor(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor over a parameter that has elements; its storage is only that."""
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        _native.check(
            self._library.optstate_views_parameter(
                self._handle, index, ctypes.byref(address), ctypes.byref(size)
            )
        )
        buffer: Any = (ctypes.c_char * size.value).from_address(address.value or 0)
        buffer.mapping = self._mapping
        self._mapping.addresses.add(address.value or 0)
        flat = torch.frombuffer(buffer, dtype=dtype)
        # A view of `flat` would hold the storage twice, so a new tensor takes the storage.
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            flat.untyped_storage(), 0, tuple(shape)
        )

    def written(self) -> list[int]:
        """Returns parameters of which this process has other values than the daemon. Drops
        the private copies of all other pages."""
        self.is_private = False
        return self._session.find_written(self._handle)

    def release(self) -> None:
        """Drops what this process has written: the views show the daemon's values again."""
        self.is_private = False
        _native.check(self._library.optstate_views_release(self._handle))

    def keep(self) -> None:
        """Makes all values this process's own: the views no longer show the daemon's writes."""
        if os.getpid() == self._pid and not self.is_kept:
            _native.check(self._library.optstate_views_keep(self._handle))
            self.is_private = True

    def leave(self) -> None:
        """Does what end() does, and moves the memory out of the daemon's file: no page of that is
        kept for the views. Follows keep(). After an error the values are as before."""
        if os.getpid() == self._pid and not self.is_kept:
            _native.check(self._library.optstate_views_leave(self._handle))
            self.is_private = self.is_kept = True

    def end(self) -> None:
        """Makes the values stay as they are when the session closes. DataLossError: some are
        lost, and the others stay."""
        if _exits:
            return
        try:
            self.keep()
        except errors.DataLossError:
            self.is_kept = True
            raise
        self.is_kept = True


def holders_of_storage(tensor: torch.Tensor) -> int:
    """Number of tensors that share the tensor's memory, with itself; 0: this torch cannot tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    # One use is the storage object made for this call.
    return 0 if count is None else count(tensor.untyped_storage()._cdata) - 1


class PrivateFiles:
    """This process's private mappings of files, as of the first call of hold()."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] | None = None

    def hold(self, address: int) -> bool:
        if self._ranges is None:
            self._ranges = []
            with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
                for line in maps:
                    place, access, _, _, inode = line.split(None, 5)[:5]
                    if access.endswith("p") and inode != "0":
                        begin, end = place.split("-")
                        self._ranges.append((int(begin, 16), int(end, 16)))
        return any(begin <= address < end for begin, end in self._ranges)


def may_be_view(tensor: torch.Tensor, files: PrivateFiles) -> bool:
    """Returns whether a view may replace the tensor's memory, because nothing else uses it."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not is_cpu(tensor):
        return False
    if tensor.numel() == 0 or not tensor.is_contiguous() or tensor.is_neg():
        return False
    if tensor.is_inference() or tensor._base is not None or tensor.is_shared():
        return False
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    if holders_of_storage(tensor) != 1:
        return False
    # Memory that torch did not allocate may be numpy's, whose references cannot be counted. A
    # mapped file from which a model was loaded is safe, and so is a former view.
    return (
        tensor.untyped_storage().resizable()
        or any(tensor.data_ptr() in mapping.addresses for mapping in tuple(_mappings))
        or files.hold(tensor.data_ptr())
    )


_living: weakref.WeakSet[ParameterViews] = weakref.WeakSet()
_mappings: weakref.WeakSet[_Mapping] = weakref.WeakSet()
# Non-empty when the interpreter exits: no code computes with parameters any more.
_exits: list[bool] = []


def _before_fork() -> None:
    """Makes all views private before a fork, so that a child inherits copies and its parameters
    stay what they were. The parent drops the copies in its next step; all children before that
    step share one copy."""
    for views in tuple(_living):
        try:
            views.keep()
        except errors.DataLossError as error:
            warn(str(error))
        except errors.OptstateError as error:
            warn(f"a forked process will see its parent's next steps: {error}")


os.register_at_fork(before=_before_fork)
atexit.register(_exits.append, True)
