"""Transfers whole arrays between an optimizer's tensors and its session: loads and fetches.

One call moves many arrays, because with 100,000 parameters single calls would take all the time.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Sequence

import torch

from optstate import _native
from optstate._torch.layout import DTYPE_CODES
from optstate._torch.tensors import in_memory
from optstate.session import Session
from optstate.session_spec import ParameterSpec

# A tensor without elements has no address, and the C API takes no null.
_NOTHING = ctypes.c_uint64()
_SOMEWHERE = ctypes.addressof(_NOTHING)
# Limits of one call that loads or fetches many arrays.
_BATCH_ARRAYS = 4096
_BATCH_BYTES = 64 << 20


class ArrayTransfer:
    """Loads and fetches masters, state arrays and numbers of a session's parameters.

    Threads: one at a time, like the optimizer.
    """

    def __init__(self, session: Session, specs: Sequence[ParameterSpec]) -> None:
        self._session = session
        self._specs = specs
        self.drop_loads()

    def load_array(self, state_array: int, index: int, values: torch.Tensor) -> None:
        """Queues a whole array to be sent; dtypes that the daemon does not know go as fp32.

        flush_loads() sends what is queued. The values must not change before that.
        """
        if values.dtype not in DTYPE_CODES:
            values = values.to(torch.float32)
        values = in_memory(values)
        self._queue_load(
            state_array, index, DTYPE_CODES[values.dtype], values.data_ptr() or _SOMEWHERE, values
        )
        self._load_bytes += values.numel() * values.element_size()
        if self._load_bytes > _BATCH_BYTES:
            self.flush_loads()

    def load_step_count(self, index: int, step_count: int) -> None:
        """Queues a parameter's step count, like load_array()."""
        box = ctypes.c_int64(step_count)
        self._queue_load(_native.STEP_COUNT, index, _native.FLOAT32, ctypes.addressof(box), box)

    def load_scalar(self, index: int, value: float) -> None:
        """Queues the number that the optimizer keeps per parameter, like load_array()."""
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
        """Forgets queued values, which a failed load has not sent."""
        self._loads = tuple(array.array(code) for code in "iIiQ")
        self._load_owners: list[object] = []
        self._load_bytes = 0

    def flush_loads(self) -> None:
        """Sends all that load_array(), load_step_count() and load_scalar() have queued."""
        loads, owners = self._loads, self._load_owners
        self.drop_loads()
        if owners:
            self._session.load_many(*loads)

    def fetch_arrays(
        self, wanted: Sequence[tuple[int, int, tuple[int, ...]]]
    ) -> list[torch.Tensor]:
        """Returns the wanted (state array, parameter, shape) in fp32, in host memory."""
        results = [torch.empty(shape, dtype=torch.float32, device="cpu") for _, _, shape in wanted]
        # The fetch is split into calls, between which Python handles signals.
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
        """Returns norms by name, without parameters that had no gradient in the last step."""
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
