"""The program of the example job: data-parallel training over nodes with a daemon each.

torchrun starts it once per rank. DistributedDataParallel averages gradients over all ranks of all
nodes, and every node's daemon takes the same steps: each step on all nodes, or on none. A trainer
that is killed goes on where the job is, with nothing read from disk. A node that has no such job,
because it is new or was rebooted, gets it from another one when the ranks attach. So does one
whose job is older, because pods of the run were on other nodes meanwhile.
"""

from __future__ import annotations

import os

import optstate
import torch
import torch.distributed as dist

STEPS = int(os.environ.get("STEPS", "200"))


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch that depends on the step and the rank alone, not on the process."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.randn(32, 16, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = optstate.AdamW(
        model.named_parameters(),
        lr=1e-2,
        job=os.environ["RUN"],
        across_nodes="replicated",
        stale_nodes="replace",
    )
    first = optimizer.committed_step
    for step in range(first, STEPS):
        x, y = batch(step, rank)
        loss = torch.nn.functional.mse_loss(parallel(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"rank {rank}: from step {first} to {STEPS}, parameters sum to {total:.12f}", flush=True)
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
