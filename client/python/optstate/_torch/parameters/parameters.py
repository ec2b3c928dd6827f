"""Keeps an optimizer's parameters and those of its session equal."""

from __future__ import annotations

import array
import itertools
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch

from optstate._torch.parameters.comparison import equals_host
from optstate._torch.parameters.digests import CopyDigests
from optstate._torch.parameters.group_order import GroupOrder
from optstate._torch.parameters.indirect import EarlyReads, IndirectCopies
from optstate._torch.parameters.memory import SharedMemoryLock, check_disjoint, lock_shared_memory
from optstate._torch.parameters.views import (
    ParameterViews,
    PrivateFiles,
    holders_of_storage,
    may_be_view,
)
from optstate._torch.parameters.written_since import WrittenSince
from optstate._torch.shards import has_part, is_dtensor, local_of
from optstate._torch.tensors import (
    DTYPES,
    bits_sum,
    compare_memory,
    dtype_of,
    increment_versions,
    is_contiguous,
    is_cpu,
    memory_view,
    parts_of,
    pointer_of,
    shape_of,
    version_of,
)
from optstate._torch.warn import warn
from optstate.session import Session
from optstate.session_spec import ParameterSpec


class Parameters:
    """Binds the parameters of an optimizer, in order, to those of a session.

    The client library writes contiguous tensors in host memory straight at their
    addresses; `copies` are all others (devices, other strides). A step costs a few
    attribute reads for each parameter, in parts that fit the cache, and allocates no
    tensors.

    Threads: one at a time, like the optimizer.

    Size: what has changed, what is read and what is adopted is asked of views, of copies
    and of other tensors, by one short method each.
    """

    def __init__(
        self,
        session: Session,
        param_groups: Sequence[dict],
        specs: Sequence[ParameterSpec],
        detect_changes: str,
        *,
        is_alone: bool,
    ) -> None:
        self._session = session
        self._digests = CopyDigests(session, detect_changes)
        self._warned = False
        self.groups = GroupOrder(param_groups, specs)
        self._parameters = [tensor for group in param_groups for tensor in group["params"]]
        self._index_of = {id(tensor): index for index, tensor in enumerate(self._parameters)}
        self._indices = range(len(self._parameters))
        self._parts = parts_of(len(self._parameters))
        self._specs = specs
        # Whether some are DTensors: then the memory is that of this rank's parts.
        self.has_parts = any(map(has_part, self._parameters))
        self._shapes = [values.shape for values in self.values]
        self._dtypes = [values.dtype for values in self.values]
        # The tensors as of remember(): while they exist, no other memory gets their
        # addresses.
        self._remembered: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._places: list[tuple[list[int], list[bool]]] = []
        # Locks of shared memory into which parameters were moved since they were attached.
        self._locks: list[SharedMemoryLock] = []
        # The daemon's addresses and sizes, filled when first needed.
        self._areas: list[tuple[int, int]] = []
        # Parameters that the library can write itself ("direct"), and the others.
        self._pointers: list[int | None] = []
        self._direct_indices = array.array("I")
        self._direct_pointers = array.array("Q")
        self._indirect: list[int] = []
        self.copies = IndirectCopies(session, self._parameters, self.daemon_values, is_alone)
        # Views: the address of each view that was made, and the views that still exist.
        self._views: ParameterViews | None = None
        self._view_pointers: dict[int, int] = {}
        self._view_tensors: dict[int, torch.Tensor] = {}
        self._maps_again = False
        self._in_view: set[int] = set()
        # Writes of the script while it is unknown whether a step is over.
        self.written_since = WrittenSince(self)
        # Sums of views without a gradient here, taken before a step of several ranks.
        self._idle_sums: dict[int, Any] = {}
        self.remember()

    @property
    def count(self) -> int:
        return len(self._parameters)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The parameters, in the job's order."""
        return self._parameters

    @property
    def values(self) -> Sequence[torch.Tensor]:
        """The memory of the parameters now, in the job's order: the parameters, or the parts of
        DTensors that this rank holds."""
        if not self.has_parts:
            return self._parameters
        return list(map(local_of, self._parameters))

    def versions(self) -> list[int]:
        """Returns numbers that change with each write that leaves a trace."""
        return self._with_dtensors(list(map(version_of, self.values)))

    def _with_dtensors(self, versions: list[int]) -> list[int]:
        """Adds to the parts' versions those of DTensors, which count the writes through them."""
        if self.has_parts:
            for index, parameter in enumerate(self._parameters):
                if is_dtensor(parameter):
                    versions[index] += parameter._version
        return versions

    def different(self) -> list[int]:
        """Returns the parameters whose bits differ from the daemon's now."""
        self.locate()
        equal = self._equal_to_daemon(self._indices)
        return [index for index in self._indices if index not in equal]

    def names_by_id(self) -> dict[int, str]:
        return {id(each): spec.name for each, spec in zip(self._parameters, self._specs)}

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Returns a parameter's index in the job; None for other tensors."""
        return self._index_of.get(id(tensor))

    def name_of(self, index: int) -> str:
        return self._specs[index].name

    def check_tensors(self) -> None:
        """Raises TypeError when a parameter has another shape or dtype than when attached."""
        values = self.values
        for part in self._parts:
            parameters = values[part]
            if not (
                all(map(operator.eq, map(shape_of, parameters), self._shapes[part]))
                and all(map(operator.is_, map(dtype_of, parameters), self._dtypes[part]))
            ):
                self._raise_changed()

    def _raise_changed(self) -> None:
        for index, spec in enumerate(self._specs):
            parameter = self.values[index]
            now = (parameter.dtype, tuple(parameter.shape))
            attached = (self._dtypes[index], tuple(self._shapes[index]))
            if now != attached:
                raise TypeError(
                    f'parameter "{spec.name}" is now {now[0]} {list(now[1])}, but the job'
                    f" has {attached[0]} {list(attached[1])}: change the model before the"
                    " optimizer is constructed, for a job of another name"
                )

    # Methods that read parameters from the daemon.

    def remember(self) -> None:
        """Notes that the tensors, as they are now, hold the daemon's values."""
        self._remembered = [values.detach() for values in self.values]
        self._versions, self._places = self._versions_and_places()
        self.locate()

    def _versions_and_places(self) -> tuple[list[int], list[tuple[list[int], list[bool]]]]:
        """Returns all versions, and for each part the addresses of its tensors and whether
        these are contiguous."""
        versions: list[int] = []
        places: list[tuple[list[int], list[bool]]] = []
        values = self.values
        for part in self._parts:
            tensors = values[part]
            versions += map(version_of, tensors)
            pointers = list(map(pointer_of, tensors))
            places.append((pointers, list(map(is_contiguous, tensors))))
        return self._with_dtensors(versions), places

    def locate(self) -> None:
        """Finds where read() is to write; called before tensors that were moved are read.

        TypeError when a tensor has no room for what is read.
        """
        self.check_tensors()
        self._forget_left_views()
        direct, indirect = [], []
        self._pointers = []
        self._in_view = set()
        for index, parameter in enumerate(self.values):
            by_address = is_cpu(parameter) and parameter.is_contiguous() and not parameter.is_neg()
            pointer = parameter.data_ptr() if by_address else None
            if pointer is not None and self._view_pointers.get(index) == pointer:
                self._in_view.add(index)  # the values are there without a copy
            else:
                (direct if by_address else indirect).append(index)
            self._pointers.append(pointer)
        self._direct_indices = array.array("I", direct)
        self._direct_pointers = array.array("Q", map(self._pointers.__getitem__, direct))
        self._indirect = indirect

    def changed(self, *, by_content: bool = True, warns: bool = True) -> list[int]:
        """Returns parameters that were written since :meth:`remember` and now differ from
        the daemon's; until it is called, every call returns the same.

        by_content: includes copied parameters that were written without a trace; warns: of those.

        ValueError when parameters share memory now, RuntimeError when they have moved into
        memory that another process's optimizer updates.
        """
        versions, places = self._versions_and_places()
        in_view = self._written_in_view()
        in_copies = self._written_in_copies(places) if by_content else set()
        if not (in_view or in_copies or versions != self._versions or places != self._places):
            return []
        self._check_places(places)
        differing = self._differing(versions, places, in_view, in_copies)
        self._warn_of_traceless(in_copies.intersection(differing) if warns else set(), versions)
        if differing:
            self.locate()
            return differing
        moved = self._moved(places)
        self.remember()
        self._note_equal(moved)
        return differing

    def _note_equal(self, indices: set[int]) -> None:
        """Notes the present content of copied parameters that hold the daemon's values."""
        direct = array.array("I", filter(indices.__contains__, self._direct_indices))
        indirect = filter(indices.__contains__, self._indirect)
        self._digests.note_equal(direct, indirect, self.values)

    def _moved(self, places: list[Any]) -> set[int]:
        """Returns all parameters of parts in which some tensor has moved since remember()."""
        parts = zip(self._parts, places, self._places)
        return {i for part, now, was in parts if now != was for i in self._indices[part]}

    def _check_places(self, places: list[tuple[list[int], list[bool]]]) -> None:
        if places != self._places:
            names = [spec.name for spec in self._specs]
            check_disjoint(self._parameters, names)
            self._locks = lock_shared_memory(self.values, names)

    def unlock(self) -> None:
        """Leaves shared memory to other processes. Idempotent."""
        self._locks = []

    def written(self) -> list[int]:
        """Returns what :meth:`changed` returns, for a caller that only inspects parameters."""
        versions, places = self._versions_and_places()
        return self._differing(
            versions, places, self._written_in_view(), self._written_in_copies(places)
        )

    def _written_in_view(self) -> list[int]:
        return self._views.written() if self._views is not None else []

    def _written_in_copies(self, places: list[Any]) -> set[int]:
        """Returns parameters that hold other values than were copied there. Those that were moved
        are compared with the daemon's values anyway, and their former memory may be gone."""
        direct, indirect = self._direct_indices, self._indirect
        if places != self._places:
            moved = self._moved(places)
            direct, _ = self.direct(but=moved)
            indirect = [index for index in indirect if index not in moved]
        pointers = list(itertools.chain.from_iterable(pointers for pointers, _ in places))
        present = array.array("Q", map(pointers.__getitem__, direct))
        return self._digests.changed((direct, present), indirect, self.values)

    def _warn_of_traceless(self, in_copies: set[int], versions: list[int]) -> None:
        found = sorted(index for index in in_copies if versions[index] == self._versions[index])
        if not found or self._warned:
            return
        self._warned = True
        others = f" and {len(found) - 1} others were" if len(found) > 1 else " was"
        warn(
            f'parameter "{self.name_of(found[0])}"{others} changed without a trace (through .data,'
            " numpy, a collective or another program), and the job gets the new values, as of any"
            " other change in place. It was found by its content, which is looked at before each"
            ' step: see detect_changes="exact"'
        )

    def _differing(
        self,
        versions: list[int],
        places: list[Any],
        in_view: list[int],
        in_copies: set[int],
    ) -> list[int]:
        touched = {index for index in self._indices if versions[index] != self._versions[index]}
        touched |= self._moved(places)
        # The kernel reports which views were written, with a trace or without. A parameter that
        # has left its view is compared like all others.
        differing = {index for index in in_view if self._is_in_view(index)}
        touched |= in_copies
        touched.difference_update([i for i in touched & self._in_view if self._is_in_view(i)])
        differing.update(index for index in touched if not self._equals_daemon(index))
        return sorted(differing)

    def _is_in_view(self, index: int) -> bool:
        return self._parameters[index].data_ptr() == self._view_pointers.get(index)

    def differing(self) -> list[int]:
        """Returns parameters that differ from the daemon's, even if written without a trace.

        Raises the errors of :meth:`changed`.
        """
        self.check_tensors()
        self._check_places(self._versions_and_places()[1])
        return [index for index in self._indices if not self._equals_daemon(index)]

    def daemon_values(self, index: int) -> torch.Tensor:
        """Returns a parameter as the job has it, in the session's memory."""
        address, _ = self._session.parameter(index)
        spec = self._specs[index]
        return memory_view(address, spec.numel, DTYPES[spec.dtype]).view(self._shapes[index])

    def _equals_daemon(self, index: int) -> bool:
        return equals_host(local_of(self._parameters[index]), self.daemon_values(index))

    def direct(self, *, but: Collection[int] = ()) -> tuple[array.array, array.array]:
        """Returns indices and addresses of the parameters that the client library can write
        itself."""
        if not but:
            return self._direct_indices, self._direct_pointers
        is_wanted = bytearray(b"\1") * len(self._parameters)
        for index in but:
            is_wanted[index] = 0
        wanted = list(map(is_wanted.__getitem__, self._direct_indices))
        return (
            array.array("I", itertools.compress(self._direct_indices, wanted)),
            array.array("Q", itertools.compress(self._direct_pointers, wanted)),
        )

    def early(self, *, but: Collection[int]) -> EarlyReads:
        """Returns what is read while a step is being applied; read() is called after it."""
        return self.copies.early(self.direct(but=but), self._indirect, but)

    @torch.no_grad()
    def read(self, *, without_gradient: Sequence[int] = (), but_direct: bool = False) -> None:
        """Overwrites parameters in place with the daemon's.

        Tensors must be where the last remember(), changed() or locate() found them.
        without_gradient: parameters that are written only if they differ, because another
        rank had a gradient. So a graph that torch would not break is not broken.
        but_direct: the other direct parameters have the daemon's values already.
        """
        if self._views is not None:
            # Another thread may have written during the step, or forked: the pages written would
            # keep the former values of all parameters on them.
            self._views.release()
        equal = self._equal_to_daemon(without_gradient) if without_gradient else set()
        if self._idle_sums:
            sums = self._idle_sums.items()
            equal -= {i for i, was in sums if bits_sum(self._parameters[i]) != was}
            self._idle_sums = {}
        if not but_direct:
            self._read_direct(equal)
        elif len(equal) < len(without_gradient):
            self._read_direct(set(self._indices) - (set(without_gradient) - equal))
        indirect = [index for index in self._indirect if index not in equal]
        self.copies.read(indirect)
        self._digests.note_read(indirect, self.values if indirect else ())
        versions: list[int] = []
        for part in self._parts:
            parameters = self._parameters[part]
            written = parameters
            if equal:
                written = [self._parameters[i] for i in self._indices[part] if i not in equal]
            increment_versions(written)
            versions += map(version_of, parameters)
        self._versions = versions if not self.has_parts else self.versions()
        if self._maps_again:
            self._maps_again = False
            self.map_views()

    def note_idle(self, indices: Sequence[int]) -> None:
        """Takes sums, before a step, of views whose gradients only other ranks may have."""
        self._idle_sums = {
            index: bits_sum(self._parameters[index]) for index in indices if index in self._in_view
        }

    # Methods for views.

    def map_views(self) -> dict[int, torch.Tensor]:
        """Makes tensors views of the daemon's values, where nothing else uses their memory.

        Returns the former tensors by index, with their memory and values.
        errors.UnimplementedError: views are impossible; the text says why.
        """
        self._views = ParameterViews(self._session)
        left = self._adopt()
        self.remember()
        return left

    def _adopt(self) -> dict[int, torch.Tensor]:
        assert self._views is not None
        self._remembered = []  # these tensors would count as other users of the memory
        left = {}
        files = PrivateFiles()
        for index, parameter in enumerate(self._parameters):
            if index in self._in_view or not may_be_view(parameter, files):
                continue
            view = self._views.tensor(index, parameter.shape, parameter.dtype)
            left[index] = parameter.detach()
            parameter.data = view
            self._view_pointers[index] = view.data_ptr()
            self._view_tensors[index] = view
        return left

    def _forget_left_views(self) -> None:
        """Drops views of parameters that the script has moved. If something else still holds such
        a view, its values must stay: then all views become the process's own memory, until the
        daemon's values are read the next time."""
        for index, view in list(self._view_tensors.items()):
            if self._is_in_view(index):
                continue
            is_remembered = index < len(self._remembered) and (
                self._remembered[index].data_ptr() == view.data_ptr()
            )
            if holders_of_storage(view) != 1 + is_remembered:
                self._leave_views()
                return
            del self._view_tensors[index], self._view_pointers[index]

    def _leave_views(self) -> None:
        assert self._views is not None
        in_view = [i for i in self._view_pointers if self._is_in_view(i)]
        written = [self._parameters[i] for i in self._views.written() if self._is_in_view(i)]
        self._views.end()
        self._views, self._maps_again = None, True
        self._view_pointers, self._view_tensors = {}, {}
        increment_versions(written)  # their versions mark them as changed from now on
        self._digests.note_equal(array.array("I", in_view), (), self._parameters)

    def settle(self) -> None:
        """Notes after a load that the daemon has what the tensors have."""
        self.locate()
        if self._views is not None:
            self._views.release()
            self._adopt()
        self.remember()
        self._digests.note_equal(self._direct_indices, self._indirect, self.values)

    def end(self) -> None:
        """Ends views and copies before the session closes. The next attachment may make new
        views."""
        self.copies.close()
        self._view_tensors, self._remembered = {}, []
        if self._views is not None:
            self._views.end()

    def bytes_of_views_and_copies(self) -> tuple[int, int]:
        """Returns the bytes of parameters that are views now, and of the others."""
        self.locate()
        sizes = [each.numel() * each.element_size() for each in self.values]
        has_pages = self._views is not None and self._views.is_private
        in_view = 0 if has_pages else sum(map(sizes.__getitem__, self._in_view))
        return in_view, sum(sizes) - in_view

    @property
    def views(self) -> ParameterViews | None:
        return self._views

    def _read_direct(self, but: Collection[int]) -> None:
        indices, pointers = self.direct(but=but)
        if indices:
            self._session.read_parameters(indices, pointers)

    def _equal_to_daemon(self, indices: Sequence[int]) -> set[int]:
        """Returns those of the given parameters that have the daemon's bits."""
        if not self._areas:
            self._areas = list(map(self._session.parameter, self._indices))
        direct = [index for index in indices if self._pointers[index] is not None]
        pointers = [self._pointers[index] for index in direct]
        areas = [self._areas[index] for index in direct]
        indirect = [index for index in indices if self._pointers[index] is None]
        equal = self.copies.equal(indirect, self._equals_daemon)
        if direct:
            self._session.parameter(direct[0])  # raises if a signal handler closed the session
            differs = list(map(compare_memory, pointers, *zip(*areas)))
            equal.update(index for index, differ in zip(direct, differs) if not differ)
        return equal
