"""Values that a daemon encodes to the very codes and scale that another daemon has decoded.

State of 8 bits ("dynamic8" in storage/format/FORMAT.md) leaves a daemon as floats, which are
`map[code] * scale`. It comes to another one as floats, of which that takes the largest magnitude of
each block of 256 for the block's scale. Encoding what was decoded gives the same floats again, but
for one thing: of the signed map -1 has no code, so that the largest magnitude of a block, if it is
negative, is decoded as a little less than the scale. Such a block gets its scale back here: its
largest element is replaced by minus the scale, which has the same code.
"""

from __future__ import annotations

import functools

import torch

BLOCK = 256
# The last place of the signed map that negative values have; 1 is the place after it.
_LAST = 127
# Floats beside the quotient that are tried: it and the product are each rounded once.
_STEPS = (0, 1, -1, 2, -2)
_AT_ONCE = 1 << 20  # elements: whole blocks


@functools.cache
def magnitudes() -> torch.Tensor:
    """Returns the signed map's magnitudes by place: 0, seven decades, and 1."""
    places = torch.zeros(_LAST + 2, dtype=torch.float32, device="cpu")
    decade, count = 1e-7, 1
    for _ in range(7):
        fractions = torch.arange(count, dtype=torch.float32, device="cpu") / count
        width = torch.tensor(9 * decade, dtype=torch.float32, device="cpu")
        first = torch.tensor(decade + 9 * decade / count / 2, dtype=torch.float32, device="cpu")
        places[count : 2 * count] = first + width * fractions
        decade, count = decade * 10, count * 2
    places[-1] = 1
    return places


def restore_scales(decoded: torch.Tensor) -> None:
    """Changes values that a daemon has decoded, in place, to such as another one encodes so that it
    decodes them to what they were: a whole array of a parameter, contiguous float32 in host memory.

    A block that no daemon has decoded so stays as it is.
    """
    flat = decoded.view(-1)
    for begin in range(0, flat.numel(), _AT_ONCE):  # what is computed meanwhile stays small
        part = flat[begin : begin + _AT_ONCE]
        short = -part.numel() % BLOCK
        blocks = torch.nn.functional.pad(part, (0, short)).view(-1, BLOCK)
        part.copy_(_with_scales(blocks).view(-1)[: part.numel()])


def _with_scales(blocks: torch.Tensor) -> torch.Tensor:
    largest = (-blocks).amax(dim=1)
    # Where a positive value is larger it is the scale. A block with NaN is NaN as a whole.
    rows = ((largest >= blocks.amax(dim=1)) & (largest > 0)).nonzero().reshape(-1)
    if not rows.numel():
        return blocks
    found, of_rows = blocks[rows], largest[rows]
    scales = _scales_of(found, of_rows)
    # An infinite scale has no other negative values than its own.
    blocks[rows] = torch.where(found == -of_rows[:, None], -scales[:, None], found)
    return blocks


def _scales_of(blocks: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Returns the scale that each block was decoded with; `largest` where there is none."""
    last = magnitudes()[_LAST]
    quotient = (largest.double() / last.double()).float()
    bits = quotient.view(torch.int32)  # floats of one sign have the order of their bits
    candidates = torch.stack([bits + step for step in _STEPS]).view(torch.float32)
    fits = candidates * last == largest
    # About one in 150 has two, of which the other elements tell the right one.
    for row in (fits.sum(dim=0) > 1).nonzero().reshape(-1).tolist():
        for candidate in fits[:, row].nonzero().reshape(-1).tolist():
            if _is_decoded(blocks[row], candidates[candidate, row]):
                fits[:, row] = False
                fits[candidate, row] = True
                break
    first = fits.to(torch.int8).argmax(dim=0, keepdim=True)
    return torch.where(fits.any(dim=0), candidates.gather(0, first)[0], largest)


def _is_decoded(block: torch.Tensor, scale: torch.Tensor) -> bool:
    """Returns whether all elements of a block are values that this scale gives."""
    places = magnitudes()
    found = block.abs()
    middles = (places[1:].double() + places[:-1].double()) / 2
    nearest = torch.bucketize(found.double() / scale.double(), middles)
    nearest = torch.minimum(nearest, torch.where(block < 0, _LAST, _LAST + 1))
    return torch.equal(places[nearest] * scale, found)
