"""Reduces gradients over all ranks, where nothing else has (reduction="collective"), and copies
them from one rank to others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from optstate import errors
from optstate._torch.collective.error_feedback import ErrorFeedback
from optstate._torch.collective.quantized import Piece, quantize, reduce_quantized
from optstate._torch.collective.reduced import note_reduced, state_of
from optstate._torch.collective.reducing import Reducing
from optstate._torch.layout import gradient_dtype

# Bytes that are sent together, as in DistributedDataParallel.
BUCKET_BYTES = 25 << 20
# Ranks of one micro-step that an error names.
_NAMED_MAX = 8


class Collective(Protocol):
    """Ranks that add up tensors; see Ranks."""

    rank: int
    world_size: int

    def add_up(self, tensor: torch.Tensor) -> None:
        """Makes the tensor, in place, the sum of all ranks'. The bits are the same on all."""

    def add_up_at(self, tensor: torch.Tensor, destination: int) -> None:
        """Makes the tensor, in place, the sum of all ranks' on rank `destination` alone."""

    def replicate(self, tensor: torch.Tensor, source: int) -> None:
        """Makes the tensor, in place, that of rank `source`."""

    def tensors_of_all(
        self, tensor: torch.Tensor, destination: int | None
    ) -> Sequence[torch.Tensor]:
        """Returns every rank's tensor on rank `destination` (None: on all), nothing on others."""


class Gathering(Protocol):
    """Ranks that gather numbers; see Ranks."""

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Returns every rank's numbers, equally many and of 64 bits."""


def check_same_place(
    ranks: Gathering, step: int, micro_step: int, *, is_last: bool, error: Exception | None = None
) -> None:
    """Raises FailedPreconditionError, on all ranks, when they are about to reduce gradients of
    different steps or micro-steps together, or when a rank has an error; there it is raised.
    Collective.

    is_last: it is the micro-step of step(), and not of accumulate_step().
    """
    places = ranks.gather_numbers([step, micro_step, int(is_last), int(error is not None)])
    if error is not None:
        raise error
    failing = [str(rank) for rank, place in enumerate(places) if place.pop()]
    if failing:
        raise errors.FailedPreconditionError(
            f"rank {', '.join(failing[:_NAMED_MAX])} cannot reduce its gradients, and has the error"
            " that says why. Nothing is reduced: take the step again on all ranks"
        )
    by_place: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        by_place.setdefault(tuple(place), []).append(rank)
    if len(by_place) == 1:
        return
    said = []
    for (of_step, number, ends), of_place in by_place.items():
        named = ", ".join(map(str, of_place[:_NAMED_MAX]))
        more = f" and {len(of_place) - _NAMED_MAX} more" if len(of_place) > _NAMED_MAX else ""
        call = "step()" if ends else "accumulate_step()"
        said.append(f"rank {named}{more} in {call}, micro-step {number} of step {of_step}")
    raise errors.FailedPreconditionError(
        'ranks are about to reduce gradients of different micro-steps (reduction="collective"):'
        f" {'; '.join(said)}. Call abort_step() and zero_grad() on all ranks, and take the step"
        " again from its first micro-step, with equally many on each"
    )


class Destination(NamedTuple):
    """Rows [begin, end) of a gradient, by its first dimension, which a rank needs."""

    rank: int
    begin: int
    end: int


def buckets_of(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns runs of tensors of one device and dtype, each of about BUCKET_BYTES."""
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        last = buckets[-1][-1] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (tensor.dtype, tensor.device)
        if not alike or size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.numel() * tensor.element_size()
    return buckets


def _cut_into_buckets(flats: Sequence[torch.Tensor], elements: int) -> list[list[torch.Tensor]]:
    """Returns runs of slices of flat tensors of one device, each run of so many elements."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for flat in flats:
        begin = 0
        while begin < flat.numel():
            if not room or buckets[-1][-1].device != flat.device:
                buckets.append([])
                room = elements
            count = min(room, flat.numel() - begin)
            buckets[-1].append(flat[begin : begin + count])
            begin += count
            room -= count
    return buckets


def reduce_gradients(
    collective: Collective,
    tensors: Sequence[torch.Tensor],
    destinations: Mapping[torch.Tensor, Sequence[Destination]] | None,
    how: Reducing,
    feedback: ErrorFeedback,
    *,
    continues: bool = False,
) -> None:
    """Makes each gradient the mean of all ranks', in place, or what `how` says; collective.

    A rank without a gradient of a parameter counts as 0, unless no rank has one. 16-bit
    gradients are converted to the communication dtype, by default float32, and added up there.
    One rank alone has its own gradients, which are not rounded.

    destinations: of each tensor the ranks that need the result, and the rows that each of them
    needs; all others stay the rank's own. None: all ranks need it.

    feedback: of quantised gradients; the caller says when the step is over. continues: micro-steps
    of this step were reduced before.

    Gradients that a step which failed has reduced are not reduced again when it is taken again.
    FailedPreconditionError, on all ranks: some ranks alone have such ones, or it failed in the
    middle of this.
    """
    if collective.world_size == 1 or not tensors:
        return
    has = [int(each.grad is not None) for each in tensors]
    states = [state_of(each, partial=collective.world_size + 1) for each in tensors]
    counts = torch.tensor([has, states], dtype=torch.int32)
    collective.add_up(counts)
    to_reduce = []
    for tensor, count, reduced in zip(tensors, *counts.tolist()):
        if reduced not in (0, collective.world_size):
            raise errors.FailedPreconditionError(
                "a step that failed has reduced gradients of some ranks that others have computed"
                " anew, or was interrupted in it: call zero_grad() and backward() on all ranks, and"
                " take the step with these gradients"
            )
        if not (reduced or continues):
            feedback.give_up(tensor)
        if reduced or not count:
            continue
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor, dtype=gradient_dtype(tensor))
        to_reduce.append(tensor)
    is_done = False
    try:
        if how.is_quantized:
            _reduce_quantized(collective, to_reduce, destinations, how, feedback)
        else:
            for rank, rows in _by_destination(to_reduce, destinations):
                _reduce_for(collective, [_rows_of(*each) for each in rows], rank, how)
        is_done = True
    finally:
        note_reduced(to_reduce, is_whole=is_done)


