"""Several ranks without optstate: all_reduce over gloo, then torch's fused AdamW.

Each rank is a process of one thread. Two ways:
  replicated  each updates all parameters, as DistributedDataParallel with torch.optim does
  sharded     each updates its 1/N; the all_gather that has to follow is not counted
"""

from __future__ import annotations

import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from native_step import Arrays, Options
from peers import float32_step, torch_mixed, torch_optimizer

MODES = ("sharded", "replicated")
SAMPLE = 4096  # elements that are compared


def _part(arrays: Arrays, begin: int, end: int) -> Arrays:
    part = Arrays.__new__(Arrays)
    part.gradients = [arrays.gradients[0][begin:end]]
    part.parameter, part.master = arrays.parameter[begin:end], arrays.master[begin:end]
    part.state = [state[begin:end] for state in arrays.state]
    return part


def _step_of(arrays: Arrays, options: Options):
    if arrays.parameter.dtype == torch.float32:
        return float32_step(torch_optimizer, [arrays], options, fused=True)
    return torch_mixed(arrays, options, keep_gradient=True)


def _serve(rank: int, ranks: int, numel: int, dtype, options: Options, store: str, pipe) -> None:
    torch.set_num_threads(1)
    # Names the interface, because the name of the machine need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    arrays = Arrays(numel, dtype, seed=rank)
    gradient, original = arrays.gradients[0], arrays.gradients[0].clone()
    shard = _part(arrays, numel * rank // ranks, numel * (rank + 1) // ranks)
    steps = {"sharded": _step_of(shard, options), "replicated": _step_of(arrays, options)}
    while (mode := pipe.recv()) is not None:
        gradient.copy_(original)  # all_reduce left the sum in it
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(gradient)
        steps[mode]()
        seconds = time.perf_counter() - begin
        pipe.send((seconds, arrays.state[0][:SAMPLE].clone().numpy()))
    dist.destroy_process_group()


class GlooRanks:
    """`ranks` processes; rank k has the gradient of Arrays(numel, dtype, seed=k)."""

    def __init__(self, ranks: int, numel: int, dtype: torch.dtype, options: Options) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, ranks, numel, dtype, options, f"{self._folder.name}/store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> GlooRanks:
        return self

    def step(self, mode: str) -> tuple[float, torch.Tensor]:
        """Seconds of the slowest rank, and rank 0's first elements of exp_avg."""
        for pipe in self._pipes:
            pipe.send(mode)
        answers = [pipe.recv() for pipe in self._pipes]
        return max(seconds for seconds, _ in answers), torch.from_numpy(answers[0][1])

    def __exit__(self, *_) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()
        self._folder.cleanup()
