"""Tensors of an accelerator, which is emulated: the bits of tensors in host memory."""

from __future__ import annotations

import os
import signal

import optstate
import pytest
import ranks
import torch
from device_runs import REFUSAL, STEPS, plain, trained
from emulated_device import emulated
from optstate._torch.device import backends, staging
from optstate._torch.device import downloads as downloads_module
from optstate._torch.device import uploads as uploads_module
from optstate._torch.shards import local_of
from programs.drawing import draw
from programs.execution import run
from random_programs import Daemons
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import bits, loss_of, small_model, train

PROGRAMS = 24


@pytest.mark.parametrize("refusal", [None, REFUSAL], ids=["registered", "refused"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_host_memory(seed, daemon, dtype, wire, overlap, refusal):
    options = {"overlap": overlap, "endpoint": getattr(daemon, wire)}
    expected = trained(plain, dtype, **options)
    with emulated(seed) as device:
        device.refuses = refusal
        assert trained(plain, dtype, **options) == expected
        assert device.copies["to_host"] > 0 and device.copies["to_device"] > 0
        assert (device.registrations > 0) == (refusal is None)
        # A closed optimizer holds nothing.
        assert not device.registered and not device.under_way


def test_only_gradients_are_registered_as_writable(device):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    train(model, optimizer, range(1))
    assert sorted(read_only for _, read_only in device.registered.values()) == [False, True]
    assert all(address % 4096 == 0 for address in device.registered)
    assert all(size % 4096 == 0 for size, _ in device.registered.values())
    optimizer.close()


def test_a_refusal_is_said_once_and_why(device, caplog):
    device.refuses = f"a driver of {os.getpid()}"
    for _ in range(2):
        trained(plain)
    said = [each.message for each in caplog.records if device.refuses in each.message]
    assert len(said) == 2  # of gradients, and of parameters
    assert all("staging buffer" in each for each in said)


def test_gradients_larger_than_the_staging_buffers(seed, monkeypatch):
    def with_overlap(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    expected = trained(plain)
    for module in (staging, downloads_module, uploads_module):
        monkeypatch.setattr(module, "SLOT_BYTES", 96)
    for overlap in (False, True):
        with emulated(seed) as device:
            device.refuses = REFUSAL
            assert trained(with_overlap, overlap=overlap) == expected


@pytest.mark.parametrize("refusal", [None, REFUSAL], ids=["registered", "refused"])
def test_random_programs_follow_torchs(seed, refusal):
    daemons = Daemons()
    try:
        for number in range(PROGRAMS):
            program = draw(seed % 100000 + number)
            with emulated(number) as device:
                device.refuses = refusal
                run(program, daemons.endpoints())
    finally:
        daemons.stop()


def test_parameters_of_several_devices(seed, monkeypatch):
    """Each device has its own streams, and their copies are done in any order."""
    expected = trained(plain, overlap=True)
    places = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(backends, "device_of", lambda tensor: places[tensor.numel() > 16])
    with emulated(seed) as device:
        assert trained(plain, overlap=True) == expected
        assert len(device._streams) == 4 + 1  # and of what is fetched from no device of these


@pytest.mark.parametrize(
    "mode", [{"fused": True}, {"overlap": True}, {"accumulate": True}], ids=str
)
def test_grad_scaler(seed, mode):
    def scaled(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(STEPS + 3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 2:
                model[0].weight.grad[3, 3] = float("inf")
            if step == 4:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

    expected = trained(scaled, **mode)
    with emulated(seed):
        assert trained(scaled, **mode) == expected


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
def test_a_missing_gradient_is_not_the_last_one(device, overlap):
    model = small_model(3)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, overlap=overlap)
    train(model, optimizer, range(2))
    for missing in (model[0].weight, model[3].bias):
        before, version = missing.detach().clone(), missing._version
        optimizer.zero_grad()
        missing.requires_grad_(False)
        loss_of(model, 3).backward()
        missing.requires_grad_(True)
        optimizer.step()
        assert torch.equal(missing, before) and missing._version == version
        assert optimizer.fetch_state(missing)["step"] == 2 + (missing is model[3].bias)
    optimizer.close()


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "data"])
def test_weights_loaded_after_construction_are_trained(seed, how, overlap):
    def load_then_train(model, optimizer):
        train(model, optimizer, range(2))
        other = small_model(7)
        if how == "load_state_dict":
            model.load_state_dict(other.state_dict())
        else:
            with torch.no_grad():
                for each, value in zip(model.parameters(), other.parameters()):
                    (each if how == "copy_" else each.data).copy_(value)
        train(model, optimizer, range(2, STEPS))

    expected = trained(load_then_train, overlap=overlap)
    with emulated(seed):
        assert trained(load_then_train, overlap=overlap) == expected


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
def test_parameters_without_elements(device, overlap):
    """Also as the only ones, and as the last: a trailing shard."""
    empty = torch.nn.Parameter(torch.zeros(0, 4))
    for others in ([], [torch.nn.Parameter(torch.ones(5)) for _ in range(2)]):
        optimizer = optstate.AdamW([*others, empty], lr=0.1, overlap=overlap)
        for _ in range(2):
            for each in (*others, empty):
                each.grad = None
                (each * 3).sum().backward()
            optimizer.step()
        assert optimizer.fetch_state(empty)["step"] == 2
        optimizer.close()


def test_construction_keeps_parameters_where_they_are(device, job):
    """Neither a new job nor one that is there makes a second copy on the device."""
    for _ in range(2):
        parameter = torch.nn.Parameter(torch.ones(1 << 20))
        place = parameter.data_ptr()
        optimizer = optstate.AdamW([parameter], job=job)
        assert parameter.data_ptr() == place
        # A new job has these values, so that nothing is copied.
        assert device.copies["to_device"] == (0 if optimizer.committed_step == 0 else 1)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert parameter.data_ptr() == place
        optimizer.close()
        device.copies.clear()


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
def test_an_engine_killed_within_a_step(seed, own_daemon, job, overlap):
    def killed(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            pid = int(own_daemon.optctl("describe", "job", optimizer.job)["engine_pid"])
            if step % 2:
                os.kill(pid, signal.SIGKILL)
            optimizer.step()

    options = {"overlap": overlap, "endpoint": own_daemon.shm}
    expected = trained(killed, job=job, **options)
    with emulated(seed) as device:
        assert trained(killed, job=f"{job}-device", **options) == expected
        # The parameters' memory may be another after each engine's death.
        assert device.registrations == 2 + STEPS // 2


def _train_on_a_device(connection, rank, endpoint, job, options, on_host):
    model = small_model(3)
    options = {"job": job, "endpoint": endpoint, **options}
    is_sharded = options.pop("is_sharded", False)
    own_batches = options.get("reduction") == "daemon"
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

    def train_it():
        optimizer = optstate.AdamW(model.named_parameters(), lr=0.01, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, 2 * step + rank * own_batches).backward()
            if step == 3 and rank == 1 and own_batches:
                model[3].bias.grad = None  # the other rank has one
            optimizer.step()
        optimizer.close()

    if on_host:
        train_it()
    else:
        with emulated(rank):
            train_it()
    return bits(local_of(each) for each in model.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "daemon"},
        {"reduction": "daemon", "overlap": True},
        {"partition": "greedy"},
        {"partition": "contiguous"},
        {"is_sharded": True},
    ],
    ids=str,
)
def test_two_ranks(daemon, job, options):
    found = []
    for on_host_memory in (True, False):
        arguments = (daemon.shm, f"{job}-{on_host_memory}", options, on_host_memory)
        with ranks.running(_train_on_a_device, 2, *arguments) as group:
            found.append(group.results())
    assert found[0] == found[1]
    assert (found[0][0] == found[0][1]) != bool(options.get("is_sharded"))


def test_a_job_that_speculates(seed):
    expected = trained(lambda model, optimizer: train(model, optimizer, range(15)))
    with emulated(seed):
        found = trained(
            lambda model, optimizer: train(model, optimizer, range(15)),
            overlap=True,
            speculative=True,
        )
    assert found == expected


def test_a_forked_child_leaves_the_memory_to_its_parent(device):
    model = small_model(3)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, overlap=True)
    train(model, optimizer, range(2))
    registered = dict(device.registered)
    pid = os.fork()
    if pid == 0:
        try:
            loss_of(model, 2).backward()
            optimizer.close()
            os._exit(0 if device.registered == registered else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    train(model, optimizer, range(2, STEPS))
    optimizer.close()
    assert bits(model.parameters()) == trained(plain, overlap=True)
