"""Where state of 8 bits may be cut, without a daemon."""

from __future__ import annotations

import itertools
import random

import pytest
from optstate import _native, errors
from optstate._torch.nodes.moves import scales
from optstate._torch.nodes.moves.blocks import Block, Regions
from optstate._torch.optimizer_info import infos
from optstate.session_spec import ParameterSpec, SessionSpec, Shard

SEED = 11


def _block(name, offset, shape, whole):
    numel = 1
    for size in shape:
        numel *= size
    shard = Shard(0, tuple(whole), tuple(offset))
    return Block(name, 0, ParameterSpec(name, tuple(shape), numel, 1, 1, 0, shard=shard))


def _blocks_of_scales(block, size):
    """Returns the elements, by place in the whole, that each element has its scale with."""
    found = {}
    places = itertools.product(*(range(o, o + n) for o, n in zip(block.offset, block.shape)))
    for number, place in enumerate(places):
        found.setdefault(number // size, []).append(place)
    return {place: tuple(of_scale) for of_scale in found.values() for place in of_scale}


def test_blocks_that_stay_together_are_found(monkeypatch):
    """By counting, for parts of up to three dimensions."""
    monkeypatch.setattr(scales, "BLOCK", 4)
    chosen = random.Random(SEED)
    counts = {True: 0, False: 0}

    def part(whole):
        begins = [chosen.choice((0, chosen.randrange(size))) for size in whole]
        ends = [
            chosen.choice((size, chosen.randint(begin + 1, size)))
            for begin, size in zip(begins, whole)
        ]
        return _block("w", begins, [end - begin for begin, end in zip(begins, ends)], whole)

    for _ in range(4000):
        whole = [chosen.choice((1, 2, 3, 4, 5, 8, 12)) for _ in range(chosen.randint(1, 3))]
        one, other = part(whole), part(whole)
        of_one, of_other = _blocks_of_scales(one, 4), _blocks_of_scales(other, 4)
        both = of_one.keys() & of_other.keys()
        expected = all(of_one[place] == of_other[place] for place in both)
        assert scales.keep_blocks(one, other) == expected, (SEED, one, other)
        counts[expected] += 1
    assert min(counts.values()) > 1000


def _spec(optimizer="adam", state_format="dynamic8"):
    return SessionSpec(
        job="gpt",
        optimizer=infos()[optimizer].kind,
        group_options=(0,),
        parameters=(),
        state_format=_native.STATE_FORMATS[state_format],
    )


def test_what_is_refused():
    halves = [_block("w", (0, 0), (4, 100), (8, 100)), _block("w", (4, 0), (4, 100), (8, 100))]
    whole = _block("w", (0, 0), (8, 100), (8, 100))
    for before, after in ((halves, [whole]), ([whole], halves)):
        sources = Regions([before])
        with pytest.raises(errors.UnimplementedError, match='"w"') as refused:
            scales.check_scales(_spec(), sources, after)
        for text in ("256 elements", "[8, 100] at [0, 0] of [8, 100]", "optctl delete job"):
            assert text in str(refused.value)
        scales.check_scales(_spec(state_format="float32"), sources, after)
        scales.check_scales(_spec("adafactor"), sources, after)  # of a matrix it has none
        scales.check_scales(_spec(), sources, before)
    rows = [_block("w", (0, 0), (4, 256), (8, 256)), _block("w", (4, 0), (4, 256), (8, 256))]
    whole = _block("w", (0, 0), (8, 256), (8, 256))
    scales.check_scales(_spec(), Regions([rows]), [whole])
    scales.check_scales(_spec(), Regions([[whole]]), rows)
