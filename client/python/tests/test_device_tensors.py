"""Tensors of an accelerator, which is emulated: the bits of tensors in host memory."""

from __future__ import annotations

import os
import signal

import optstate
import pytest
import ranks
import torch
from emulated_device import emulated
from optstate._torch.device import backends, staging
from optstate._torch.device import downloads as downloads_module
from optstate._torch.device import uploads as uploads_module
from optstate._torch.gradients.pusher import expect_copies
from optstate._torch.parameters import digests
from programs.drawing import draw
from programs.execution import run
from random_programs import Daemons
from training import bits, loss_of, small_model, train

STEPS = 5
PROGRAMS = 24
REFUSAL = "operation not supported"


def on_host(train_it, dtype=torch.float32, **options):
    """Returns the bits after training with tensors in host memory."""
    model = small_model(3, dtype)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, **options)
    train_it(model, optimizer)
    optimizer.close()
    return bits(model.parameters())


def on_device(train_it, dtype=torch.float32, **options):
    """Returns the bits after training within emulated()."""
    model = small_model(3, dtype)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, **options)
    train_it(model, optimizer)
    optimizer.close()
    return bits(model.parameters())


def plain(model, optimizer):
    train(model, optimizer, range(STEPS))


@pytest.fixture
def device(seed):
    with emulated(seed) as backend:
        yield backend


