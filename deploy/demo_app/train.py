"""One rank of one training run; torchrun starts two.

With --optimizer optstate the same script is a new run and one that goes on:
optimizer.committed_step says where. Rank 0 writes a JSON object a line to --events.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import time

import optstate
import torch
import torch.distributed as dist
from gpt import GPT, width_for
from text import Text
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 4  # sequences a rank
LEARNING_RATE = 1e-3
MAX_NORM = 1.0


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the run, then a cosine down to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def param_groups(model: torch.nn.Module) -> list[dict]:
    """Weight decay for matrices alone."""
    matrices = [pair for pair in model.named_parameters() if pair[1].ndim >= 2]
    others = [pair for pair in model.named_parameters() if pair[1].ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def make_optimizer(arguments: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    groups = param_groups(model)
    if arguments.optimizer == "torch":
        return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    return optstate.AdamW(
        groups,
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        job=arguments.job,
        endpoint=arguments.endpoint,
        max_norm=MAX_NORM,
        placement=arguments.placement,
        host_budget=arguments.host_budget,
        durability=arguments.durability,
        offload_fraction=arguments.offload_fraction,
        sub_group_size=arguments.sub_group_size,
    )


def own_memory() -> int:
    """Bytes of memory that are this process's alone, and no file's."""
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def memory_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, int]:
    """Bytes of training that this process holds, or that the daemon holds for it."""
    if isinstance(optimizer, optstate.ServedOptimizer):
        use = optimizer.memory()
        held = {"state": 0, "parameters": use.copies}
        return {**held, "daemon": use.state + use.parameters, "own": own_memory()}
    entries = [value for entry in optimizer.state.values() for value in entry.values()]
    return {
        "state": sum(value.numel() * value.element_size() for value in entries),
        "parameters": sum(each.numel() * each.element_size() for each in model.parameters()),
        "daemon": 0,
        "own": own_memory(),
    }


def train(arguments: argparse.Namespace, log: Log) -> None:
    text = Text(arguments.text)
    torch.manual_seed(7)
    model = GPT(len(text.characters), width_for(arguments.params))
    parallel = DistributedDataParallel(model)
    begin = time.perf_counter()
    optimizer = make_optimizer(arguments, model)
    attach_s = time.perf_counter() - begin
    first = getattr(optimizer, "committed_step", 0)
    count = sum(parameter.numel() for parameter in model.parameters())
    log.write(event="start", step=first, attach_s=attach_s, parameters=count)
    for step in range(first, arguments.steps):
        characters, following = text.batch(step, dist.get_rank(), BATCH)
        logits = parallel(characters)
        loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments.steps)
        dist.barrier()  # so that waiting for the other rank is not optimizer time
        begin = time.perf_counter()
        if arguments.optimizer == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer_s = time.perf_counter() - begin
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        log.write(event="step", step=step, loss=mean.item(), optimizer_s=optimizer_s)
    log.write(event="memory", **memory_of(optimizer, model))
    if dist.get_rank() == 0:
        start = text.encode("And God said, ")
        sample = model.generate(start, 300, torch.Generator().manual_seed(1))
        log.write(event="sample", text=text.decode(sample))


class Log:
    """Lines that another process reads while they are written; rank 0's alone."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = open(path, "a") if dist.get_rank() == 0 else None

    def write(self, **fields: object) -> None:
        if self._file is not None:
            self._file.write(json.dumps(fields) + "\n")
            self._file.flush()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=["optstate", "torch"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--params", type=float, required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--events", type=pathlib.Path, required=True)
    parser.add_argument("--pids", type=pathlib.Path, required=True, help="folder: a file a rank")
    parser.add_argument("--job")
    parser.add_argument("--endpoint")
    parser.add_argument("--placement")
    parser.add_argument("--host-budget")
    parser.add_argument("--durability")
    parser.add_argument("--offload-fraction", type=float)
    parser.add_argument("--sub-group-size", type=int)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (arguments.pids / str(dist.get_rank())).write_text(str(os.getpid()))
    train(arguments, Log(arguments.events))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
