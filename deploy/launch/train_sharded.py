"""The program of the elastic example whose nodes share the optimizer's state out (ZeRO-1).

torchrun starts it once per rank, and starts all ranks anew when nodes come or go. The state of the
former nodes then moves to the present ones as the optimizer is constructed, if each node that has
some of it is still there. A node that is going to leave hands its part over before:

    kill -USR1 PROCESS   # any rank of the node

All ranks then end. Those of the leaving node end well, and its torchrun does so some minutes later,
unless it is killed; torchrun starts the others again.
"""

from __future__ import annotations

import os
import signal
import sys

import optstate
import torch
import torch.distributed as dist

STEPS = int(os.environ.get("STEPS", "200"))
# Steps after which the ranks ask each other whether a node leaves.
ASK_EVERY = 5
# A status by which torchrun starts the ranks again.
START_AGAIN = 75


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch that depends on the step and the rank alone, not on the process."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.randn(32, 16, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


def main() -> None:
    leaves = False

    def leave(*_: object) -> None:
        nonlocal leaves
        leaves = True

    signal.signal(signal.SIGUSR1, leave)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = optstate.AdamW(
        model.named_parameters(), lr=1e-2, job=os.environ["RUN"], across_nodes="sharded"
    )
    first = optimizer.committed_step
    print(
        f"rank {rank} of {dist.get_world_size()}, process {os.getpid()}: goes on at step {first}",
        flush=True,
    )
    for step in range(first, STEPS):
        if step % ASK_EVERY == 0 and optimizer.hand_over(leaves):
            print(f"rank {rank}: the job was handed over at step {step}", flush=True)
            dist.destroy_process_group()
            sys.exit(0 if leaves else START_AGAIN)
        x, y = batch(step, rank)
        loss = torch.nn.functional.mse_loss(parallel(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"rank {rank}: from step {first} to {STEPS}, parameters sum to {total:.12f}", flush=True)
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
