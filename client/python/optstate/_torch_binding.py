"""Moves gradients and parameters between torch tensors and a session."""

from __future__ import annotations

import array
import ctypes
import itertools
import operator
import weakref
from collections.abc import Sequence

import torch

from optstate import _native, errors
from optstate._torch_layout import DTYPE_CODES
from optstate.session import ParameterSpec, Piece, Session

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
# A tensor without elements has no address, and the C API takes no null.
_NOTHING = ctypes.c_uint64()
_SOMEWHERE = ctypes.addressof(_NOTHING)
# Of one call that loads or fetches many arrays.
_BATCH_ARRAYS = 4096
_BATCH_BYTES = 64 << 20

# With 100,000 parameters the interpreter is most of a step: map() over these runs no
# bytecode for each tensor, and keeps no shapes that would set off the garbage collector.
_dtype_of = operator.attrgetter("dtype")
_gradient_of = operator.attrgetter("grad")
_is_cpu = operator.attrgetter("is_cpu")
_layout_of = operator.attrgetter("layout")
_shape_of = operator.attrgetter("shape")
_version_of = operator.attrgetter("_version")
_pointer_of = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous
_is_negated = torch.Tensor.is_neg  # its memory has minus its values
# Tensors that are looked at before the next ones: few enough for the core's cache to
# have them still when another of their attributes is read.
_PART_TENSORS = 256


