"""Programs on two ranks, in lockstep: torch's side averages gradients with all_reduce."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from programs.drawing import draw
from programs.execution import run


def run_programs(_: Any, rank: int, seeds: Sequence[int], endpoints: dict[str, str]) -> int:
    """A rank's part. Returns how many programs it ran; raises at the first that fails.

    What is drawn, and what is refused, is the same on both ranks, so that they stay together;
    a rank that fails leaves the other waiting, until it is killed.
    """
    for seed in seeds:
        program = draw(seed, ranks=dist.get_world_size())
        try:
            attempts = map("pair-{}-{}".format, itertools.repeat(seed), itertools.count())
            run(program, endpoints, name=attempts.__next__)
        except AssertionError as failure:
            raise AssertionError(f"rank {rank}, {failure}\n{program.text()}") from None
        dist.barrier()
    return len(seeds)
