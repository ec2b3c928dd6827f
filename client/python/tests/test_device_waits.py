"""Waits of tensors on an emulated device: each that is needed, and no other."""

from __future__ import annotations

import optstate
import pytest
import torch
from device_runs import REFUSAL, STEPS, plain, trained
from emulated_device import emulated
from optstate._torch.device import backends, staging
from optstate._torch.device import downloads as downloads_module
from optstate._torch.device import uploads as uploads_module
from optstate._torch.gradients.pusher import expect_copies
from optstate._torch.parameters import digests
from training import bits, loss_of, small_model, train


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


def test_staging_buffers_of_dropped_steps_are_used_again(device):
    device.refuses = "it registers nothing"
    model = small_model(3)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, overlap=True)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.abort_step()
    train(model, optimizer, range(2))
    assert optimizer.committed_step == 2
    optimizer.close()


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
    expected = trained(without_waits(None), **options)
    with emulated(seed) as device:
        assert trained(without_waits(device), **options) == expected


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
    expected = trained(plain)
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
            assert bits(model.parameters()) == expected


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
