"""torch.distributed.checkpoint of sharded jobs: at other world sizes, and to and from torch."""

from __future__ import annotations

import warnings

import optstate
import pytest
import ranks
import sharded
import torch
import torch.distributed.checkpoint as dcp
from sharded import assert_close, assert_same_bits, assert_states_close, wholes
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

CHAIN_LR = 0.02


def _make(kind, endpoint, job, dtype=torch.float32, **kwargs):
    model = sharded.fsdp(sharded.make_model(seed=0, dtype=dtype))
    if kind == "torch":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, **kwargs)
    return model, optstate.AdamW(
        model.parameters(), lr=0.01, model=model, endpoint=endpoint, job=job, **kwargs
    )


def _save(connection, rank, endpoint, job, kind, path, steps):
    """Trains and saves; every rank has the same batches, so that they do not depend on ranks."""
    model, optimizer = _make(kind, endpoint, job)
    _train_alike(model, optimizer, range(steps))
    _save_to(model, optimizer, path)


def _save_to(model, optimizer, path):
    models, optimizers = get_state_dict(model, optimizer)
    dcp.save({"model": models, "optimizer": optimizers}, checkpoint_id=path)


def _train_alike(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        sharded.loss_of(model, step).backward()
        optimizer.step()


def _load_from(model, optimizer, path):
    models, optimizers = get_state_dict(model, optimizer)
    state = {"model": models, "optimizer": optimizers}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def _load(connection, rank, endpoint, job, kind, path, steps):
    model, optimizer = _make(kind, endpoint, job)
    # Parameters that dcp.load() writes leave no trace, and are the checkpoint's.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without a trace", category=UserWarning)
        _load_from(model, optimizer, path)
        loaded = sharded.whole_state(optimizer)
    _train_alike(model, optimizer, steps)
    values = [each.numpy() for each in wholes(model)]
    return values, [{key: each.numpy() for key, each in entry.items()} for entry in loaded]


def _reference(steps):
    model = sharded.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train_alike(model, optimizer, range(steps))
    return model, optimizer


def _tensors(arrays):
    return [torch.from_numpy(each) for each in arrays]


@pytest.mark.parametrize(
    ("saves", "loads", "worlds"),
    [
        ("optstate", "optstate", (2, 3)),
        ("optstate", "optstate", (3, 1)),
        ("optstate", "torch", (3, 2)),
        ("torch", "optstate", (2, 3)),
    ],
)
def test_distributed_checkpoints(saves, loads, worlds, daemon, job, tmp_path):
    path = str(tmp_path / "checkpoint")
    ranks.run(_save, worlds[0], daemon.shm, job, saves, path, 4)
    model, optimizer = _reference(4)
    states = [dict(entry) for entry in optimizer.state_dict()["state"].values()]
    results = ranks.run(_load, worlds[1], daemon.shm, f"{job}-next", loads, path, range(4, 8))
    for _, loaded in results:
        found = [{k: torch.from_numpy(each) for k, each in entry.items()} for entry in loaded]
        assert_states_close(found, states)
    model, _ = _reference(8)
    for values, _ in results:
        assert_close(_tensors(values), list(model.parameters()))


def _continue(connection, rank, endpoint, job, kind, paths, steps):
    """Goes on from the first path, unless it is None, and saves to the second one. Returns the
    values and the whole state that it has then."""
    model, optimizer = _make(kind, endpoint, job)
    loads, saves = paths
    if loads is None:
        optimizer.param_groups[0]["lr"] = CHAIN_LR  # which the others have from the checkpoint
    else:
        _load_from(model, optimizer, loads)
        assert float(optimizer.param_groups[0]["lr"]) == CHAIN_LR
    _train_alike(model, optimizer, steps)
    _save_to(model, optimizer, saves)
    values = [each.numpy() for each in wholes(model)]
    state = sharded.whole_state(optimizer)
    return values, [{key: each.numpy() for key, each in entry.items()} for entry in state]


@pytest.mark.parametrize(
    "kinds", [("torch", "optstate", "torch"), ("optstate", "torch", "optstate")], ids="-".join
)
def test_a_chain_of_checkpoints(kinds, daemon, job, tmp_path):
    """Each world goes on from the checkpoint of the one before, which another class has saved."""
    reference = sharded.make_model()
    whole = torch.optim.AdamW(reference.parameters(), lr=CHAIN_LR)
    path = None
    for number, (kind, world) in enumerate(zip(kinds, (4, 2, 3))):
        steps = range(4 * number, 4 * (number + 1))
        paths = path, str(tmp_path / str(number))
        results = ranks.run(_continue, world, daemon.shm, f"{job}-{number}", kind, paths, steps)
        _train_alike(reference, whole, steps)
        for values, state in results:
            assert_close(_tensors(values), list(reference.parameters()))
            found = [{k: torch.from_numpy(each) for k, each in entry.items()} for entry in state]
            assert_states_close(found, list(whole.state_dict()["state"].values()))
        path = paths[1]


def _round_trip(connection, rank, endpoint, job):
    """state_dict() has torch's form, and loads into the same job, another one, and torch."""
    model, optimizer = _make("optstate", endpoint, job)
    other, reference = _make("torch", None, None)
    _train_alike(model, optimizer, range(3))
    _train_alike(other, reference, range(3))
    mine, theirs = optimizer.state_dict(), reference.state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    for index, entry in theirs["state"].items():
        assert mine["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            found = mine["state"][index][key]
            assert type(found) is type(value) and found.shape == value.shape
            assert found.dtype == value.dtype
            if hasattr(value, "placements"):
                assert found.placements == value.placements
                assert found.device_mesh == value.device_mesh
                assert found.to_local().shape == value.to_local().shape
    before = sharded.whole_state(optimizer)
    optimizer.load_state_dict(mine)
    for one, entry in zip(sharded.whole_state(optimizer), before):
        assert_same_bits(list(one.values()), list(entry.values()))
    reference.load_state_dict(mine)
    third, again = _make("optstate", endpoint, f"{job}-again")
    third.load_state_dict(model.state_dict())
    again.load_state_dict(reference.state_dict())
    for each, of in ((model, optimizer), (third, again)):
        _train_alike(each, of, range(3, 6))
    assert_same_bits(wholes(third), wholes(model))
    # The load has changed nothing that was taken out before.
    for one, entry in zip(mine["state"].values(), before):
        assert_same_bits([sharded.whole(value) for value in one.values()], list(entry.values()))


def test_state_dict(daemon, job):
    ranks.run(_round_trip, 3, daemon.shm, job)


def _full(connection, rank, endpoint, job):
    """A full state_dict, as of one process, is loaded shard by shard."""
    plain, trained = _reference(4)
    full = trained.state_dict()
    model, optimizer = _make("optstate", endpoint, job)
    model.load_state_dict(
        {
            name: _like(value, parameter)
            for (name, value), parameter in zip(plain.state_dict().items(), model.parameters())
        }
    )
    optimizer.load_state_dict(full)
    _train_alike(model, optimizer, range(4, 8))
    assert_close(wholes(model), list(_reference(8)[0].parameters()))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_optimizer_state_dict(model, optimizer, options=options)
    if rank == 0:
        expected = _reference(8)[1].state_dict()["state"]
        names = [name for name, _ in model.named_parameters()]
        for index, name in enumerate(names):
            for key, value in expected[index].items():
                torch.testing.assert_close(
                    gathered["state"][name][key], value, rtol=1e-5, atol=2e-6
                )
    model, optimizer = _make("optstate", endpoint, f"{job}-full")
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, gathered, options=broadcast)
    assert [int(entry["step"]) for entry in optimizer.state_dict()["state"].values()] == [8] * 6


def _like(value, parameter):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def test_full_state_dicts(daemon, job):
    ranks.run(_full, 2, daemon.shm, job)


def _checkpoint_before_the_optimizer(connection, rank, endpoint, job):
    """As frameworks do: the model's checkpoint, the optimizer, which attaches to a job that has
    gone further, then the optimizer's checkpoint, which puts the job back."""
    model, optimizer = _make("optstate", endpoint, job)
    _train_alike(model, optimizer, range(2))
    models, states = model.state_dict(), optimizer.state_dict()
    models = {name: value.detach().clone() for name, value in models.items()}
    _train_alike(model, optimizer, range(2, 5))
    optimizer.close()
    model = sharded.fsdp(sharded.make_model(seed=9))
    model.load_state_dict(models)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, model=model, endpoint=endpoint, job=job)
    assert optimizer.committed_step == 5
    with pytest.warns(UserWarning, match="put back"):
        optimizer.load_state_dict(states)
    _train_alike(model, optimizer, range(2, 4))
    assert_close(wholes(model), list(_reference(4)[0].parameters()))


def test_a_checkpoint_puts_the_job_back(daemon, job):
    ranks.run(_checkpoint_before_the_optimizer, 2, daemon.shm, job)
