"""Tensors of any library at a session: what has DLPack or an array interface."""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from typing import Any

from optstate import _native, errors
from optstate.foreign_tensor import ForeignTensor, check_writable, foreign_tensor
from optstate.session import Session
from optstate.session_spec import ParameterSpec

_DTYPES = {
    _native.FLOAT32: "float32",
    _native.BFLOAT16: "bfloat16",
    _native.FLOAT16: "float16",
}
_CODES = {name: code for code, name in _DTYPES.items()}


class SessionTensors:
    """Gives a session the memory of tensors in place of addresses.

    A tensor is any object with ``__dlpack__`` and ``__dlpack_device__``, or with
    ``__array_interface__``: of numpy, torch, JAX or a library of the caller's. It is in host
    memory and contiguous, has the dtype and the shape of its parameter, and is read and written
    where it is. InvalidArgumentError says what of that is not so; UnimplementedError that a
    device has the tensor. Then nothing has happened.

    parameters: those that the session was opened with, SessionSpec.parameters; of a HeldSession
        those that this rank holds.
    Threads: as the session.
    """

    def __init__(self, session: Session, parameters: Sequence[ParameterSpec]) -> None:
        self._session = session
        self._parameters = parameters

    def push(self, step: int, micro_step: int, gradients: Mapping[int, Any]) -> None:
        """Copies and pushes whole gradients, by parameter; see Session.push_gradients."""
        indices = sorted(gradients)
        tensors = [
            self._of_parameter(p, gradients[p], "the gradient of ", self._spec(p).gradient_dtype)
            for p in indices
        ]
        self._session.push_gradients(
            step, micro_step, array.array("I", indices), _addresses(tensors)
        )

    def read(self, destinations: Mapping[int, Any]) -> None:
        """Copies whole parameters to tensors of their dtypes, by parameter."""
        indices = sorted(destinations)
        tensors = [
            self._of_parameter(p, destinations[p], "the place for ", self._spec(p).dtype)
            for p in indices
        ]
        for p, tensor in zip(indices, tensors):
            check_writable(tensor, f'the place for "{self._spec(p).name}"')
        self._session.read_parameters(array.array("I", indices), _addresses(tensors))

    def load(self, parameter: int, values: Any) -> None:
        """Sends a parameter's values, of any of the three dtypes, in a load that has begun."""
        tensor = self._of_parameter(parameter, values, "the values of ", None)
        self._session.load(_native.MASTER, parameter, _CODES[tensor.dtype], tensor.address)

    def fetch(self, state_array: int, parameter: int, destination: Any) -> None:
        """Copies an array of a parameter to a tensor: float32, a PARAMETER of its own dtype,
        STEP_COUNT int64, and other numbers of a parameter float64; see Session.fetch."""
        spec = self._spec(parameter)
        what = f'the place for array {state_array} of "{spec.name}"'
        if state_array == _native.PARAMETER:
            wanted = _DTYPES[spec.dtype]
        elif state_array == _native.STEP_COUNT:
            wanted = "int64"
        elif state_array < _native.STEP_COUNT:
            wanted = "float32"
        else:
            wanted = "float64"
        tensor = _in_host_memory(destination, what)
        _check_dtype(tensor, wanted, what)
        check_writable(tensor, what)
        # The library compares the size with the array's, which is not always the parameter's.
        size = tensor.numel * tensor.itemsize
        self._session.fetch(state_array, parameter, tensor.address, size)

    def _spec(self, parameter: int) -> ParameterSpec:
        if not 0 <= parameter < len(self._parameters):
            raise errors.OutOfRangeError(
                f"parameter {parameter}: there are {len(self._parameters)}"
            )
        return self._parameters[parameter]

    def _of_parameter(
        self, parameter: int, value: Any, role: str, dtype: int | None
    ) -> ForeignTensor:
        """Returns a tensor of the parameter's shape; dtype None: any that parameters can have."""
        spec = self._spec(parameter)
        what = f'{role}"{spec.name}"'
        tensor = _in_host_memory(value, what)
        if tensor.shape != tuple(spec.shape):
            raise errors.InvalidArgumentError(
                f"{what} has the shape {tensor.shape}, not {tuple(spec.shape)}"
            )
        if dtype is not None:
            _check_dtype(tensor, _DTYPES[dtype], what)
        elif tensor.dtype not in _CODES:
            raise errors.InvalidArgumentError(f"{what} is {tensor.dtype}: give {_one_of()}")
        return tensor


def _one_of() -> str:
    return "float32, bfloat16 or float16"


def _check_dtype(tensor: ForeignTensor, wanted: str, what: str) -> None:
    if tensor.dtype != wanted:
        raise errors.InvalidArgumentError(f"{what} is {tensor.dtype}, not {wanted}")


def _in_host_memory(value: Any, what: str) -> ForeignTensor:
    tensor = foreign_tensor(value, what)
    if tensor.device != "cpu":
        raise errors.UnimplementedError(
            f"{what} is on {tensor.device}: a session takes host memory; copy the tensor there,"
            " or use optstate's optimizers, which copy those of torch"
        )
    if not tensor.is_contiguous:
        raise errors.InvalidArgumentError(
            f"{what} is not contiguous (shape {tensor.shape}, strides {tensor.strides}): give a"
            " contiguous tensor"
        )
    return tensor


def _addresses(tensors: Sequence[ForeignTensor]) -> array.array:
    return array.array("Q", [tensor.address for tensor in tensors])