def _by_destination(
    tensors: Sequence[torch.Tensor],
    destinations: Mapping[torch.Tensor, Sequence[Destination]] | None,
) -> list[tuple[int | None, list[tuple[torch.Tensor, Destination | None]]]]:
    """Returns what of which gradients is to be reduced for each rank (None: for all), in one order
    on all ranks."""
    found: dict[int | None, list[tuple[torch.Tensor, Destination | None]]] = {}
    for tensor in tensors:
        for each in (None,) if destinations is None else destinations[tensor]:
            found.setdefault(None if each is None else each.rank, []).append((tensor, each))
    return sorted(found.items(), key=lambda each: -1 if each[0] is None else each[0])


def _rows_of(tensor: torch.Tensor, rows: Destination | None) -> torch.Tensor:
    gradient = tensor.grad
    assert gradient is not None
    return gradient if rows is None else gradient.detach()[rows.begin : rows.end]


def _reduce_quantized(
    collective: Collective,
    tensors: Sequence[torch.Tensor],
    destinations: Mapping[torch.Tensor, Sequence[Destination]] | None,
    how: Reducing,
    feedback: ErrorFeedback,
) -> None:
    feedback.begin_reduction()
    gradients = {each: _rows_of(each, None).detach() for each in tensors}
    flats = {tensor: gradient.reshape(-1) for tensor, gradient in gradients.items()}
    # All of them first: two ranks may have rows of one block, and one gets the sum before.
    sent = {
        tensor: quantize(flat, *feedback.begin(tensor), how.predivide_factor)
        for tensor, flat in flats.items()
    }
    for rank, of_rank in _by_destination(tensors, destinations):
        by_device: dict[torch.device, list[Piece]] = {}
        for tensor, rows in of_rank:
            flat = flats[tensor]
            begin, end = 0, flat.numel()
            if rows is not None:
                row = gradients[tensor][:1].numel()
                begin, end = rows.begin * row, rows.end * row
            piece = Piece(sent[tensor], flat, begin, end)
            by_device.setdefault(flat.device, []).append(piece)
        for pieces in by_device.values():
            reduce_quantized(collective, pieces, rank, how)
    with torch.no_grad():
        for tensor, gradient in gradients.items():
            if flats[tensor].data_ptr() != gradient.data_ptr():  # a copy, of other strides
                gradient.copy_(flats[tensor].view_as(gradient))
    feedback.end_reduction()


def _reduce_for(
    collective: Collective,
    gradients: Sequence[torch.Tensor],
    destination: int | None,
    how: Reducing,
) -> None:
    if how.bucket_elements is None:
        for bucket in buckets_of(gradients):
            _reduce_bucket(collective, bucket, destination, how)
        return
    flats = [each.detach().reshape(-1) for each in gradients]
    for bucket in _cut_into_buckets(flats, how.bucket_elements):
        _reduce_bucket(collective, bucket, destination, how)
    with torch.no_grad():
        for gradient, flat in zip(gradients, flats):
            if flat.data_ptr() != gradient.data_ptr():  # a copy, of other strides
                gradient.copy_(flat.view_as(gradient))


def _reduce_bucket(
    collective: Collective,
    bucket: Sequence[torch.Tensor],
    destination: int | None,
    how: Reducing,
) -> None:
    flat = how.to_send(torch.cat([gradient.detach().reshape(-1).float() for gradient in bucket]))
    if destination is None:
        collective.add_up(flat)
    else:
        collective.add_up_at(flat, destination)
        if destination != collective.rank:
            return
    parts = how.result(flat, collective.world_size).split([each.numel() for each in bucket])
    with torch.no_grad():
        for gradient, part in zip(bucket, parts):
            gradient.copy_(part.view_as(gradient))


def replicate_gradients(
    collective: Collective, tensors: Sequence[torch.Tensor], source: int, *, has_mine: bool
) -> None:
    """Gives ranks that have no gradients of these tensors those of rank `source`; collective.

    has_mine: this rank has gradients, which stay as they are.
    """
    gradients = []
    for tensor in tensors:
        if not has_mine:
            tensor.grad = torch.zeros_like(tensor, dtype=gradient_dtype(tensor))
        present = tensor.grad
        gradients.append(torch.zeros_like(tensor) if present is None else present)
    for bucket in buckets_of(gradients):
        flat = torch.cat([gradient.detach().reshape(-1) for gradient in bucket])
        collective.replicate(flat, source)
        parts = flat.split([gradient.numel() for gradient in bucket])
        with torch.no_grad():
            for gradient, part in zip(bucket, () if has_mine else parts):
                gradient.copy_(part.view_as(gradient))
