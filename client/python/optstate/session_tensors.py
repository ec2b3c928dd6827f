"""Tensors of any library at a session: what has DLPack or an array interface."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from optstate import _native, errors
from optstate.device_copies import STREAM, copy_to_device, copy_to_host, current_device
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
    ``__array_interface__`` or ``__cuda_array_interface__``: of numpy, torch, JAX, CuPy or a library
    of the caller's. It is contiguous, and has the dtype and the shape of its parameter.
    InvalidArgumentError says what of that is not so. In host memory it is read and written where
    it is. A tensor on a GPU is copied through host memory that is kept for its parameter, behind
    what its library has given the device, and each call waits for the copies;
    UnimplementedError: it is on another kind of device, or there is no driver. After an error of
    push() and load() nothing has happened.

    parameters: those that the session was opened with, SessionSpec.parameters; of a HeldSession
        those that this rank holds.
    Threads: as the session.
    """

    def __init__(self, session: Session, parameters: Sequence[ParameterSpec]) -> None:
        self._session = session
        self._parameters = parameters
        self._buffers: dict[int, ctypes.Array] = {}  # by parameter, for those on devices

    def push(self, step: int, micro_step: int, gradients: Mapping[int, Any]) -> None:
        """Copies and pushes whole gradients, by parameter; see Session.push_gradients."""
        indices = sorted(gradients)
        tensors = [
            self._of_parameter(p, gradients[p], "the gradient of ", self._spec(p).gradient_dtype)
            for p in indices
        ]
        addresses = [
            self._read_on_host(p, tensor, f'the gradient of "{self._spec(p).name}"')
            for p, tensor in zip(indices, tensors)
        ]
        self._session.push_gradients(
            step, micro_step, array.array("I", indices), array.array("Q", addresses)
        )

    def read(self, destinations: Mapping[int, Any]) -> None:
        """Copies whole parameters to tensors of their dtypes, by parameter."""
        indices = sorted(destinations)
        tensors = [
            self._of_parameter(p, destinations[p], "the place for ", self._spec(p).dtype)
            for p in indices
        ]
        texts = [f'the place for "{self._spec(p).name}"' for p in indices]
        for tensor, what in zip(tensors, texts):
            check_writable(tensor, what)
        addresses = [self._place_on_host(p, tensor) for p, tensor in zip(indices, tensors)]
        self._session.read_parameters(array.array("I", indices), array.array("Q", addresses))
        for tensor, address, what in zip(tensors, addresses, texts):
            _write_back(address, tensor, what)

    def load(self, parameter: int, values: Any) -> None:
        """Sends a parameter's values, of any of the three dtypes, in a load that has begun."""
        tensor = self._of_parameter(parameter, values, "the values of ", None)
        what = f'the values of "{self._spec(parameter).name}"'
        address = self._read_on_host(parameter, tensor, what)
        self._session.load(_native.MASTER, parameter, _CODES[tensor.dtype], address)

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
        tensor = _contiguous(destination, what)
        _check_dtype(tensor, wanted, what)
        check_writable(tensor, what)
        # The library compares the size with the array's, which is not always the parameter's.
        size = tensor.numel * tensor.itemsize
        address = self._place_on_host(parameter, tensor)
        self._session.fetch(state_array, parameter, address, size)
        _write_back(address, tensor, what)

    def _place_on_host(self, parameter: int, tensor: ForeignTensor) -> int:
        """Returns the address of the tensor in host memory, or of a buffer of its size."""
        if tensor.device == "cpu" or tensor.numel == 0:
            return tensor.address
        size = tensor.numel * tensor.itemsize
        buffer = self._buffers.get(parameter)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[parameter] = (ctypes.c_char * size)()
        return ctypes.addressof(buffer)

    def _read_on_host(self, parameter: int, tensor: ForeignTensor, what: str) -> int:
        address = self._place_on_host(parameter, tensor)
        if address != tensor.address:
            copy_to_host(tensor, address, what)
        return address

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
        tensor = _contiguous(value, what)
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


def _contiguous(value: Any, what: str) -> ForeignTensor:
    tensor = foreign_tensor(value, what, stream=STREAM, current=current_device)
    if tensor.device != "cpu" and not tensor.device.startswith("cuda"):
        raise errors.UnimplementedError(
            f"{what} is on {tensor.device}: a session takes tensors in host memory and on GPUs of"
            " CUDA; copy it to host memory"
        )
    if not tensor.is_contiguous:
        raise errors.InvalidArgumentError(
            f"{what} is not contiguous (shape {tensor.shape}, strides {tensor.strides}): give a"
            " contiguous tensor"
        )
    return tensor


def _write_back(address: int, tensor: ForeignTensor, what: str) -> None:
    if address != tensor.address:
        copy_to_device(address, tensor, what)
