"""The program of the example job: data-parallel training over nodes with a daemon each.

torchrun starts it once per rank. DistributedDataParallel averages gradients over all ranks of all
nodes; the ranks of one node share the job that their node's daemon keeps. A trainer that is killed
goes on where the job is, with nothing read from disk.
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


def steps_taken(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return int(optimizer.fetch_state(next(model.parameters())).get("step", 0))


def agree(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Brings nodes that are behind to the state of one that is not; returns the steps taken.

    A node is behind when it is new to the run or was rebooted, or by one step when a trainer was
    killed between the commits of two nodes.
    """
    mine = steps_taken(model, optimizer)
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, mine)
    first = max(steps)
    if min(steps) == first:
        return first
    leader = steps.index(first)
    # Collective over the ranks of a node, so all of them ask; the leader's is sent.
    state = [optimizer.state_dict()]
    dist.broadcast_object_list(state, src=leader)
    with torch.no_grad():
        for parameter in model.parameters():
            value = parameter.detach().clone()
            dist.broadcast(value, src=leader)
            if mine != first:
                parameter.copy_(value)
    if mine != first:
        optimizer.load_state_dict(state[0])
        print(f"rank {dist.get_rank()}: brought from step {mine} to {first}", flush=True)
    return first


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # torchrun numbers the ranks of a node one after another.
    node_ranks, _ = dist.new_subgroups(group_size=int(os.environ["LOCAL_WORLD_SIZE"]))
    model = make_model()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = optstate.AdamW(
        model.parameters(),
        lr=1e-2,
        model=model,
        job=f"{os.environ['RUN']}-{os.environ['NODE_NAME']}",
        process_group=node_ranks,
    )
    first = agree(model, optimizer)
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
