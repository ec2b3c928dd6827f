"""FullyShardedDataParallel (FSDP1): each rank's flat pieces are its own part of the job."""

from __future__ import annotations

import copy
import os
import pickle
import signal

import optstate
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
from sharded import assert_close

STEPS = 6


def fsdp1(model, **kwargs):
    """Wraps as FSDP1 scripts do: a layer by itself, and the rest."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    kwargs = {"use_orig_params": True, "device_id": torch.device("cpu"), **kwargs}
    model[0] = FullyShardedDataParallel(model[0], **kwargs)
    return FullyShardedDataParallel(model, **kwargs)


def wholes(model, *, gradients=False):
    """The whole parameters, or their gradients, by name. Collective."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model, with_grads=gradients):
        return {
            name.replace("_fsdp_wrapped_module.", ""): (each.grad if gradients else each)
            .detach()
            .clone()
            for name, each in model.named_parameters()
        }


def _assert_alike(mine, theirs):
    """mine, theirs: models with their optimizers."""
    one, other = wholes(mine[0]), wholes(theirs[0])
    assert one.keys() == other.keys()
    assert_close(list(one.values()), list(other.values()))
    # Each rank's pieces; torch has no entry of an empty one either.
    one, other = (each.state_dict()["state"] for _, each in (mine, theirs))
    assert one.keys() == other.keys()
    for index, entry in other.items():
        assert one[index].keys() - {"step"} == entry.keys() - {"step"}
        assert_close([one[index][key] for key in entry], list(entry.values()))


def _beside_torch(connection, rank, endpoint, name, options, wrapping):
    """Trains ours and torch's optimizer on FSDP1 models; and ours, not sharded, with the gradients
    of the first."""
    mine, theirs = (fsdp1(sharded.make_model(), **wrapping) for _ in range(2))
    optimizer = getattr(optstate, name)(
        mine.parameters(), lr=0.01, model=mine, endpoint=endpoint, **options
    )
    reference = getattr(torch.optim, name)(theirs.parameters(), lr=0.01, **options)
    plain = sharded.make_model()
    unsharded = getattr(optstate, name)(
        plain.parameters(), lr=0.01, model=plain, endpoint=endpoint, **options
    )
    for step in range(STEPS):
        sharded.train(theirs, reference, [step])
        optimizer.zero_grad()
        sharded.loss_of(mine, step * dist.get_world_size() + rank).backward()
        whole = wholes(mine, gradients=True)
        for key, each in plain.named_parameters():
            each.grad = whole[key]
        optimizer.step()
        unsharded.step()
    _assert_alike((mine, optimizer), (theirs, reference))
    found = wholes(mine)
    for key, each in plain.named_parameters():
        assert torch.equal(found[key], each)
    norms, expected = optimizer.gradient_norms(), unsharded.gradient_norms()
    assert norms.keys() == expected.keys()
    for key, norm in norms.items():
        assert norm == pytest.approx(expected[key])
    assert optimizer.committed_step == STEPS
    return [each.numel() for each in mine.parameters()]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_trains_as_torch_does(world, daemon):
    sizes = ranks.run(_beside_torch, world, daemon.shm, "AdamW", {}, {})
    if world == 3:  # uneven, empty, and from the middle of a parameter on
        assert [of_rank[0] for of_rank in sizes] == [21, 21, 14]
        assert [of_rank[4] for of_rank in sizes] == [0, 2, 5]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"amsgrad": True, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9}),
        ("Adagrad", {}),
        ("RMSprop", {"centered": True}),
    ],
)
def test_other_optimizers(name, options, daemon):
    ranks.run(_beside_torch, 2, daemon.shm, name, options, {})


def test_flat_parameters(daemon):
    """use_orig_params=False: the parameter is all parameters in a row, of which ranks have equal
    parts."""
    ranks.run(_flat, 3, daemon.shm)


def _flat(connection, rank, endpoint):
    mine, theirs = (fsdp1(sharded.make_model(), use_orig_params=False) for _ in range(2))
    optimizer = optstate.AdamW(mine.parameters(), lr=0.01, model=mine, endpoint=endpoint)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for model, each in ((mine, optimizer), (theirs, reference)):
        sharded.train(model, each, range(STEPS))
    _assert_alike((mine, optimizer), (theirs, reference))
    assert optimizer.gradient_norms().keys() == {"_flat_param", "0._flat_param"}


