"""fully_shard (FSDP2): each rank's shards are its own part of the job."""

from __future__ import annotations

import copy
import os
import signal

import optstate
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from sharded import assert_close, assert_same_bits, assert_states_close, wholes

STEPS = 8


def _beside_torch(connection, rank, endpoint, name, kwargs):
    """Trains a sharded model with ours and one with torch's; and ours, not sharded, with the
    gradients of the first."""
    mine, theirs = sharded.fsdp(sharded.make_model()), sharded.fsdp(sharded.make_model())
    optimizer = getattr(optstate, name)(
        mine.parameters(), lr=0.01, model=mine, endpoint=endpoint, **kwargs
    )
    reference = getattr(torch.optim, name)(theirs.parameters(), lr=0.01, **kwargs)
    plain = sharded.make_model()
    unsharded = getattr(optstate, name)(
        plain.parameters(), lr=0.01, model=plain, endpoint=endpoint, **kwargs
    )
    world = dist.get_world_size()
    for step in range(STEPS):
        for model, each in ((mine, optimizer), (theirs, reference)):
            each.zero_grad()
            sharded.loss_of(model, step * world + rank).backward()
        for one, other in zip(mine.parameters(), plain.parameters()):
            other.grad = sharded.whole(one.grad).clone()
        for each in (optimizer, reference, unsharded):
            each.step()
    assert_close(wholes(mine), wholes(theirs))
    assert_states_close(sharded.whole_state(optimizer), sharded.whole_state(reference))
    assert_same_bits(wholes(mine), wholes(plain))
    for one, other in zip(sharded.whole_state(optimizer), sharded.whole_state(unsharded)):
        assert_same_bits(list(one.values()), [other[key] for key in one])
    norms, expected = optimizer.gradient_norms(), unsharded.gradient_norms()
    assert norms.keys() == expected.keys()
    for key, norm in norms.items():
        assert norm == pytest.approx(expected[key])
    assert optimizer.last_outcome.gradient_norm == pytest.approx(
        unsharded.last_outcome.gradient_norm
    )
    assert optimizer.committed_step == STEPS
    return [list(each.to_local().shape) for each in mine.parameters()]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_trains_as_torch_does(world, daemon):
    shapes = ranks.run(_beside_torch, world, daemon.shm, "AdamW", {})
    if world == 3:  # uneven, and empty
        assert [of_rank[0][0] for of_rank in shapes] == [3, 3, 1]
        assert [of_rank[5] for of_rank in shapes] == [[1], [0], [0]]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("AdamW", {"amsgrad": True, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9}),
        ("Adagrad", {}),
        ("RMSprop", {"centered": True}),
    ],
)
def test_other_optimizers(name, kwargs, daemon):
    ranks.run(_beside_torch, 2, daemon.shm, name, kwargs)


def test_over_grpc(daemon):
    ranks.run(_beside_torch, 2, daemon.grpc_tcp, "AdamW", {})


def _clipped(connection, rank, endpoint):
    models = [sharded.fsdp(sharded.make_model()) for _ in range(3)]
    in_daemon = optstate.AdamW(models[0].parameters(), lr=0.01, endpoint=endpoint, max_norm=0.05)
    before = optstate.AdamW(models[1].parameters(), lr=0.01, endpoint=endpoint)
    torchs = torch.optim.AdamW(models[2].parameters(), lr=0.01)
    sharded.train(models[0], in_daemon, range(STEPS))
    sharded.train(models[1], before, range(STEPS), max_norm=0.05)
    sharded.train(models[2], torchs, range(STEPS), max_norm=0.05)
    assert in_daemon.last_outcome.clip_coefficient < 1
    expected = wholes(models[2])
    for model in models[:2]:
        assert_close(wholes(model), expected)


def test_gradients_are_clipped_by_the_norm_of_all_shards(daemon):
    ranks.run(_clipped, 3, daemon.shm)