@pytest.mark.parametrize("refusal", [None, REFUSAL], ids=["registered", "refused"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_host_memory(seed, daemon, dtype, wire, overlap, refusal):
    options = {"overlap": overlap, "endpoint": getattr(daemon, wire)}
    expected = on_host(plain, dtype, **options)
    with emulated(seed) as device:
        device.refuses = refusal
        assert on_device(plain, dtype, **options) == expected
        assert device.copies["to_host"] > 0 and device.copies["to_device"] > 0
        assert (device.registrations > 0) == (refusal is None)
        # What is closed holds nothing.
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
        on_device(plain)
    said = [each.message for each in caplog.records if device.refuses in each.message]
    assert len(said) == 2  # of gradients, and of parameters
    assert all("staging buffer" in each for each in said)


def test_gradients_larger_than_the_staging_buffers(seed, monkeypatch):
    def with_overlap(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    expected = on_host(plain)
    for module in (staging, downloads_module, uploads_module):
        monkeypatch.setattr(module, "SLOT_BYTES", 96)
    for overlap in (False, True):
        with emulated(seed) as device:
            device.refuses = REFUSAL
            assert on_device(with_overlap, overlap=overlap) == expected


@pytest.mark.parametrize("refusal", [None, REFUSAL], ids=["registered", "refused"])
def test_backward_waits_for_nothing(device, monkeypatch, refusal):
    """Not even for a staging buffer: what has none is copied in step()."""
    for module in (staging, downloads_module, uploads_module):
        monkeypatch.setattr(module, "SLOT_BYTES", 96)
    monkeypatch.setattr(downloads_module, "BATCH_BYTES", 1)
    device.refuses = refusal
    model = small_model(3)
    optimizer = optstate.AdamW(model.parameters(), overlap=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        device.may_wait = False
        loss.backward()
        device.may_wait = True
        assert device.copies["to_host"] > 0
        optimizer.step()
        device.copies.clear()
    optimizer.close()


def test_gradients_are_pushed_before_changes_are_looked_for(device, monkeypatch):
    """That waits for the whole backward pass: the daemon would have nothing to do meanwhile."""
    under_way = []

    def noting(tensor):
        under_way.append([name for name, _, _ in device.under_way if name == "to_host"])
        return backends.to_list(tensor)

    monkeypatch.setattr(digests, "to_list", noting)
    model = small_model(3)
    optimizer = optstate.AdamW(model.parameters(), overlap=True)
    train(model, optimizer, range(STEPS))
    assert len(under_way) >= STEPS - 1 and not any(under_way)
    optimizer.close()


@pytest.mark.parametrize("how", ["abort_step", "refused"])
def test_copies_of_a_step_that_was_dropped_are_forgotten(device, how):
    """A parameter without a gradient in the next step does not get that one."""
    model = small_model(3)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, overlap=True)
    train(model, optimizer, range(1))
    loss_of(model, 1).backward()
    if how == "abort_step":
        optimizer.abort_step()
    else:
        optimizer.param_groups[0]["lr"] = float("nan")
        model[0].weight.grad = model[0].weight.grad.to_sparse()
        with pytest.raises((optstate.errors.OptstateError, ValueError)):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.abort_step()
    optimizer.zero_grad()
    before = [each.detach().clone() for each in model.parameters()]
    model[0].weight.sum().backward()
    optimizer.step()
    for each, value in zip(model.parameters(), before):
        is_stepped = each is model[0].weight
        assert torch.equal(each, value) != is_stepped
        assert optimizer.fetch_state(each)["step"] == 1 + is_stepped
    optimizer.close()


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


def late_steps(device, model, optimizer, accumulate):
    """Takes steps, and returns the parameters after each, without waiting for the device: it
    computes the gradients late, and reads the parameters late."""
    seen = []
    compute = (lambda work: work()) if device is None else device.compute
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        for is_last in (False, True) if accumulate else (True,):
            optimizer.zero_grad()
            # The gradients do not depend on the parameters, which may be on their way.
            gradients = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
            sum((p * g).sum() for p, g in zip(model.parameters(), gradients)).backward()
            if not is_last:
                optimizer.accumulate_step()
        compute(lambda: seen.append(bits(model.parameters())))  # the former ones, later
        optimizer.step()
        compute(lambda: seen.append(bits(model.parameters())))
    return seen


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulated"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
def test_copies_wait_for_what_is_computed_and_are_awaited(seed, overlap, accumulate):
    """A cast of gradients on the current stream does not race their copy; parameters are read
    only when they are back; and the daemon writes its memory only when that is read."""
    options = {"overlap": overlap, "accumulate": accumulate, "detect_changes": "off"}
    model = small_model(3)
    with optstate.AdamW(model.parameters(), lr=0.01, **options) as optimizer:
        expected = late_steps(None, model, optimizer, accumulate)
    with emulated(seed) as device:
        device.computes_late = True
        model = small_model(3)
        for parameter in model.parameters():  # before the optimizer's hook
            parameter.register_post_accumulate_grad_hook(lambda each: device.late(each.grad))
        with optstate.AdamW(model.parameters(), lr=0.01, **options) as optimizer:
            seen = late_steps(device, model, optimizer, accumulate)
            device.catch_up()
    assert seen == expected


def test_a_value_is_fetched_when_it_is_computed(device):
    for values in ([2.0, 3.0], 4.0):
        tensor = torch.tensor(values)
        device.late(tensor)
        assert backends.to_list(tensor) == values


def test_parameters_of_several_devices(seed, monkeypatch):
    """Each device has its own streams, and their copies are done in any order."""
    expected = on_host(plain, overlap=True)
    places = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(backends, "device_of", lambda tensor: places[tensor.numel() > 16])
    with emulated(seed) as device:
        assert on_device(plain, overlap=True) == expected
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

    expected = on_host(scaled, **mode)
    with emulated(seed):
        assert on_device(scaled, **mode) == expected


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("detect_changes", ["exact", "off"])
def test_a_step_waits_for_copies_alone(seed, overlap, detect_changes):
    """Not even where it clips, scales, looks for changes or finds no gradient."""

    def without_waits(device):
        def train_it(model, optimizer):
            for step in range(STEPS):
                optimizer.zero_grad()
                optimizer.scale(loss_of(model, step)).backward()
                if step > 2:
                    model[3].bias.grad = None
                if device is None:
                    optimizer.step()
                    continue
                with device.forbid_synchronization():
                    optimizer.step()

        return train_it

    scaler = optstate.LossScaler(init_scale=8.0)
    options = {"overlap": overlap, "max_norm": 0.5, "loss_scaler": scaler}
    options["detect_changes"] = detect_changes
    expected = on_host(without_waits(None), **options)
    with emulated(seed) as device:
        assert on_device(without_waits(device), **options) == expected


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

    expected = on_host(load_then_train, overlap=overlap)
    with emulated(seed):
        assert on_device(load_then_train, overlap=overlap) == expected


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


@pytest.mark.parametrize("then", ["no gradient", "load", "close", "backward, close"])
@pytest.mark.parametrize("refusal", [None, REFUSAL], ids=["registered", "refused"])
def test_what_follows_a_step_waits_for_copies_under_way(device, refusal, then):
    """The daemon gets to write its memory then, or it is unmapped."""
    device.computes_late, device.refuses = True, refusal
    model = small_model(3)
    options = {"overlap": True, "detect_changes": "off"}
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, **options)
    train(model, optimizer, range(2))
    if then == "no gradient":
        optimizer.zero_grad()
        optimizer.step()
    elif then == "load":
        optimizer._served.attachment.load(optimizer.param_groups, [])
    elif then == "backward, close":
        sum(each.sum() for each in model.parameters()).backward()
    optimizer.close()
    assert not device.under_way and not device.registered


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
    expected = on_host(killed, job=job, **options)
    with emulated(seed) as device:
        assert on_device(killed, job=f"{job}-device", **options) == expected
        # The parameters' memory may be another after each engine's death.
        assert device.registrations == 2 + STEPS // 2


class Interrupted:
    """Ctrl-C when a stream's event is awaited, or a copy started, for the n-th time."""

    def __init__(self, device, direction, method, number):
        stream = device.stream(torch.device("cpu"), direction)
        original = getattr(stream, method)

        def interrupted(*arguments):
            nonlocal number
            number -= 1
            if number == 0:
                raise KeyboardInterrupt
            return original(*arguments)

        setattr(stream, method, interrupted)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize(
    ("direction", "method"),
    [("to_host", "copy"), ("to_host", "finish"), ("to_host", "record"), ("to_device", "copy")],
)
def test_ctrl_c_in_a_step(seed, direction, method, overlap):
    """The step is taken again, or was taken, and nothing of it is lost or taken twice."""
    expected = {count: on_host(lambda m, o, c=count: train(m, o, [*range(c)])) for count in (5, 6)}
    for number in range(1, 4):
        with emulated(seed) as device:
            model = small_model(3)
            optimizer = optstate.AdamW(model.parameters(), lr=0.01, overlap=overlap)
            train(model, optimizer, range(2))
            Interrupted(device, direction, method, number)
            step = interrupts = 0
            for step in range(2, STEPS):
                while optimizer.committed_step <= step:
                    optimizer.zero_grad()
                    try:
                        loss_of(model, step).backward()
                        optimizer.step()
                    except KeyboardInterrupt:
                        interrupts += 1
            assert interrupts == 1
            assert optimizer.committed_step == STEPS
            optimizer.close()
            assert bits(model.parameters()) == expected[STEPS]


def test_what_ddp_has_of_a_gradient_is_compared_without_waiting(device):
    parameter = torch.nn.Parameter(torch.zeros(100))
    optimizer = optstate.SGD([parameter], lr=1.0, overlap=True)
    for equal, expected in ((True, -1.0), (False, -8.0)):
        parameter.grad = None
        parameter.sum().backward()
        copy = parameter.grad.clone() if equal else torch.full((100,), 7.0)
        device.stream(parameter.device, "to_host").record().finish()
        with device.forbid_synchronization():
            expect_copies([parameter], [copy])
        with torch.no_grad():
            parameter.grad.copy_(copy)  # back from the bucket: a new version
        optimizer.step()
        assert torch.equal(parameter, torch.full((100,), expected))
    optimizer.close()


def _train_on_a_device(connection, rank, endpoint, job, overlap, on_host):
    model = small_model(3)
    options = {"job": job, "endpoint": endpoint, "reduction": "daemon", "overlap": overlap}

    def train_it():
        optimizer = optstate.AdamW(model.named_parameters(), lr=0.01, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, 2 * step + rank).backward()
            if step == 3 and rank == 1:
                model[3].bias.grad = None  # the other rank has one
            optimizer.step()
        optimizer.close()

    if on_host:
        train_it()
    else:
        with emulated(rank):
            train_it()
    return bits(model.parameters())


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
def test_two_ranks(daemon, job, overlap):
    found = []
    for on_host_memory in (True, False):
        arguments = (daemon.shm, f"{job}-{on_host_memory}", overlap, on_host_memory)
        with ranks.running(_train_on_a_device, 2, *arguments) as group:
            found += group.results()
    assert all(each == found[0] for each in found)


def test_a_job_that_speculates(seed):
    expected = on_host(lambda model, optimizer: train(model, optimizer, range(15)))
    with emulated(seed):
        found = on_device(
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
    assert bits(model.parameters()) == on_host_after(device)


def on_host_after(device):
    """Returns the bits of STEPS plain steps, also within emulated()."""
    return on_device(plain, overlap=True)
