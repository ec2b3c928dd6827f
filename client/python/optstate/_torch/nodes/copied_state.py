"""The state of a job as nodes hand it on: pieces of bounded size, and the numbers beside them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from optstate import _native, errors
from optstate._torch.optimizer_info import by_kind
from optstate._torch.state.arrays import ArrayTransfer
from optstate._torch.tensors import crc32_of
from optstate.session_spec import LossScalerState, SessionSpec

# Elements of one piece, each 4 bytes. A larger array is a piece of its own.
_PIECE_ELEMENTS = 16 << 20
# Elements that are broadcast at once, by a group whose backend copies them to a device and back.
BROADCAST_ELEMENTS = 16 << 20

# A state array, the parameter that it is of, and its shape.
Wanted = tuple[int, int, tuple[int, ...]]
Piece = Sequence[Wanted]


class Numbers(NamedTuple):
    """Everything of a job that is no array."""

    step_counts: Sequence[int]
    scalars: Sequence[float]  # empty: the optimizer has none
    scaler: LossScalerState | None  # of a dynamic loss scaler


def with_scaler(spec: SessionSpec, state: LossScalerState | None) -> SessionSpec:
    """Returns the spec of a new job whose loss scaler begins where that of another one is.

    state: None: the other one has no dynamic scaler. UnimplementedError: its daemon does not say
    where it is."""
    scaler = spec.loss_scaler
    if scaler is None or not scaler.dynamic:
        return dataclasses.replace(spec, loss_scaler_state=None)
    if state is None:
        raise errors.UnimplementedError(
            f'the daemon that has job "{spec.job}" does not say where its loss scaler is, so that'
            " the job cannot be copied to another node: upgrade optstated on all nodes"
        )
    return dataclasses.replace(spec, loss_scaler_state=state)


def pieces_of(spec: SessionSpec) -> Iterator[Piece]:
    """Returns the masters and state arrays of the job of `spec`, in an order that is the same on
    all nodes."""
    info = by_kind(spec.optimizer)
    piece: list[Wanted] = []
    elements = 0
    for index, parameter in enumerate(spec.parameters):
        shape = tuple(parameter.shape)
        bits = spec.group_options[parameter.group]
        arrays = [(_native.MASTER, shape), *info.arrays_with(bits, shape).values()]
        for array, of_array in arrays:
            numel = math.prod(of_array)
            if piece and elements + numel > _PIECE_ELEMENTS:
                yield piece
                piece, elements = [], 0
            piece.append((array, index, of_array))
            elements += numel
    if piece:
        yield piece


def numel_of(piece: Piece) -> int:
    return sum(math.prod(shape) for _, _, shape in piece)


def fetch_numbers_of(
    arrays: ArrayTransfer, spec: SessionSpec, scaler: LossScalerState | None
) -> Numbers:
    everything = range(len(spec.parameters))
    has_scalar = by_kind(spec.optimizer).scalar is not None
    return Numbers(
        step_counts=arrays.fetch_step_counts(everything),
        scalars=arrays.fetch_scalars(everything) if has_scalar else (),
        scaler=scaler,
    )


def load_numbers(arrays: ArrayTransfer, numbers: Numbers) -> None:
    """Queues the numbers of each parameter to be sent."""
    for index, count in enumerate(numbers.step_counts):
        arrays.load_step_count(index, count)
    for index, value in enumerate(numbers.scalars):
        arrays.load_scalar(index, value)


def split(piece: Piece, flat: torch.Tensor) -> list[torch.Tensor]:
    """Returns the arrays of a piece, which lie one after the other."""
    parts = flat.split([math.prod(shape) for _, _, shape in piece])
    return [part.view(shape) for part, (_, _, shape) in zip(parts, piece)]


def join(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns arrays one after the other; a single one in its own memory."""
    flat = [each.reshape(-1) for each in values]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def sums_of(values: Sequence[torch.Tensor]) -> list[int]:
    """Returns checksums of the arrays' bits."""
    return [crc32_of(each) for each in values]


def checked(
    arrays: ArrayTransfer,
    spec: SessionSpec,
    numbers: Numbers,
    expected: Sequence[int],
) -> Iterator[None]:
    """Compares what a job has with what was loaded into it, piece by piece.

    expected: sums_of() all arrays, in the order of pieces_of(). DataLossError: it has other bits.
    """
    found = fetch_numbers_of(arrays, spec, numbers.scaler)
    if found != numbers:
        raise errors.DataLossError(
            f'the copy of job "{spec.job}" has other step counts than the job: it is removed'
        )
    sums = iter(expected)
    for piece in pieces_of(spec):
        for (array, index, _), value in zip(piece, sums_of(arrays.fetch_arrays(piece))):
            if value != next(sums):
                raise errors.DataLossError(
                    f'the copy of job "{spec.job}" has other bits than the job in array {array} of'
                    f' parameter "{spec.parameters[index].name}": it is removed'
                )
        yield
