"""Keywords of Megatron-LM's HybridDeviceOptimizer: what they ask for is so, or they are refused."""

from __future__ import annotations

import optstate
import pytest
import torch
from daemon import Daemon
from device_runs import REFUSAL, plain, trained
from emulated_device import emulated
from optstate.errors import InvalidArgumentError, UnimplementedError
from training import bits, loss_of, small_model

# All of a script that was written for it, but for offload_fraction, which is our own too.
HYBRID = {
    "cpu_optimizer_cls": torch.optim.AdamW,
    "gpu_optimizer_cls": torch.optim.AdamW,
    "param_update_in_fp32": True,
    "pin_cpu_grads": True,
    "pin_cpu_params": True,
    "overlap_cpu_optimizer_d2h_h2d": True,
}


@pytest.fixture(scope="module")
def device_daemon():
    running = Daemon("--devices", "emulated:2")
    yield running
    running.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_script_for_it_trains_with_the_same_bits(seed, device_daemon, dtype):
    expected = trained(plain, dtype, endpoint=device_daemon.shm)
    options = {"endpoint": device_daemon.shm, "offload_fraction": 0.5, "overlap": True}
    with emulated(seed):
        assert trained(plain, dtype, **options, **HYBRID) == expected


@pytest.mark.parametrize("master", ["float32", "split"])
def test_updates_of_16_bits_are_in_float32(master):
    """Steps that are smaller than what bfloat16 can tell apart add up, as in float32."""

    def stepped(make, dtype, **options):
        parameter = torch.nn.Parameter(torch.ones(64, dtype=dtype))
        optimizer = make([parameter], lr=1e-4, weight_decay=0.0, **options)
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameter.detach()

    in_16_bits = stepped(torch.optim.AdamW, torch.bfloat16)
    assert torch.equal(in_16_bits, torch.ones_like(in_16_bits))  # the difference can be seen
    exact = stepped(torch.optim.AdamW, torch.float32)
    found = stepped(optstate.AdamW, torch.bfloat16, master=master, param_update_in_fp32=True)
    assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("refusal", [None, REFUSAL], ids=["registered", "refused"])
def test_copies_use_pinned_memory(seed, refusal):
    """The emulated device notes a fault for a copy whose host memory is not pinned."""
    with emulated(seed) as device:
        device.refuses = refusal
        trained(plain, pin_cpu_grads=True, pin_cpu_params=True)
        assert device.copies["to_host"] > 0 and device.copies["to_device"] > 0
        assert (device.registrations > 0) == (refusal is None)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
def test_copies_overlap_as_the_keyword_says(device, overlap):
    model = small_model(3)
    optimizer = optstate.AdamW(
        model.parameters(), overlap=overlap, overlap_cpu_optimizer_d2h_h2d=overlap
    )
    device.copies.clear()  # of the parameters' first values
    loss_of(model, 0).backward()
    assert (device.copies["to_host"] > 0) == overlap
    optimizer.step()
    assert device.copies["to_host"] > 0
    optimizer.close()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"param_update_in_fp32": False}, UnimplementedError, "masters .* Leave param_update"),
        ({"pin_cpu_grads": False}, UnimplementedError, "gradients .* Leave pin_cpu_grads out"),
        ({"pin_cpu_params": False}, UnimplementedError, "parameters .* Leave pin_cpu_params out"),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, InvalidArgumentError, "give overlap=True"),
        (
            {"overlap_cpu_optimizer_d2h_h2d": False, "overlap": True},
            InvalidArgumentError,
            "contradicts overlap=True",
        ),
        ({"cpu_optimizer_cls": torch.optim.SGD}, UnimplementedError, "cls=SGD: .* of AdamW"),
        ({"gpu_optimizer_cls": torch.optim.Adam}, UnimplementedError, "cls=Adam: .* of AdamW"),
        ({"gpu_optimizer_cls": "FusedAdam"}, UnimplementedError, "cls=FusedAdam"),
        ({"pin_cpu_grads": 1}, TypeError, "pin_cpu_grads is 1, not True or False"),
        ({"param_update_in_fp32": None}, TypeError, "param_update_in_fp32 is None"),
        ({"overlap_cpu_optimizer_d2h_h2d": "yes"}, TypeError, "is 'yes', not True or False"),
        ({"pin_cpu_state": True}, TypeError, "pin_cpu_state"),  # nobody's keyword
    ],
    ids=str,
)
def test_what_asks_for_something_else_is_refused(job, options, error, text):
    model = small_model()
    before = bits(model.parameters())
    with pytest.raises(error, match=text):
        optstate.AdamW(model.parameters(), job=job, **options)
    assert bits(model.parameters()) == before
    with optstate.AdamW(small_model().parameters(), job=job) as optimizer:
        assert optimizer.committed_step == 0


def test_each_optimizer_has_a_rule_of_its_own():
    for ours, theirs in ((optstate.SGD, torch.optim.SGD), (optstate.Adam, torch.optim.Adam)):
        options = {"cpu_optimizer_cls": theirs, "gpu_optimizer_cls": None}
        ours(small_model().parameters(), lr=0.1, **options).close()
        with pytest.raises(UnimplementedError, match=f"of {theirs.__name__}"):
            ours(small_model().parameters(), lr=0.1, cpu_optimizer_cls=torch.optim.AdamW)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
def test_a_gradient_that_only_decoupled_grad_has_is_refused(overlap):
    model = small_model()
    named = dict(model.named_parameters())
    optimizer = optstate.SGD(named.items(), lr=0.1, overlap=overlap)
    loss_of(model, 0).backward()
    weight = named["0.weight"]
    gradient, weight.grad = weight.grad, None
    weight.decoupled_grad = gradient.float()
    before = bits(model.parameters())
    with pytest.raises(UnimplementedError, match='"0.weight" has its gradient in decoupled_grad'):
        optimizer.step()
    assert bits(model.parameters()) == before and optimizer.committed_step == 0
    weight.grad, weight.decoupled_grad = gradient, None
    optimizer.step()
    expected = small_model()
    loss_of(expected, 0).backward()
    theirs = optstate.SGD(expected.parameters(), lr=0.1)
    theirs.step()
    assert bits(model.parameters()) == bits(expected.parameters())
    optimizer.close()
    theirs.close()
