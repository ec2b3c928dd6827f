"""reduction="daemon": the daemon averages what several ranks push, and sums their micro-steps."""

from __future__ import annotations

import os

import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from training import assert_values, loss_of, small_model, values_of


def _local_gradients(connection, rank, endpoint, world_size, steps, kwargs):
    """Each rank has a batch of its own; only the daemon reduces."""
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(), lr=0.01, endpoint=endpoint, reduction="daemon", **kwargs
    )
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step * world_size + rank).backward()
        optimizer.step()
    return values_of(model), optimizer.last_outcome.gradient_norm


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("wire", ["shm", "grpc_tcp"])
def test_the_daemon_averages_in_the_order_of_ranks(wire, world_size, overlap, daemon):
    kwargs = {"max_norm": 0.1, "overlap": overlap}
    results = ranks.run(_local_gradients, world_size, getattr(daemon, wire), world_size, 10, kwargs)
    whole = small_model()
    optimizer = optstate.AdamW(whole.parameters(), lr=0.01, max_norm=0.1)
    for step in range(10):
        sums = None
        for rank in range(world_size):
            optimizer.zero_grad()
            loss_of(whole, step * world_size + rank).backward()
            found = [parameter.grad for parameter in whole.parameters()]
            sums = found if sums is None else [a + b for a, b in zip(sums, found)]
        for parameter, total in zip(whole.parameters(), sums):
            parameter.grad = total / world_size  # a power of two: exact
        optimizer.step()
    assert_values([result[0] for result in results], whole)
    norm = pytest.approx(optimizer.last_outcome.gradient_norm, rel=1e-12)
    assert all(result[1] == norm for result in results)


def _one_rank_has_none(connection, rank, endpoint, overlap):
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(), lr=0.01, endpoint=endpoint, reduction="daemon", overlap=overlap
    )
    for step in range(3):
        optimizer.zero_grad()
        # In the middle step only: what one rank lacked once it has again.
        model[0].bias.requires_grad_(not (step == 1 and rank == 1))
        loss_of(model, 2 * step + rank).backward()
        optimizer.step()
    return values_of(model)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("wire", ["shm", "grpc_tcp"])
def test_a_gradient_that_one_rank_lacks_counts_as_zero(wire, overlap, daemon):
    results = ranks.run(_one_rank_has_none, 2, getattr(daemon, wire), overlap)
    whole = small_model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):  # backward() adds up
            whole[0].bias.requires_grad_(not (step == 1 and rank == 1))
            loss_of(whole, 2 * step + rank).backward()
        whole[0].bias.requires_grad_(True)
        for parameter in whole.parameters():
            parameter.grad /= 2
        optimizer.step()
    for mine, other in zip(results[0], results[1]):
        assert (mine == other).all()
    for mine, theirs in zip(results[0], whole.parameters()):
        torch.testing.assert_close(torch.as_tensor(mine), theirs.detach(), rtol=1e-5, atol=1e-7)


MICRO_STEPS = 3
# Micro-step and rank of which parameter 1 has no gradient.
LACKING = (1, 1)


def _micro_gradients(model, step, micro_step, rank, world_size):
    model.zero_grad()
    loss_of(model, (step * MICRO_STEPS + micro_step) * world_size + rank).backward()


def _take_micro_steps(optimizer, model, step, rank, world_size, before=lambda _: None):
    for micro_step in range(MICRO_STEPS):
        before(micro_step)
        if (micro_step, rank) == LACKING:
            model[0].bias.requires_grad_(False)
        _micro_gradients(model, step, micro_step, rank, world_size)
        model[0].bias.requires_grad_(True)
        if micro_step < MICRO_STEPS - 1:
            optimizer.accumulate_step()
    optimizer.step()


def _local_micro_steps(connection, rank, endpoint, world_size, steps, kwargs):
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(),
        lr=0.01,
        endpoint=endpoint,
        reduction="daemon",
        accumulate=True,
        max_norm=0.1,
        **kwargs,
    )
    for step in range(steps):
        _take_micro_steps(optimizer, model, step, rank, world_size)
    return values_of(model)


