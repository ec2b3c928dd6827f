"""Tensors on a GPU: the bits of tensors in host memory, without a wait for the device.

tests/gpu/run runs this file on a machine with a GPU. Everywhere else it is skipped, and
test_device_tensors.py runs the same paths with an emulated device.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics

import optstate
import pytest
import torch
from optstate import _native
from optstate._torch.device import backends, host_memory
from optstate._torch.device.cuda import CudaBackend
from optstate._torch.device.interface import NotRegistered
from optstate._torch.tensors import equal_bits, memory_view
from optstate.session import Session
from optstate.session_spec import ParameterSpec, SessionSpec
from optstate.session_tensors import SessionTensors
from training import loss_of, small_model

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no GPU, so nothing of this has run here"
)

STEPS = 4
# Cycles for which torch.cuda._sleep() keeps a stream busy: some tens of milliseconds.
BUSY = 50_000_000
SHAPES = [(), (1,), (7, 3), (4097,), (300, 333), (0, 5), ((1 << 22) + 5,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])


def same_bits(ours, theirs):
    """Returns whether tensors have the same bits, wherever they are."""
    return all(equal_bits(one, other) for one, other in zip(ours, theirs))


@contextlib.contextmanager
def no_synchronization():
    """Within, whatever waits for the whole device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Pair:
    """Parameters on a GPU, and the same in host memory with the same gradients."""

    def __init__(self, shapes, dtype=torch.float32, device="cuda", name="AdamW", **options):
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.ours = [torch.nn.Parameter(each.to(device)) for each in values]
        self.theirs = [torch.nn.Parameter(each.clone()) for each in values]
        make = getattr(optstate, name)
        self.optimizer = make(self.ours, lr=0.01, **options)
        options.pop("job", None)
        self.reference = make(self.theirs, lr=0.01, **options)
        self._generator = generator

    def backward(self, missing=(), busy=False):
        """Makes gradients on the GPU, late if it is `busy`."""
        for index, (ours, theirs) in enumerate(zip(self.ours, self.theirs)):
            ours.grad = theirs.grad = None
            if index in missing:
                continue
            gradient = torch.randn(ours.shape, generator=self._generator).to(ours.dtype)
            on_device = gradient.to(ours.device)
            if busy:
                torch.cuda._sleep(BUSY // 10)
            # The product is computed after the sleep, in the current stream.
            (ours * on_device).sum().backward()
            (theirs * gradient).sum().backward()

    def step(self, missing=(), busy=False, check=True, may_wait=False):
        self.backward(missing, busy)
        with contextlib.nullcontext() if may_wait else no_synchronization():
            self.optimizer.step()
        self.reference.step()
        if check:
            self.check()

    def check(self):
        assert same_bits(self.ours, self.theirs)

    def close(self):
        self.optimizer.close()
        self.reference.close()


@OVERLAP
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Adafactor"])
def test_bits_are_those_of_host_memory(name, dtype, overlap):
    shapes = [each for each in SHAPES if each] if name == "Adafactor" else SHAPES
    pair = Pair(shapes, dtype, name=name, overlap=overlap)
    for step in range(STEPS):
        pair.step(missing=() if step < 2 else (1, 4))
    pair.close()


@OVERLAP
def test_over_grpc(daemon, overlap):
    pair = Pair(SHAPES, endpoint=daemon.grpc_unix, overlap=overlap)
    for _ in range(STEPS):
        pair.step()
    pair.close()


@OVERLAP
def test_a_busy_device_is_waited_for(overlap):
    """Gradients are copied when they are computed; parameters are read when they are back."""
    pair = Pair([(1 << 20,), (1000,)] * 3, overlap=overlap)
    seen = []
    for _ in range(STEPS):
        pair.step(busy=True, check=False)
        # The copies await nothing but the current stream, as the next forward pass does.
        seen.append([[each.detach().clone() for each in side] for side in (pair.ours, pair.theirs)])
    for ours, theirs in seen:
        assert same_bits(ours, theirs)
    pair.close()


@OVERLAP
def test_a_current_stream_that_is_not_the_default(overlap):
    pair = Pair(SHAPES, overlap=overlap)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(STEPS):
            pair.step(busy=True)
    pair.close()


def test_memory_is_registered_and_released(caplog):
    pair = Pair(SHAPES)
    pair.step()
    session = pair.optimizer._served.attachment.session
    address, size = session.parameter(4)
    gradient = session.gradient_addresses()[4]
    for each in (address, gradient):
        assert memory_view(each, size // 4, torch.float32).is_pinned()
    # A driver that does not register read-only memory says so, once, and copies are staged.
    assert not [each for each in caplog.records if "staging" in each.message]
    pair.close()


@OVERLAP
def test_where_the_driver_registers_nothing(monkeypatch, caplog, overlap):
    def refuse(*_, **__):
        raise NotRegistered("it refuses")

    monkeypatch.setattr(host_memory, "_said", set())
    monkeypatch.setattr(CudaBackend, "register", refuse)
    pair = Pair([*SHAPES, (3, (1 << 20) + 1)], overlap=overlap)
    for _ in range(STEPS):
        pair.step()
    assert sum("it refuses" in each.message for each in caplog.records) == 2
    pair.close()


def test_an_error_of_the_driver_is_not_the_scripts():
    backend = backends.backend_of(torch.zeros(1, device="cuda"))
    with pytest.raises(NotRegistered, match="cudaHost"):
        backend.register(4096, 4096, read_only=False)  # nothing is mapped there
    torch.zeros(10, device="cuda").add_(1)
    torch.cuda.synchronize()


@OVERLAP
def test_parameters_with_other_strides(overlap):
    values = torch.randn(40, 30)
    ours = torch.nn.Parameter(values.cuda().t())
    theirs = torch.nn.Parameter(values.t().contiguous())
    optimizer = optstate.AdamW([ours], overlap=overlap)
    reference = optstate.AdamW([theirs])
    for _ in range(STEPS):
        gradient = torch.randn(30, 40)
        ours.grad, theirs.grad = gradient.cuda(), gradient.clone()
        optimizer.step()
        reference.step()
        assert same_bits([ours], [theirs])
    optimizer.close()
    reference.close()


@pytest.mark.parametrize("mode", [{}, {"fused": True}, {"overlap": True}], ids=str)
def test_grad_scaler(mode):
    found = []
    for make in (optstate.AdamW, torch.optim.AdamW):
        model = small_model(3).cuda()
        optimizer = make(
            model.parameters(), lr=0.01, **(mode if make is optstate.AdamW else {"fused": True})
        )
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(loss_on(model, step)).backward()
            if step == 3:
                model[0].weight.grad[3, 3] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        found.append((scaler.get_scale(), [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    for ours, torchs in zip(found[0][1], found[1][1]):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)


def loss_on(model, step):
    generator = torch.Generator().manual_seed(1000 + step)
    parameter = next(model.parameters())
    batch = torch.randn(32, 8, generator=generator).to(parameter.device, parameter.dtype)
    return (model(batch).float() - batch[:, :4].float().sin()).square().mean()


@OVERLAP
def test_as_torchs_with_a_scaler_and_clipping_in_the_daemon(overlap):
    """Without a wait for the device in step()."""
    ours, torchs = small_model(3).cuda(), small_model(3).cuda()
    scaler = optstate.LossScaler(init_scale=64.0)
    options = {"max_norm": 0.5, "loss_scaler": scaler, "overlap": overlap}
    optimizer = optstate.AdamW(ours.parameters(), lr=0.01, **options)
    reference = torch.optim.AdamW(torchs.parameters(), lr=0.01)
    for step in range(10):
        optimizer.zero_grad()
        optimizer.scale(loss_on(ours, step)).backward()
        with no_synchronization():
            optimizer.step()
        reference.zero_grad()
        loss_on(torchs, step).backward()
        torch.nn.utils.clip_grad_norm_(torchs.parameters(), 0.5)
        reference.step()
    for one, other in zip(ours.parameters(), torchs.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    optimizer.close()


@OVERLAP
def test_micro_steps(overlap):
    pair = Pair(SHAPES, accumulate=True, overlap=overlap)
    for _ in range(STEPS):
        pair.backward(busy=True)
        pair.optimizer.accumulate_step()
        pair.reference.accumulate_step()
        pair.step(busy=True)
    pair.close()


@OVERLAP
def test_weights_loaded_after_construction_are_trained(overlap):
    pair = Pair(SHAPES, overlap=overlap)
    for _ in range(STEPS):  # after some, the digests that find changes are one launch
        pair.step()
    with torch.no_grad():
        for number, (ours, theirs) in enumerate(zip(pair.ours, pair.theirs)):
            values = torch.randn(ours.shape)
            (ours if number % 2 else ours.data).copy_(values)
            theirs.copy_(values)
    pair.step(may_wait=True)  # the values go to the daemon
    for _ in range(STEPS):
        pair.step()
    pair.close()


@OVERLAP
def test_torch_compile(overlap):
    ours, theirs = small_model(3).cuda(), small_model(3).cuda()
    compiled = torch.compile(ours)
    optimizer = optstate.AdamW(ours.parameters(), lr=0.01, overlap=overlap)
    reference = optstate.AdamW(theirs.parameters(), lr=0.01, overlap=not overlap)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_on(compiled, step).backward()
        for one, other in zip(ours.parameters(), theirs.parameters()):
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
        assert same_bits(ours.parameters(), theirs.parameters())
    optimizer.close()
    reference.close()


@OVERLAP
def test_an_engine_killed_between_and_within_steps(own_daemon, job, overlap):
    pair = Pair(SHAPES, endpoint=own_daemon.shm, job=job, overlap=overlap)
    for _ in range(STEPS):
        pair.backward()
        engine = own_daemon.optctl("describe", "job", job)["engine_pid"]
        os.kill(int(engine), signal.SIGKILL)
        pair.optimizer.step()
        pair.reference.step()
        pair.check()
    pair.close()


def test_construction_takes_no_memory_of_the_device(job):
    """Beside what finds changes, whose size does not depend on the parameters."""
    size = 256 << 20
    for _ in range(2):  # a new job, and one that is there
        parameter = torch.nn.Parameter(torch.zeros(size // 4, device="cuda"))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        place = parameter.data_ptr()
        optimizer = optstate.SGD([parameter], lr=1.0, job=job)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < size // 2
        assert parameter.data_ptr() == place
        optimizer.close()
        del parameter


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@OVERLAP
def test_parameters_of_several_devices(overlap):
    values = [torch.randn(shape) for shape in SHAPES]
    places = [torch.device("cuda", i % 2) for i in range(len(values))]
    ours = [torch.nn.Parameter(each.to(place)) for each, place in zip(values, places)]
    theirs = [torch.nn.Parameter(each.clone()) for each in values]
    optimizer = optstate.AdamW(ours, overlap=overlap)
    reference = optstate.AdamW(theirs)
    for _ in range(STEPS):
        for one, other in zip(ours, theirs):
            one.grad = other.grad = None
            gradient = torch.randn(one.shape)
            (one * gradient.to(one.device)).sum().backward()
            other.grad = gradient
        optimizer.step()
        reference.step()
        assert same_bits(ours, theirs)
    optimizer.close()
    reference.close()


def _backward_ms(model, batch, rounds):
    """Returns the median time of a backward pass, by the device's clock."""
    times = []
    for _ in range(rounds):
        for each in model.parameters():
            each.grad = None
        loss = model(batch).float().square().mean()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss.backward()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def test_time_of_backward_with_hooks(record_property):
    """Says the ratio; a figure of a busy machine is no failure."""
    width = 4096
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(8)]
    model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
    batch = torch.randn(8192, width, device="cuda", dtype=torch.bfloat16)
    _backward_ms(model, batch, 3)
    without = _backward_ms(model, batch, 10)
    optimizer = optstate.AdamW(model.parameters(), overlap=True)
    _with_steps(model, batch, optimizer)
    times = [_with_steps(model, batch, optimizer) for _ in range(10)]
    ratio = statistics.median(times) / without
    record_property("backward_with_hooks_over_without", ratio)
    print(f"backward with hooks / without: {ratio:.3f} ({without:.2f} ms without)")
    optimizer.close()


def _with_steps(model, batch, optimizer):
    took = _backward_ms(model, batch, 1)
    optimizer.step()
    return took


def test_a_session_takes_tensors_of_the_device(job):
    """By the driver alone: torch is the library that has the tensors."""
    f32 = _native.FLOAT32
    parameters = [ParameterSpec("w", [300, 7], 2100, f32, f32, 0)]
    session = Session.open(SessionSpec(job, 2, [0], parameters, "embedded"))
    tensors = SessionTensors(session, parameters)
    values = torch.randn(300, 7, device="cuda")
    session.begin_load()
    torch.cuda._sleep(BUSY)
    tensors.load(0, values.add_(1))  # which comes late
    session.finish_load()
    torch.cuda._sleep(BUSY)
    tensors.push(1, 0, {0: values * 2})
    groups = _native.array_of(_native.Hyperparams, 1)
    groups[0].value[:4] = [0.1, 0.9, 0.99, 1e-8]
    norm = session.commit(1, groups).gradient_norm
    assert norm == pytest.approx((values * 2).norm().item(), rel=1e-5)
    found = torch.zeros_like(values)
    tensors.read({0: found})
    assert torch.allclose(found, values - 0.1 * values.sign(), atol=1e-4)
    session.close()


def test_parameters_in_host_memory_beside_others():
    """A model of which a part is on the GPU; with views of host memory."""
    pair = Pair([(100,), (1 << 20,)])
    pair.close()
    ours = [torch.nn.Parameter(torch.ones(1000, device=place)) for place in ("cpu", "cuda")]
    optimizer = optstate.AdamW(ours, lr=0.1, overlap=True)
    for step in range(STEPS):
        for each in ours:
            each.grad = None
            (each * (step + 1)).sum().backward()
        optimizer.step()
        assert torch.equal(ours[0], ours[1].cpu())
    optimizer.close()


def test_a_loss_goes_down():
    model = small_model(3).cuda()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, overlap=True)
    losses = []
    for step in range(50):
        optimizer.zero_grad()
        loss = loss_on(model, step % 5)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < losses[0]
    assert loss_of(model.cpu(), 0).isfinite()
    optimizer.close()