def _mixed_precision(connection, rank, endpoint):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [sharded.fsdp(sharded.make_model(), mp_policy=policy) for _ in range(2)]
    optimizer = optstate.AdamW(models[0].parameters(), lr=0.01, endpoint=endpoint)
    reference = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    sharded.train(models[0], optimizer, range(STEPS))
    sharded.train(models[1], reference, range(STEPS))
    for one, other in zip(wholes(models[0]), wholes(models[1])):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)  # gradients of bfloat16


def test_mixed_precision(daemon):
    ranks.run(_mixed_precision, 2, daemon.shm)


def _accumulated(connection, rank, endpoint):
    models = [sharded.fsdp(sharded.make_model()) for _ in range(2)]
    optimizer = optstate.AdamW(models[0].parameters(), lr=0.01, endpoint=endpoint, accumulate=True)
    reference = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    for step in range(4):
        reference.zero_grad()
        for micro in range(3):
            batch = 100 * step + 10 * micro + rank
            sharded.loss_of(models[0], batch).backward()
            sharded.loss_of(models[1], batch).backward()
            if micro < 2:
                optimizer.accumulate_step()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    assert_close(wholes(models[0]), wholes(models[1]))


def test_micro_steps(daemon):
    ranks.run(_accumulated, 2, daemon.shm)


def _sixteen_bits(connection, rank, endpoint, master):
    model = sharded.fsdp(sharded.make_model(dtype=torch.bfloat16))
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, endpoint=endpoint, master=master)
    plain = sharded.make_model(dtype=torch.bfloat16)
    unsharded = optstate.AdamW(plain.parameters(), lr=0.01, endpoint=endpoint, master=master)
    for step in range(STEPS):
        optimizer.zero_grad()
        sharded.loss_of(model, 2 * step + rank).backward()
        for one, other in zip(model.parameters(), plain.parameters()):
            other.grad = sharded.whole(one.grad).clone()
        optimizer.step()
        unsharded.step()
    assert_same_bits(wholes(model), wholes(plain))
    for one, other in zip(sharded.whole_state(optimizer), sharded.whole_state(unsharded)):
        assert "master_param" in one
        assert_same_bits(list(one.values()), [other[key] for key in one])
    # A write in place goes to the job, with its master.
    with torch.no_grad():
        for each in (*model.parameters(), *plain.parameters()):
            each.mul_(0.5)
    masters = [
        [entry["master_param"] for entry in sharded.whole_state(each)]
        for each in (optimizer, unsharded)
    ]
    assert_same_bits(*masters)
    assert optimizer.load_state_dict(optimizer.state_dict()) is None


@pytest.mark.parametrize("master", ["float32", "split"])
def test_sixteen_bits(master, daemon):
    ranks.run(_sixteen_bits, 2, daemon.shm, master)


def _written(connection, rank, endpoint):
    """Writes that only one rank's shard shows reach the job, and the others take no other step."""
    model, other = sharded.fsdp(sharded.make_model()), sharded.fsdp(sharded.make_model())
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, endpoint=endpoint)
    reference = torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in range(4):
        for each, of in ((model, optimizer), (other, reference)):
            sharded.train(each, of, [step])
            with torch.no_grad():
                if step == 0:
                    each[3].bias.fill_(0.25)  # one element, on rank 0
                elif step == 1 and rank == 1:
                    each[0].weight.to_local().mul_(0.5)
                elif step == 2:
                    each[0].weight.mul_(2)
    assert_close(wholes(model), wholes(other))
    # State that is written in place on one rank alone.
    for each, of in ((model, optimizer), (other, reference)):
        moment = of.state[each[0].weight]["exp_avg"]
        assert moment.placements == each[0].weight.placements
        if rank == 1:
            moment.to_local().mul_(3)
        sharded.train(each, of, [5])
    assert_close(wholes(model), wholes(other))
    assert_states_close(sharded.whole_state(optimizer), sharded.whole_state(reference))


def test_what_one_rank_writes(daemon):
    ranks.run(_written, 2, daemon.shm)


