"""AdamW with 8-bit state beside bitsandbytes' and torchao's, float32 gradient and parameter."""

from __future__ import annotations

import operator

import eight_bit_check
import torch
from eight_bit_peers import bitsandbytes, torchao_optimizers
from native_step import Arrays, Options, Step
from table import Table, count

# bitsandbytes takes seconds for more, on a CPU.
NUMEL = 1 << 20


def _peer_step(make, arrays: Arrays, options: Options):
    """The step of an optimizer with a parameter of its own; torchao's compiles at its first."""
    parameter = torch.nn.Parameter(arrays.master.clone())
    parameter.grad = arrays.gradients[0]
    optimizer = make(
        [parameter],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
    )
    return optimizer.step


def state8(benchmark) -> None:
    """`benchmark`: of peers_benchmark.py."""
    eight_bit_check.check()
    peers = [
        ("bitsandbytes AdamW8bit", bitsandbytes()[0], "optim.AdamW8bit"),
        ("torchao AdamW8bit", torchao_optimizers()[0], "AdamW8bit"),
    ]
    if not any(peer for _, peer, _ in peers):
        return
    table = Table("8: AdamW with 8-bit state, float32 in and out")
    options = Options()
    for threads in benchmark.arguments.threads:
        arrays = Arrays(NUMEL, torch.float32, state="dynamic8")
        step = Step(benchmark.on_threads(threads), [arrays], options)
        sides = {"optstate": step.update}
        for what, peer, name in peers:
            if peer is not None:
                make = operator.attrgetter(name)(peer)
                sides[what] = _peer_step(make, arrays, options)
        times = benchmark.times(sides, threads)
        for what in list(sides)[1:]:
            table.add(what, count(NUMEL), threads, times, what, None)
        step.close()
