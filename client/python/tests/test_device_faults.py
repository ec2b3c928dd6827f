"""Faults that other optimizers with offloaded state have had, each looked for here.

A missing gradient that applies the last one again; a model's weights loaded after construction and
overwritten by stale masters; a checkpoint whose masters, moments or counters are not those that
are trained; a trailing shard without elements; construction that has a whole parameter in memory
before it is sharded; a reload that synchronises the device. Others are in
test_device_tensors.py, and the cast that races a copy is in test_device_waits.py.
"""

from __future__ import annotations

import copy
import os
import random
import signal

import optstate
import pytest
import ranks
import sharded
import torch
from daemon import Daemon
from device_runs import STEPS, trained
from emulated_device import emulated
from optstate._torch.shards import local_of
from test_devices import model_of, same, states
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import bits, loss_of, train

# The ways in which the daemon's devices take part: records are copied to them and back, or stay.
SHARES = [
    {"offload_fraction": 0.0},
    {"offload_fraction": 0.3},
    {"offload_fraction": 0.0, "device_budget": "64MiB"},
]


@pytest.fixture(scope="module")
def device_daemon():
    running = Daemon("--devices", "emulated:2")
    yield running
    running.stop()


class Pair:
    """A job that devices share, and one of the CPU, with the same model and the same steps."""

    def __init__(self, daemon, job, share, dtype=torch.bfloat16, extra=()):
        self.models = (model_of(dtype), model_of(dtype))
        self.extras = tuple([torch.nn.Parameter(each.clone()) for each in extra] for _ in range(2))
        self.job = f"{job}-shared"
        self.optimizers = []
        for model, extras, options in zip(self.models, self.extras, (share, {})):
            named = [*model.named_parameters(), *((f"e{i}", e) for i, e in enumerate(extras))]
            name = self.job if options else f"{job}-plain"
            self.optimizers.append(
                optstate.AdamW(named, lr=0.01, job=name, endpoint=daemon.shm, **options)
            )

    def both(self, work):
        """Does the same to both: work(model, optimizer, extras)."""
        for model, optimizer, extras in zip(self.models, self.optimizers, self.extras):
            work(model, optimizer, extras)

    def check(self):
        assert same(*self.models)
        assert states(self.optimizers[0]) == states(self.optimizers[1])

    def close(self):
        for optimizer in self.optimizers:
            optimizer.close()


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_a_missing_gradient_is_not_the_last_one(device_daemon, job, share, seed):
    """Records that stay on a device are brought up to date in host memory from gradients that are
    kept for some steps: one that is missing is not to be found there either."""
    pair = Pair(device_daemon, job, share)
    chosen = random.Random(seed)
    for step in range(14):
        missing = {n for n in range(4) if chosen.random() < 0.4}

        def work(model, optimizer, _, step=step, missing=missing):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            for number in missing:
                list(model.parameters())[number].grad = None
            before = bits(model.parameters())
            optimizer.step()
            after = bits(model.parameters())
            assert all(after[n] == before[n] for n in missing)
            assert all(after[n] != before[n] for n in range(4) if n not in missing)

        pair.both(work)
        if step == 8:
            description = device_daemon.optctl("describe", "job", pair.job)
            os.kill(int(description["engine_pid"]), signal.SIGKILL)
    pair.check()
    pair.close()


@pytest.mark.parametrize("share", SHARES[1:], ids=str)
@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "data"])
@pytest.mark.parametrize("first", [0, 3], ids=["at once", "later"])
def test_loaded_weights_are_trained_and_not_stale_masters(device_daemon, job, share, how, first):
    pair = Pair(device_daemon, job, share)
    torch.manual_seed(9)
    other = [torch.randn(each.shape).to(each.dtype) for each in pair.models[0].parameters()]

    def load(model, optimizer, _):
        train(model, optimizer, range(first))
        if how == "load_state_dict":
            model.load_state_dict(dict(zip(model.state_dict(), other)))
        else:
            with torch.no_grad():
                for each, value in zip(model.parameters(), other):
                    (each if how == "copy_" else each.data).copy_(value)
        optimizer.zero_grad()
        loss_of(model, first).backward()
        optimizer.step()

    pair.both(load)
    for found, value in zip(pair.models[0].parameters(), other):
        # A step of AdamW with this rate moves an element by little more than 0.01.
        assert (found.float() - value.float()).abs().max() < 0.1
    pair.both(lambda model, optimizer, _: train(model, optimizer, range(first + 1, first + 7)))
    pair.check()
    pair.close()


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_a_restored_checkpoint_is_trained_and_not_what_devices_kept(device_daemon, job, share):
    """16-bit parameters have masters, and the float32 ones beside them have none."""
    pair = Pair(device_daemon, job, share, extra=[torch.randn(5000)])

    def work(model, optimizer, extras):
        parameters = [*model.parameters(), *extras]

        def steps(first, last):
            for step in range(first, last):
                optimizer.zero_grad()
                loss = loss_of(model, step) + sum(each.square().sum() for each in extras)
                loss.backward()
                optimizer.step()

        steps(0, 3)
        weights = [each.detach().clone() for each in parameters]
        saved = copy.deepcopy(optimizer.state_dict())
        steps(3, 9)
        expected = bits(parameters), states(optimizer)
        with torch.no_grad():
            for each, value in zip(parameters, weights):
                each.copy_(value)
        with pytest.warns(UserWarning, match="put back"):
            optimizer.load_state_dict(saved)
        assert all(optimizer.fetch_state(each)["step"] == 3 for each in parameters)
        steps(3, 9)
        assert (bits(parameters), states(optimizer)) == expected

    pair.both(work)
    pair.check()
    assert bits(pair.extras[0]) == bits(pair.extras[1])
    pair.close()


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_parameters_without_elements_are_shared_too(device_daemon, job, share):
    pair = Pair(device_daemon, job, share, extra=[torch.zeros(0, 4), torch.zeros(3, 0)])

    def work(model, optimizer, extras):
        for step in range(6):
            optimizer.zero_grad()
            (loss_of(model, step) + sum(each.sum() for each in extras)).backward()
            optimizer.step()
        assert all(optimizer.fetch_state(each)["step"] == 6 for each in extras)

    pair.both(work)
    pair.check()
    pair.close()
    alone = torch.nn.Parameter(torch.zeros(0, 4))
    optimizer = optstate.AdamW([("alone", alone)], endpoint=device_daemon.shm, **share)
    alone.sum().backward()
    optimizer.step()
    assert optimizer.committed_step == 1
    optimizer.close()