def _strategies(connection, rank, endpoint):
    """Other ways to shard; each continues with gradients summed under no_sync(), in which FSDP1
    leaves the parameters gathered, or not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for wrapping in (
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh},
        {"mixed_precision": half},
    ):
        mine, theirs = (fsdp1(sharded.make_model(), **wrapping) for _ in range(2))
        optimizer = optstate.AdamW(mine.parameters(), lr=0.01, model=mine, endpoint=endpoint)
        reference = torch.optim.AdamW(theirs.parameters(), lr=0.01)
        for model, each in ((mine, optimizer), (theirs, reference)):
            sharded.train(model, each, range(3))
            each.zero_grad()
            with model.no_sync():
                sharded.loss_of(model, 100 + rank).backward()
            sharded.loss_of(model, 200 + rank).backward()
            each.step()
        one, other = wholes(mine), wholes(theirs)
        # Gradients of bfloat16 differ where the parameters do.
        tolerance = 1e-3 if "mixed_precision" in wrapping else 1e-5
        for key, values in one.items():
            torch.testing.assert_close(values, other[key], rtol=tolerance, atol=tolerance)


def test_other_strategies(daemon):
    ranks.run(_strategies, 4, daemon.shm)


def _used(connection, rank, endpoint, job):
    """Does what else scripts do: clip, accumulate, write in place, add groups, load state."""
    runs = []
    for make in (
        lambda model, params: optstate.AdamW(
            params, lr=0.01, model=model, endpoint=endpoint, job=job, accumulate=True
        ),
        lambda model, params: torch.optim.AdamW(params, lr=0.01),
    ):
        model = fsdp1(sharded.make_model())
        parameters = list(model.parameters())
        optimizer = make(model, parameters[:2])
        is_ours = isinstance(optimizer, optstate.AdamW)
        for step in range(2):
            optimizer.zero_grad()
            sharded.loss_of(model, 2 * step + rank).backward()
            model.clip_grad_norm_(0.05)
            optimizer.step()
        optimizer.add_param_group({"params": parameters[2:], "lr": 0.003})
        optimizer.zero_grad()
        for micro in range(2):
            sharded.loss_of(model, 100 + 10 * micro + rank).backward()
            if is_ours and not micro:
                optimizer.accumulate_step()
        optimizer.step()
        with torch.no_grad():
            parameters[0].mul_(0.5)
            if rank == 1:
                parameters[3].add_(0.25)
        if parameters[0].numel():
            optimizer.state[parameters[0]]["exp_avg"].mul_(rank)
        sharded.train(model, optimizer, [7])
        state = copy.deepcopy(optimizer.state_dict())
        values = model.state_dict()
        sharded.train(model, optimizer, [8, 9])
        model.load_state_dict(values)
        optimizer.load_state_dict(state)
        sharded.train(model, optimizer, [8])
        runs.append((model, optimizer))
    _assert_alike(*runs)


def test_what_scripts_do(daemon, job):
    ranks.run(_used, 2, daemon.shm, job)


def _resumed(connection, rank, endpoint, job, stop):
    model = fsdp1(sharded.make_model(seed=0 if stop else 5))
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, model=model, endpoint=endpoint)
    first = optimizer.committed_step
    for step in range(first, 8):
        if stop and step == 4:
            ranks.say(connection, step)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        sharded.train(model, optimizer, [step])
    reference = fsdp1(sharded.make_model())
    torchs = torch.optim.AdamW(reference.parameters(), lr=0.01)
    sharded.train(reference, torchs, range(8))
    _assert_alike((model, optimizer), (reference, torchs))
    return first


def _elsewhere(connection, rank, endpoint, job):
    model = fsdp1(sharded.make_model())
    with pytest.raises(optstate.FailedPreconditionError) as raised:
        optstate.AdamW(model.parameters(), lr=0.01, job=job, model=model, endpoint=endpoint)
    return str(raised.value)


def test_a_script_that_died_goes_on(daemon, job):
    with ranks.running(_resumed, 2, daemon.shm, job, True) as group:
        assert [group.hear(rank) for rank in range(2)] == [4, 4]
        group.kill(0, 1)
    for said in ranks.run(_elsewhere, 3, daemon.shm, job):
        assert "shards of 2 ranks in the job" in said and "checkpoint" in said
    assert ranks.run(_resumed, 2, daemon.shm, job, False) == [4, 4]


def _copied(connection, rank, endpoint):
    """A copy has plain tensors, which are the same pieces."""
    model = fsdp1(sharded.make_model())
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, model=model, endpoint=endpoint)
    sharded.train(model, optimizer, range(2))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        other.attach()
        for each, its in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"]):
            its.grad = None if each.grad is None else each.grad.clone()
        other.step()
        pairs = zip(optimizer.state_dict()["state"].values(), other.state_dict()["state"].values())
        assert all(int(theirs["step"]) == int(mine["step"]) + 1 for mine, theirs in pairs)
        norms = other.gradient_norms()
        assert norms == pytest.approx(optimizer.gradient_norms())


def test_copies_know_their_pieces(daemon):
    ranks.run(_copied, 2, daemon.shm)


def _train_alike(model, optimizer, steps):
    """Every rank has the same batches, so that they do not depend on the number of ranks."""
    for step in steps:
        optimizer.zero_grad()
        sharded.loss_of(model, step).backward()
        optimizer.step()


def _make(kind, endpoint, form):
    """form: the kind of state_dict, "full" or "sharded". Full ones are of use_orig_params=False:
    with True, torch 2.15 has all arrays of a full state in the same memory on a CPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = fsdp1(sharded.make_model(), use_orig_params=form == "sharded")
    state_dict_type = {
        "full": StateDictType.FULL_STATE_DICT,
        "sharded": StateDictType.SHARDED_STATE_DICT,
    }
    FullyShardedDataParallel.set_state_dict_type(model, state_dict_type[form])
    if kind == "torch":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optstate.AdamW(model.parameters(), lr=0.01, model=model, endpoint=endpoint)