def memory_view(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over memory that the caller keeps alive."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    buffer = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=numel)


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in contiguous host memory; its own where they are there."""
    return tensor.detach().cpu().resolve_neg().contiguous()


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    bits = torch.int32 if one.dtype.itemsize == 4 else torch.int16
    return torch.equal(_in_memory(one).view(bits), _in_memory(other).view(bits))


def _increment_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Tells autograd that the tensors changed, as an in-place operation does."""
    bump = torch.autograd.graph.increment_version
    try:
        bump(tensors)
    except (TypeError, AttributeError):  # torch < 2.5 takes one tensor
        for tensor in tensors:
            bump(tensor)


class _Gradients:
    """Gradients to be pushed: where those in contiguous host memory are, and the others."""

    def __init__(self) -> None:
        self.indices = array.array("I")
        self.pointers = array.array("Q")
        self.others: dict[int, torch.Tensor] = {}
        self.owners: list[torch.Tensor] = []  # a signal's handler may drop the trainer's
        self.takes_back = False  # what was pushed early has changed since

    def add(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        self.owners += gradients
        direct = list(map(operator.and_, map(_is_cpu, gradients), map(_is_contiguous, gradients)))
        negated = list(map(_is_negated, gradients))
        if any(negated):
            direct = list(map(operator.gt, direct, negated))
        if not all(direct):
            self.others.update(
                (index, gradient)
                for index, gradient, is_direct in zip(indices, gradients, direct)
                if not is_direct
            )
            indices = list(itertools.compress(indices, direct))
            gradients = list(itertools.compress(gradients, direct))
        self.indices.extend(indices)
        self.pointers.extend(map(_pointer_of, gradients))


class TensorBinding:
    """Binds the parameters of an optimizer, in order, to those of a session.

    Contiguous tensors in host memory are copied by the client library straight
    from and to their addresses; all others (CUDA, other strides) through torch.
    A step costs a few attribute reads for each parameter, part by part of them, and
    no allocation of tensors.

    Threads: as the optimizer, one at a time.
    """

    def __init__(
        self,
        session: Session,
        parameters: Sequence[torch.Tensor],
        specs: Sequence[ParameterSpec],
        *,
        can_take_back: bool = True,
    ) -> None:
        """can_take_back: what was pushed in a step's first micro-step is not in a
        sum of several ranks yet."""
        self._session = session
        self._can_take_back = can_take_back
        self._parameters = list(parameters)
        self._indices = range(len(self._parameters))
        self._parts = [
            slice(begin, begin + _PART_TENSORS) for begin in self._indices[::_PART_TENSORS]
        ]
        self._specs = specs
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._gradient_dtypes = [_DTYPES[spec.gradient_dtype] for spec in specs]
        self._owned: dict[int, Piece] = {piece.parameter: piece for piece in session.pieces}
        # Gradients that were pushed as they came: the tensor (kept, so that no other one
        # gets its address), where its values were, and of which version.
        self._pushed: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._index_of = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._versions: list[int] = []
        self._places: list[tuple[list[int], list[bool]]] = []
        # Of the parameters that the library can write itself, and the others.
        self._direct_indices = array.array("I")
        self._direct_pointers = array.array("Q")
        self._indirect: list[int] = []
        self.drop_loads()
        self.remember()

    def check_parameters(self, param_groups: Sequence[dict]) -> None:
        """Raises when tensors are not those (or not such) as were attached."""
        position = 0
        for group_index, group in enumerate(param_groups):
            tensors = group["params"]
            bound = self._parameters[position : position + len(tensors)]
            if len(bound) != len(tensors) or not all(map(operator.is_, bound, tensors)):
                raise RuntimeError(
                    f"param_groups[{group_index}]['params'] is not what was attached:"
                    " use add_param_group to add parameters"
                )
            position += len(tensors)
        if position != len(self._parameters):
            raise RuntimeError("param_groups lost parameters since they were attached")
        self.check_tensors()

    def check_tensors(self) -> None:
        """TypeError when one has another shape or dtype than was attached."""
        for part in self._parts:
            parameters = self._parameters[part]
            if not (
                all(map(operator.eq, map(_shape_of, parameters), self._shapes[part]))
                and all(map(operator.is_, map(_dtype_of, parameters), self._dtypes[part]))
            ):
                self._raise_changed()

    def _raise_changed(self) -> None:
        for index, spec in enumerate(self._specs):
            parameter = self._parameters[index]
            now = (parameter.dtype, tuple(parameter.shape))
            attached = (self._dtypes[index], tuple(self._shapes[index]))
            if now != attached:
                raise TypeError(
                    f'parameter "{spec.name}" is now {now[0]} {list(now[1])}, but the job'
                    f" has {attached[0]} {list(attached[1])}"
                )

    # Parameters out of the daemon.

    def remember(self) -> None:
        """Takes the tensors as they are for the daemon's values."""
        self._versions, self._places = self._versions_and_places()
        self.locate()

    def _versions_and_places(self) -> tuple[list[int], list[tuple[list[int], list[bool]]]]:
        """Of each part, where its tensors are and whether they are contiguous there."""
        versions: list[int] = []
        places: list[tuple[list[int], list[bool]]] = []
        for part in self._parts:
            parameters = self._parameters[part]
            versions += map(_version_of, parameters)
            pointers = list(map(_pointer_of, parameters))
            places.append((pointers, list(map(_is_contiguous, parameters))))
        return versions, places

    def locate(self) -> None:
        """Looks where read() is to write, before tensors that were moved are read."""
        direct, indirect = [], []
        for index, parameter in enumerate(self._parameters):
            by_address = parameter.is_cpu and parameter.is_contiguous() and not parameter.is_neg()
            (direct if by_address else indirect).append(index)
        self._direct_indices = array.array("I", direct)
        self._direct_pointers = array.array(
            "Q", [self._parameters[index].data_ptr() for index in direct]
        )
        self._indirect = indirect

    def changed(self) -> list[int]:
        """Parameters that were written since :meth:`remember` and now differ from
        the daemon's; the same again until it is called."""
        versions, places = self._versions_and_places()
        if versions == self._versions and places == self._places:
            return []
        touched = {index for index in self._indices if versions[index] != self._versions[index]}
        for part, now, before in zip(self._parts, places, self._places):
            if now != before:
                touched.update(self._indices[part])
        differing = [index for index in sorted(touched) if not self._equals_daemon(index)]
        if differing:
            self.locate()
        else:
            self.remember()
        return differing

    def _daemon_values(self, index: int) -> torch.Tensor:
        address, _ = self._session.parameter(index)
        spec = self._specs[index]
        return memory_view(address, spec.numel, _DTYPES[spec.dtype]).view(self._shapes[index])

    def _equals_daemon(self, index: int) -> bool:
        return _equal_bits(self._parameters[index], self._daemon_values(index))

    @property
    def direct(self) -> tuple[array.array, array.array]:
        """Parameters that the client library can write itself, and where they are."""
        return self._direct_indices, self._direct_pointers

    @torch.no_grad()
    def read(self, *, but_direct: bool = False) -> None:
        """Overwrites every parameter in place with the daemon's.

        Tensors are where the last remember(), changed() or locate() found them.
        but_direct: the direct ones have the daemon's values.
        """
        if self._direct_indices and not but_direct:
            self._session.read_parameters(*self.direct)
        for index in self._indirect:
            self._parameters[index].copy_(self._daemon_values(index))
        versions: list[int] = []
        for part in self._parts:
            parameters = self._parameters[part]
            _increment_versions(parameters)
            versions += map(_version_of, parameters)
        self._versions = versions

    # Gradients into the daemon.

    def gather(self, *, anew: bool = False) -> _Gradients:
        """All gradients there are, for push(). Raises when one is of a kind that
        cannot be pushed. anew: what push_early() pushed has changed since in a way
        that leaves no trace.
        """
        found = _Gradients()
        found.takes_back = bool(self._pushed) and (
            anew or not all(map(self._is_pushed, self._pushed))
        )
        pushed = () if found.takes_back else self._pushed
        for part in self._parts:
            indices: Sequence[int] = self._indices[part]
            gradients = list(map(_gradient_of, self._parameters[part]))
            if pushed or any(map(operator.is_, gradients, itertools.repeat(None))):
                new = [
                    (index, gradient)
                    for index, gradient in zip(indices, gradients)
                    if gradient is not None and index not in pushed
                ]
                indices = [index for index, _ in new]
                gradients = [gradient for _, gradient in new]
            self._check_gradients(indices, gradients)
            found.add(indices, gradients)
        return found

    def push(self, step: int, micro_step: int, found: _Gradients) -> None:
        """Pushes the owned pieces of what was gathered."""
        if found.takes_back:
            self._take_back(step, micro_step)
        self._push_found(step, micro_step, found)

    def push_early(self, step: int, micro_step: int, index: int) -> None:
        """Pushes the gradient of one parameter that backward() has just made."""
        gradient = self._parameters[index].grad
        if gradient is None:
            return
        if index in self._pushed:
            return  # it adds up; push() notices
        self._check_gradients([index], [gradient])
        found = _Gradients()
        found.add([index], [gradient])
        self._push_found(step, micro_step, found)
        if not self._pushed:  # the step's first
            _push_early.add(self)
        self._pushed[index] = (gradient, gradient.data_ptr(), gradient._version)

    def forget_pushed(self) -> None:
        """What push_early() pushed is of a former step, or dropped."""
        self._pushed.clear()

    def _is_pushed(self, index: int) -> bool:
        """Whether what was pushed early is what there is now."""
        gradient, pointer, version = self._pushed[index]
        return (
            self._parameters[index].grad is gradient
            and gradient.data_ptr() == pointer
            and gradient._version == version
        )

    def _expect_copy(self, parameter: torch.Tensor, copy: torch.Tensor) -> None:
        index = self._index_of.get(id(parameter), -1)
        now = parameter.grad
        if index not in self._pushed or now is None:
            return
        gradient, pointer, version = self._pushed[index]
        if gradient.data_ptr() != pointer or gradient._version != version:
            return  # others have changed it: push() notices
        # It may be of another gradient, that came in the place of this one.
        if not _equal_bits(copy, gradient):
            return
        if now.data_ptr() == copy.data_ptr():  # a view of the bucket
            self._pushed[index] = (now, now.data_ptr(), now._version)
        elif now is gradient:
            self._pushed[index] = (gradient, pointer, version + 1)

    def _take_back(self, step: int, micro_step: int) -> None:
        if micro_step > 0 or not self._can_take_back:
            raise RuntimeError(
                "gradients changed after backward() had pushed them (overlap=True), and are, or"
                " earlier micro-steps are, in the daemon's sum: call accumulate_step() after each"
                " backward(), and now abort_step() on every rank, and take the step again"
            )
        self._session.abort(step)
        self.forget_pushed()

    def _check_gradients(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        dtypes = map(self._gradient_dtypes.__getitem__, indices)
        shapes = map(self._shapes.__getitem__, indices)
        if (
            all(map(operator.is_, map(_layout_of, gradients), itertools.repeat(torch.strided)))
            and all(map(operator.is_, map(_dtype_of, gradients), dtypes))
            and all(map(operator.eq, map(_shape_of, gradients), shapes))
        ):
            return
        for index, gradient in zip(indices, gradients):
            if (
                gradient.layout is not torch.strided
                or gradient.dtype is not self._gradient_dtypes[index]
                or gradient.shape != self._shapes[index]
            ):
                self._raise_gradient(index, gradient)

    def _raise_gradient(self, index: int, gradient: torch.Tensor) -> None:
        name = self._specs[index].name
        if gradient.layout is not torch.strided:
            raise errors.UnimplementedError(
                f'optstate does not support sparse gradients (parameter "{name}"): torch.optim\'s'
                " SGD, Adagrad and SparseAdam do"
            )
        if gradient.is_complex():
            raise RuntimeError(f'optstate does not support complex gradients (parameter "{name}")')
        raise TypeError(
            f'the gradient of parameter "{name}" is {gradient.dtype} {list(gradient.shape)},'
            f" but the job has {self._gradient_dtypes[index]} {list(self._shapes[index])}"
        )

    def _push_found(self, step: int, micro_step: int, found: _Gradients) -> None:
        if found.indices:
            self._session.push_gradients(step, micro_step, found.indices, found.pointers)
        if found.others:
            self._push_copied(step, micro_step, found.others)

    def _push_copied(self, step: int, micro_step: int, gradients: dict[int, torch.Tensor]) -> None:
        if micro_step > 0:
            self._session.flush()
        for index, gradient in gradients.items():
            piece = self._owned.get(index)
            if piece is None:
                continue
            target = memory_view(piece.address, piece.numel, self._gradient_dtypes[index])
            source = gradient.detach().reshape(-1)
            target.copy_(source[piece.begin : piece.begin + piece.numel])
        for first, count in _runs([index for index in gradients if index in self._owned]):
            self._session.push(step, micro_step, first, count)

    # Whole arrays, for loading and fetching: many with one call, because with
    # 100,000 parameters the calls would be all of the time.

    def load_parameter(self, index: int) -> None:
        """As load_array(): a parameter's present values as its master."""
        self.load_array(_native.MASTER, index, self._parameters[index].detach())

    def load_array(self, state_array: int, index: int, values: torch.Tensor) -> None:
        """Sends a whole array, soon; dtypes that the daemon does not know as fp32.

        flush_loads() sends what is left. The values must not change before.
        """
        if values.dtype not in DTYPE_CODES:
            values = values.to(torch.float32)
        values = _in_memory(values)
        self._queue_load(
            state_array, index, DTYPE_CODES[values.dtype], values.data_ptr() or _SOMEWHERE, values
        )
        self._load_bytes += values.numel() * values.element_size()
        if self._load_bytes > _BATCH_BYTES:
            self.flush_loads()

    def load_step_count(self, index: int, step_count: int) -> None:
        """As load_array()."""
        box = ctypes.c_int64(step_count)
        self._queue_load(_native.STEP_COUNT, index, _native.FLOAT32, ctypes.addressof(box), box)

    def load_scalar(self, index: int, value: float) -> None:
        """As load_array(): the number per parameter that the optimizer keeps."""
        box = ctypes.c_double(value)
        self._queue_load(_native.SCALAR, index, _native.FLOAT32, ctypes.addressof(box), box)

    def _queue_load(
        self, state_array: int, index: int, dtype: int, address: int, owner: object
    ) -> None:
        if len(self._load_owners) >= _BATCH_ARRAYS:
            self.flush_loads()
        self._loads[0].append(state_array)
        self._loads[1].append(index)
        self._loads[2].append(dtype)
        self._loads[3].append(address)
        self._load_owners.append(owner)

    def drop_loads(self) -> None:
        """Forgets what a load that failed has not sent."""
        self._loads = tuple(array.array(code) for code in "iIiQ")
        self._load_owners: list[object] = []
        self._load_bytes = 0

    def flush_loads(self) -> None:
        """Sends all that load_array() and its like were given."""
        loads, owners = self._loads, self._load_owners
        self.drop_loads()
        if owners:
            self._session.load_many(*loads)

    def fetch_arrays(
        self, wanted: Sequence[tuple[int, int, tuple[int, ...]]]
    ) -> list[torch.Tensor]:
        """(state array, parameter, shape of it) in fp32, in host memory."""
        results = [torch.empty(shape, dtype=torch.float32, device="cpu") for _, _, shape in wanted]
        # In parts, between which Python looks for signals.
        for begin in range(0, len(wanted), _BATCH_ARRAYS):
            end = begin + _BATCH_ARRAYS
            self._session.fetch_many(
                array.array("i", [which for which, _, _ in wanted[begin:end]]),
                array.array("I", [index for _, index, _ in wanted[begin:end]]),
                array.array("Q", [each.data_ptr() or _SOMEWHERE for each in results[begin:end]]),
            )
        return results

    def fetch_step_counts(self, indices: Sequence[int]) -> list[int]:
        return self._fetch_numbers(_native.STEP_COUNT, "q", indices)

    def fetch_scalars(self, indices: Sequence[int]) -> list[float]:
        return self._fetch_numbers(_native.SCALAR, "d", indices)

    def fetch_gradient_norms(self) -> dict[str, float]:
        """By name; without parameters that had no gradient in the last step."""
        norms = self._fetch_numbers(_native.GRADIENT_NORM, "d", range(len(self._specs)))
        return {spec.name: norm for spec, norm in zip(self._specs, norms) if norm != -1}

    def _fetch_numbers(self, which: int, code: str, indices: Sequence[int]) -> list:
        numbers = array.array(code, bytes(8 * len(indices)))
        if not indices:
            return []
        address, _ = numbers.buffer_info()
        self._session.fetch_many(
            array.array("i", [which]) * len(indices),
            array.array("I", indices),
            array.array("Q", range(address, address + 8 * len(indices), 8)),
        )
        return numbers.tolist()

    def name(self, index: int) -> str:
        return self._specs[index].name


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """[3, 4, 5, 9] -> [(3, 3), (9, 1)]."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


# Bindings of which push_early() was called.
_push_early: weakref.WeakSet[TensorBinding] = weakref.WeakSet()


def expect_copies(parameters: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """DistributedDataParallel has these copies of the parameters' gradients in its
    bucket; those are views of it now, or it will copy them back unchanged."""
    for binding in tuple(_push_early):
        for parameter, copy in zip(parameters, copies):
            binding._expect_copy(parameter, copy)