def _extended(connection, rank, endpoint, job):
    model, other = sharded.fsdp(sharded.make_model()), sharded.fsdp(sharded.make_model())
    runs = []
    for each, make in (
        (model, lambda params: optstate.AdamW(params, lr=0.01, endpoint=endpoint, job=job)),
        (other, lambda params: torch.optim.AdamW(params, lr=0.01)),
    ):
        optimizer = make(list(each[0].parameters()))
        sharded.train(each, optimizer, range(3))
        optimizer.add_param_group(
            {"params": [*each[2].parameters(), *each[3].parameters()], "lr": 0.003}
        )
        sharded.train(each, optimizer, range(3, 6))
        runs.append(optimizer)
    assert_close(wholes(model), wholes(other))
    assert_states_close(*map(sharded.whole_state, runs))
    return runs[0].committed_step


def test_add_param_group(daemon, job):
    assert ranks.run(_extended, 2, daemon.shm, job) == [6, 6]


def _frozen(connection, rank, endpoint, job):
    """A parameter that is frozen at first joins the job; a second script freezes others."""
    model, other = sharded.make_model(), sharded.make_model()
    for each in (model, other):
        each[0].weight.requires_grad_(False)
        sharded.fsdp(each)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, endpoint=endpoint, job=job, model=model)
    reference = torch.optim.AdamW(other.parameters(), lr=0.01)
    for each, of in ((model, optimizer), (other, reference)):
        sharded.train(each, of, range(3))
        each[0].weight.requires_grad_(True)
        sharded.train(each, of, range(3, 6))
    assert_close(wholes(model), wholes(other))
    optimizer.close()
    model = sharded.fsdp(sharded.make_model(1))
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, endpoint=endpoint, job=job, model=model)
    assert optimizer.committed_step == 6
    assert_close(wholes(model), wholes(other))


def test_frozen_parameters(daemon, job):
    ranks.run(_frozen, 2, daemon.shm, job)


def _resumed(connection, rank, endpoint, job, stop):
    model = sharded.fsdp(sharded.make_model(seed=0 if stop else 5))
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, model=model, endpoint=endpoint)
    first = optimizer.committed_step
    for step in range(first, 10):
        if stop and step == 4:
            ranks.say(connection, step)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        sharded.train(model, optimizer, [step])
    reference = sharded.fsdp(sharded.make_model())
    torchs = torch.optim.AdamW(reference.parameters(), lr=0.01)
    sharded.train(reference, torchs, range(10))
    assert_close(wholes(model), wholes(reference))
    assert_states_close(sharded.whole_state(optimizer), sharded.whole_state(torchs))
    return first


@pytest.mark.parametrize("kills_daemon", [False, True])
def test_a_script_that_died_goes_on(own_daemon, job, kills_daemon):
    """Its masters are the job's, whatever the new script's model begins with."""
    with ranks.running(_resumed, 2, own_daemon.shm, job, True) as group:
        assert [group.hear(rank) for rank in range(2)] == [4, 4]
        group.kill(0, 1)
    if kills_daemon:
        own_daemon.kill()
        own_daemon.start()
    assert ranks.run(_resumed, 2, own_daemon.shm, job, False) == [4, 4]


def _facts(connection, rank, endpoint, job):
    model = sharded.fsdp(sharded.make_model())
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, model=model, endpoint=endpoint)
    sharded.train(model, optimizer, [0])
    copied = copy.deepcopy(optimizer.state_dict())
    memory = optimizer.memory()
    optimizer.close()
    return len(copied["state"]), memory.parameters, memory.makes_gradient_views


def test_optctl_shows_shards(daemon, job):
    results = ranks.run(_facts, 3, daemon.shm, job)
    assert [result[0] for result in results] == [6, 6, 6]
    assert sum(result[1] for result in results) == 4 * (7 * 8 + 3 * 7 + 7 + 1)
    assert not any(result[2] for result in results)
    parameters = daemon.parameters(job)
    assert [each["name"] for each in parameters[:3]] == [f"0.weight@{rank}" for rank in range(3)]
    assert parameters[2]["shard"] == {"owner": 2, "global_shape": ["7", "8"], "offset": ["6", "0"]}
    assert daemon.optctl("describe", "job", job)["partition"] == "PARTITION_MODE_LOCAL"
