"""Reduces gradients in one byte an element, with error feedback.

Blocks of 256 elements of one gradient share a scale. A block of values v with feedback e becomes

    scale  the largest |v + e|, over 127, rounded up to 16 significant bits
    code   (v + e) / scale to nearest even, in [-127, 127]

and each rank adds up code * scale of all ranks, in the order of the ranks and in float32, where the
products are exact. The next feedback is v + e - code * scale. A block with Inf or NaN is sent as
NaN, by which the step is skipped. It is what client/collective/gradients/block_quantizer.h does,
by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from optstate._torch.collective.reducing import Reducing

BLOCK = 256
_CODE_MAX = 127
# The bits of a float32 behind its 16 most significant ones.
_LOW_BITS = 0xFF
# A block with this or more would overflow when its scale is rounded up; it counts as infinite.
_TOO_LARGE = 3.4e38
# Codes that are sent together: float32 sums of them take as much as DistributedDataParallel's.
_BUCKET_ELEMENTS = (25 << 20) // 4
_AT_ONCE = 4096 * BLOCK  # elements that are quantised at a time


class Gathering(Protocol):
    """Ranks that gather tensors; see Ranks."""

    world_size: int

    def tensors_of_all(
        self, tensor: torch.Tensor, destination: int | None
    ) -> Sequence[torch.Tensor]:
        """Returns every rank's tensor on rank `destination` (None: on all), nothing on others."""


class Quantized(NamedTuple):
    """A gradient as it is sent: a scale for each block, in float32, and the blocks' codes, in
    int8 [blocks, BLOCK]. The last block ends in zeros."""

    scales: torch.Tensor
    codes: torch.Tensor


class Piece(NamedTuple):
    """Elements [begin, end) of a gradient, which all ranks have quantised. The sum goes to
    `gradient`, which is flat."""

    quantized: Quantized
    gradient: torch.Tensor
    begin: int
    end: int


def quantize(
    gradient: torch.Tensor,
    before: torch.Tensor | None,
    after: torch.Tensor,
    predivide_factor: float,
) -> Quantized:
    """Quantises a flat gradient with the feedback from before, and writes the next feedback."""
    scales, codes = [], []
    for begin in range(0, gradient.numel(), _AT_ONCE):  # what is computed in double stays small
        here = slice(begin, begin + _AT_ONCE)
        of_before = None if before is None else before[here]
        values = gradient[here].double()
        if predivide_factor != 1:
            values.div_(predivide_factor)
        if of_before is not None:
            values.add_(of_before)
        blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        found = quantize_blocks(blocks)
        lost = blocks - found.codes.double().mul_(found.scales.double()[:, None])
        is_sent = found.scales.isfinite().repeat_interleave(BLOCK)[: values.numel()]
        stays = torch.zeros_like(after[here]) if of_before is None else of_before
        after[here] = torch.where(is_sent, lost.view(-1)[: values.numel()].float(), stays)
        scales.append(found.scales)
        codes.append(found.codes)
    if not scales:
        nothing = gradient.new_empty(0, dtype=torch.float32)
        return Quantized(nothing, nothing.to(torch.int8).view(0, BLOCK))
    return Quantized(torch.cat(scales), torch.cat(codes))


def quantize_blocks(values: torch.Tensor) -> Quantized:
    """Quantises blocks, rows of values in double that include the feedback."""
    largest = values.abs().amax(dim=1)
    scales = (largest / _CODE_MAX).float()
    least = torch.full_like(scales, 2.0**-149)
    # The cast may have rounded down; codes are clamped, so that this is enough.
    scales = torch.where((scales == 0) & (largest > 0), least, scales)
    scales = ((scales.view(torch.int32) + _LOW_BITS) & ~_LOW_BITS).view(torch.float32)
    is_finite = largest < _TOO_LARGE  # not of NaN
    units = torch.where(is_finite & (scales > 0), scales, torch.ones_like(scales)).double()
    codes = (values / units[:, None]).round_().clamp_(-_CODE_MAX, _CODE_MAX)
    codes = torch.where(is_finite[:, None], codes, torch.zeros_like(codes))
    scales = torch.where(is_finite, scales, torch.full_like(scales, float("nan")))
    return Quantized(scales, codes.to(torch.int8))


def reduce_quantized(
    collective: Gathering, pieces: Sequence[Piece], destination: int | None, how: Reducing
) -> None:
    """Makes pieces of gradients of one device, in place, what `how` says; collective.

    destination: the one rank that gets the result; the others keep their own gradients.
    """
    limit = (how.bucket_elements or _BUCKET_ELEMENTS) // BLOCK
    for parts in _buckets(pieces, limit):
        _reduce_bucket(collective, parts, destination, how)


class _Part(NamedTuple):
    """Blocks [begin, end) of a piece's gradient."""

    piece: Piece
    begin: int
    end: int


def _buckets(pieces: Sequence[Piece], limit: int) -> Iterator[list[_Part]]:
    """Returns runs of so many blocks that have elements of the pieces. Pieces of one gradient may
    both have a block, which is the same whatever the pieces and the limit are."""
    parts: list[_Part] = []
    room = limit
    for piece in pieces:
        begin, end = piece.begin // BLOCK, -(-piece.end // BLOCK)
        while begin < end:
            count = min(end - begin, room)
            parts.append(_Part(piece, begin, begin + count))
            begin += count
            room -= count
            if not room:
                yield parts
                parts, room = [], limit
    if parts:
        yield parts


def _reduce_bucket(
    collective: Gathering, parts: Sequence[_Part], destination: int | None, how: Reducing
) -> None:
    scales = torch.cat([piece.quantized.scales[begin:end] for piece, begin, end in parts])
    codes = torch.cat([piece.quantized.codes[begin:end] for piece, begin, end in parts])
    sent = torch.cat([scales.view(torch.uint8), codes.view(torch.uint8).view(-1)])
    everyones = collective.tensors_of_all(sent, destination)
    if not everyones:
        return
    sums = torch.zeros(codes.shape, dtype=torch.float32, device=codes.device)
    scale_bytes = scales.numel() * scales.element_size()
    for received in everyones:
        of_blocks = received[:scale_bytes].view(torch.float32)
        theirs = received[scale_bytes:].view(torch.int8).view(-1, BLOCK)
        sums.add_(theirs.float().mul_(of_blocks[:, None]))
    results = how.result(sums, collective.world_size).split(
        [end - begin for _, begin, end in parts]
    )
    for (piece, begin, end), result in zip(parts, results):
        first, last = max(piece.begin, begin * BLOCK), min(piece.end, end * BLOCK)
        result = result.reshape(-1)[first - begin * BLOCK : last - begin * BLOCK]
        piece.gradient[first:last].copy_(result)