def _train_shards(connection, rank, endpoint, job, on_host):
    """Trains a model of which the last rank has no row of the last layers."""
    model = sharded.fsdp(sharded.make_model())

    def train_it():
        optimizer = optstate.AdamW(model.named_parameters(), lr=0.01, job=job, endpoint=endpoint)
        sharded.train(model, optimizer, range(STEPS))
        optimizer.close()

    if on_host:
        train_it()
    else:
        with emulated(rank):
            train_it()
    local = [local_of(each) for each in model.parameters()]
    return bits(local), [each.numel() for each in local]


def test_a_trailing_shard_without_elements_on_a_device(daemon, job):
    found = [
        ranks.run(_train_shards, 3, daemon.shm, f"{job}-{on_host}", on_host)
        for on_host in (True, False)
    ]
    assert found[0] == found[1]
    assert 0 in found[0][2][1] and 0 not in found[0][0][1]


class Allocations(TorchDispatchMode):
    """Notes the largest memory that an operation takes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def storages(values):
            tensors = [each for each in tree_leaves(values) if type(each) is torch.Tensor]
            return {each.untyped_storage().data_ptr(): each for each in tensors}

        before = storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        for address, tensor in storages(result).items():
            if address not in before:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def _construct_sharded(connection, rank, endpoint, job):
    """Returns the largest memory that constructing takes, of a new job and of one that is there,
    the bytes of this rank's shard, and what the probe sees of a whole parameter."""
    taken = []
    for _ in range(2):
        model = sharded.fsdp(torch.nn.Sequential(torch.nn.Linear(512, 1024, bias=False)))
        with Allocations() as allocations:
            optimizer = optstate.AdamW(model.named_parameters(), job=job, endpoint=endpoint)
        taken.append(allocations.largest)
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        optimizer.close()
    shard = local_of(next(model.parameters()))
    with Allocations() as allocations:
        next(model.parameters()).full_tensor()
    return taken, shard.numel() * shard.element_size(), allocations.largest


def test_construction_has_no_whole_parameter_in_memory(daemon, job):
    for taken, shard_bytes, whole_bytes in ranks.run(_construct_sharded, 2, daemon.shm, job):
        assert whole_bytes >= 2 * shard_bytes  # the probe would have seen it
        assert max(taken) <= shard_bytes


@pytest.mark.parametrize("how", ["reload_states", "load_state_dict"])
def test_a_reload_does_not_synchronise_the_device(seed, sleep_daemon, job, how):
    """Waking a job compares its parameters with the device's, and waits for these copies alone, not
    for those of parameters that it starts; loading state waits for nothing."""

    def reloaded(device):
        def train_it(model, optimizer):
            train(model, optimizer, range(2))
            if how == "reload_states":
                optimizer.offload_states()
            else:
                saved = optimizer.state_dict()
            if device is not None:
                device.copies.clear()
                device.may_wait = False
            if how == "reload_states":
                optimizer.reload_states()
            else:
                optimizer.load_state_dict(saved)
            if device is not None:
                device.may_wait = True
                if how == "reload_states":
                    assert set(device.faults) == {"a thread waits for to_host"}
                    assert len(device.faults) <= device.copies["to_host"]
                    device.faults.clear()
                else:
                    assert not device.copies["to_device"]
            train(model, optimizer, range(2, STEPS))

        return train_it

    options = {"endpoint": sleep_daemon.shm, "overlap": True}
    expected = trained(reloaded(None), job=f"{job}-host", **options)
    with emulated(seed) as device:
        assert trained(reloaded(device), job=f"{job}-device", **options) == expected