def _save(connection, rank, endpoint, kind, path, form):
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, optimizer = _make(kind, endpoint, form)
    _train_alike(model, optimizer, range(4))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    if form == "sharded":
        models, optimizers = get_state_dict(model, optimizer, options=options)
        save({"model": models, "optimizer": optimizers}, checkpoint_id=path)
        return
    optimizers = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    models = model.state_dict()
    if rank == 0:
        torch.save({"model": models, "optimizer": optimizers}, path)


def _load(connection, rank, endpoint, kind, path, form):
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, optimizer = _make(kind, endpoint, form)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    if form == "sharded":
        models, optimizers = get_state_dict(model, optimizer, options=options)
        state = {"model": models, "optimizer": optimizers}
        load(state, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
    else:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizers = FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, state["optimizer"]
        )
        optimizer.load_state_dict(optimizers)
    for entry in optimizer.state_dict()["state"].values():
        assert int(entry["step"]) == 4
    plain = sharded.make_model()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    _train_alike(plain, reference, range(8))
    _train_alike(model, optimizer, range(4, 8))
    found = wholes(model)
    assert_close([found[name] for name, _ in plain.named_parameters()], list(plain.parameters()))


@pytest.mark.parametrize(
    ("saves", "loads", "worlds", "form"),
    [
        ("optstate", "optstate", (2, 3), "sharded"),
        ("optstate", "torch", (3, 2), "sharded"),
        ("torch", "optstate", (2, 3), "sharded"),
        ("optstate", "optstate", (2, 3), "full"),
        ("optstate", "torch", (2, 2), "full"),
        ("torch", "optstate", (3, 2), "full"),
    ],
)
def test_checkpoints(saves, loads, worlds, form, daemon, tmp_path):
    path = str(tmp_path / "checkpoint")
    ranks.run(_save, worlds[0], daemon.shm, saves, path, form)
    ranks.run(_load, worlds[1], daemon.shm, loads, path, form)


def _refused(connection, rank, endpoint):
    model = fsdp1(sharded.make_model())
    said = {}
    for what, error, make in (
        ("model", TypeError, lambda: optstate.AdamW(model.parameters())),
        (
            "lamb",
            optstate.UnimplementedError,
            lambda: optstate.LAMB(model.parameters(), model=model),
        ),
        (
            "daemon",
            ValueError,
            lambda: optstate.AdamW(model.parameters(), model=model, reduction="daemon"),
        ),
        (
            "overlap",
            ValueError,
            lambda: optstate.AdamW(model.parameters(), model=model, overlap=True),
        ),
    ):
        with pytest.raises(error) as raised:
            make()
        said[what] = str(raised.value)
    optimizer = optstate.AdamW(model.parameters(), model=model, endpoint=endpoint)
    with torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params(model):
        with pytest.raises(TypeError) as raised:
            optimizer.step()
    said["gathered"] = str(raised.value)
    sharded.train(model, optimizer, range(2))
    assert optimizer.committed_step == 2
    return said


def test_refusals(daemon):
    for said in ranks.run(_refused, 2, daemon.shm):
        assert '"0.0"' in said["model"] and "model=" in said["model"]
        assert "an update of lamb needs it whole" in said["lamb"]
        assert "leave reduction out" in said["daemon"] and "leave overlap out" in said["overlap"]
        assert '"0.weight" is now' in said["gathered"]