def _summed_by_definition(world_size, steps):
    """Over micro-steps, of the sums over ranks in their order, in fp32."""
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, max_norm=0.1)
    for step in range(steps):
        sums = [None] * len(list(model.parameters()))
        for micro_step in range(MICRO_STEPS):
            of_ranks = [None] * len(sums)
            for rank in range(world_size):
                _micro_gradients(model, step, micro_step, rank, world_size)
                for index, parameter in enumerate(model.parameters()):
                    if (micro_step, rank) == LACKING and index == 1:
                        continue
                    grad, sum_ = parameter.grad.clone(), of_ranks[index]
                    of_ranks[index] = grad if sum_ is None else sum_ + grad
            sums = [b if a is None else a + b for a, b in zip(sums, of_ranks)]
        for parameter, total in zip(model.parameters(), sums):
            parameter.grad = total / world_size  # a power of two: exact
        optimizer.step()
    return model


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("wire", ["shm", "grpc_tcp"])
def test_the_daemon_sums_micro_steps_of_ranks(wire, world_size, overlap, daemon):
    results = ranks.run(
        _local_micro_steps,
        world_size,
        getattr(daemon, wire),
        world_size,
        4,
        {"overlap": overlap},
    )
    assert_values(results, _summed_by_definition(world_size, 4))


def _micro_steps_with_a_pause(connection, rank, endpoint, job):
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(),
        lr=0.01,
        endpoint=endpoint,
        job=job,
        reduction="daemon",
        accumulate=True,
        max_norm=0.1,
    )

    def pause(micro_step):
        if rank == 1 and micro_step == 1:
            ranks.say(connection, "rank 0 waits, or is about to")
            connection.recv()

    for step in range(2):
        _take_micro_steps(optimizer, model, step, rank, 2, pause)
    return values_of(model)


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_an_engine_killed_between_micro_steps_is_a_delay(wire, own_daemon, job):
    args = (getattr(own_daemon, wire), job)
    with ranks.running(_micro_steps_with_a_pause, 2, *args) as both:
        for _ in range(2):
            both.hear(1)
            os.kill(int(own_daemon.optctl("describe", "job", job)["engine_pid"]), 9)
            both.connections[1].send("go")
        assert_values(both.results(), _summed_by_definition(2, 2))


def _one_aborts(connection, rank, endpoint):
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(),
        lr=0.01,
        endpoint=endpoint,
        reduction="daemon",
        accumulate=True,
        max_norm=0.1,
    )
    loss_of(model, 77).backward()
    optimizer.accumulate_step()
    dist.barrier()  # rank 0 has it behind it
    told = ""
    if rank == 1:
        optimizer.abort_step()
    dist.barrier()
    if rank == 0:
        loss_of(model, 78).backward()
        try:
            optimizer.accumulate_step()
        except optstate.AbortedError as error:
            told = str(error)
    _take_micro_steps(optimizer, model, 0, rank, 2)
    return values_of(model), told


@pytest.mark.parametrize("wire", ["shm", "grpc_tcp"])
def test_an_aborted_micro_step_takes_the_sums_with_it(wire, daemon):
    results = ranks.run(_one_aborts, 2, getattr(daemon, wire))
    assert "rank 1 was lost or has aborted in step 1" in results[0][1]
    assert_values([values for values, _ in results], _summed_by_definition(2, 1))


def test_overlapping_hooks_take_back_nothing_that_ranks_share():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optstate.SGD([parameter], lr=0.1, overlap=True, accumulate=True, reduction="daemon")
    parameter.square().sum().backward()
    parameter.square().sum().backward()  # adds up in .grad
    with pytest.raises(RuntimeError, match="call accumulate_step"):
        optimizer.accumulate_step()
    optimizer.abort_step()
    optimizer.zero_grad()
    for _ in range(2):
        parameter.square().sum().backward()
        optimizer.accumulate_step()
    optimizer.step()
    assert torch.equal(parameter, torch.full((3,), 1 - 0.1 * 4.0))


def _ddp_with_hook(connection, rank, endpoint, hooked):
    from torch.nn.parallel import DistributedDataParallel

    module = small_model()
    model = DistributedDataParallel(module)
    if hooked:
        model.register_comm_hook(None, optstate.ddp_hook)
    reduction = "daemon" if hooked else "trainer"
    optimizer = optstate.AdamW(module.parameters(), lr=0.01, endpoint=endpoint, reduction=reduction)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, 2 * step + rank).backward()
        optimizer.step()
    return values_of(module)


def test_ddp_with_the_hook_is_ddp(daemon):
    """Two ranks, whose sum is the same in either order."""
    hooked = ranks.run(_ddp_with_hook, 2, daemon.shm, True)
    plain = ranks.run(_ddp_with_hook, 2, daemon.shm, False)
    for mine, theirs in zip(hooked, plain):
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(
                torch.from_numpy(a), torch.from_numpy(b), rtol=1e-6, atol=1e-7
            )
