"""Where state of 8 bits may be cut: at the borders of its blocks.

A daemon has one scale for each 256 elements of a part of a parameter, in the order in which they
lie and from the part's first one on; the last block may have fewer. A scale is the largest
magnitude of its block, and whoever loads a block gives its values alone. So a block that stays
together keeps its codes and its scale. One that is cut has two halves of which only one has the
value that the scale was; one that is put together of two would have one scale for both. Each of
these rounds values anew, so a move that would do so is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from optstate import _native, errors
from optstate._torch.names import quoted
from optstate._torch.nodes.eight_bits import BLOCK
from optstate._torch.nodes.moves.blocks import Block, Regions
from optstate._torch.optimizer_info import by_kind
from optstate.session_spec import SessionSpec


def has_scales(spec: SessionSpec) -> bool:
    """Returns whether the job's state arrays have 8 bits."""
    return spec.state_format == _native.STATE_FORMATS["dynamic8"]


def keep_blocks(one: Block, other: Block) -> bool:
    """Returns whether two parts have the elements that both have in the same blocks of scales."""
    both = one.overlap(other)
    if both is None:
        return True
    sizes = [each.stop - each.start for each in both[0]]
    # Elements of dimensions that both parts have whole lie one behind the other in both.
    inner = len(sizes)
    while inner and one.shape[inner - 1] == sizes[inner - 1] == other.shape[inner - 1]:
        inner -= 1
    if not inner:
        return True  # the parts are the same
    run = math.prod(sizes[inner - 1 :])  # elements that lie one behind the other in both
    has_one_run = math.prod(sizes[: inner - 1]) == 1
    for part, where in zip((one, other), both):
        strides = [math.prod(part.shape[dimension + 1 :]) for dimension in range(inner)]
        begin = sum(each.start * stride for each, stride in zip(where, strides))
        outer = itertools.islice(zip(sizes, strides), inner - 1)
        if begin % BLOCK or any(size > 1 and stride % BLOCK for size, stride in outer):
            return False
        ends_part = has_one_run and begin + run == math.prod(part.shape)
        if run % BLOCK and not ends_part:
            return False
    return True


def _has_codes(spec: SessionSpec, block: Block) -> bool:
    """Returns whether a part has an array of single elements besides its master."""
    arrays = by_kind(spec.optimizer).arrays_with(spec.group_options[block.spec.group], block.shape)
    return any(shape == block.shape for _, shape in arrays.values())


def check_scales(spec: SessionSpec, sources: Regions, blocks: Sequence[Block]) -> None:
    """Raises UnimplementedError when state of 8 bits would not arrive bit for bit.

    sources: where it is. blocks: all parts that are to have it."""
    if not has_scales(spec):
        return
    cut: dict[str, tuple[Block, Block]] = {}
    for block in blocks:
        if block.name in cut or not block.spec.numel or not _has_codes(spec, block):
            continue
        for region in sources.of(block.name):
            if not keep_blocks(region.block, block):
                cut[block.name] = (region.block, block)
                break
    if not cut:
        return
    name, (there, here) = next(iter(cut.items()))
    raise errors.UnimplementedError(
        f'job "{spec.job}" has state of 8 bits (state_dtype="dynamic8"), with a scale for each'
        f" {BLOCK} elements of a shard, counted from its first one. Its shards of parameters"
        f" {quoted(list(cut))} would be cut within such blocks, or put together of parts of them"
        f' ("{name}": {_said(there)} before, {_said(here)} now), and could not keep their bits.'
        " Attach with as many ranks as the job has, on any nodes and in any order; or with ranks"
        f" whose shards begin and end at multiples of {BLOCK} elements of the present ones, or at"
        " their ends; or save a checkpoint on the nodes and ranks that the job has, delete the job"
        " (optctl delete job) and load it into a new one, which rounds to 8 bits anew"
    )


def _said(block: Block) -> str:
    return f"{list(block.shape)} at {list(block.offset)} of {list(block.whole_shape)}"
