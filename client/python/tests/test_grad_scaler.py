"""torch.amp.GradScaler: scaled gradients go to the daemon as they are."""

from __future__ import annotations

import optstate
import pytest
import torch
from training import largest_difference, loss_of, small_model


def scaled_run(optimizer_class, model, *, unscale, poisoned=(), max_norm=None, **options):
    optimizer = optimizer_class(model.parameters(), lr=0.01, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    scales = []
    for step in range(12):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step in poisoned:
            model[0].weight.grad[3, 3] = poisoned[step]
        if unscale:
            scaler.unscale_(optimizer)
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return optimizer, scales


# With each of the last three the daemon unscales.
MODES = {
    "plain": {},
    "fused": {"fused": True},
    "overlap": {"overlap": True},
    "accumulate": {"accumulate": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled"])
def test_as_torchs(unscale, mode):
    poisoned = {2: float("inf"), 7: float("nan")}
    ours, torchs = small_model(), small_model()
    optimizer, scales = scaled_run(
        optstate.AdamW, ours, unscale=unscale, poisoned=poisoned, **MODES[mode]
    )
    _, expected = scaled_run(torch.optim.AdamW, torchs, unscale=unscale, poisoned=poisoned)
    assert scales == expected
    assert largest_difference(ours, torchs) < 1e-5
    assert optimizer.fetch_state(ours[0].weight)["step"] == 10
    assert optimizer.last_outcome.applied
    # A step that the scaler skips is none of the daemon's.
    assert optimizer.committed_step == (10 if mode == "plain" else 12)


def test_who_unscales():
    """Only a fused step unscales, as in torch, or one that has the gradients already."""
    parameter = torch.nn.Parameter(torch.ones(3))
    for mode, keywords in MODES.items():
        optimizer = optstate.AdamW([parameter], **keywords)
        assert optimizer._step_supports_amp_scaling is (mode != "plain"), mode
    for torchs in (torch.optim.AdamW([parameter]), torch.optim.AdamW([parameter], fused=True)):
        claims = getattr(torchs, "_step_supports_amp_scaling", False)
        fused = torchs.defaults["fused"]
        assert optstate.AdamW([parameter], fused=fused)._step_supports_amp_scaling is claims


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["trainer", "daemon"])
def test_gradients_are_unscaled_to_the_bit(options):
    """Powers of two: bits are those of the run without a scaler."""
    scaled, plain = small_model(), small_model()
    optimizer, _ = scaled_run(optstate.AdamW, scaled, unscale=False, max_norm=0.1, **options)
    reference = optstate.AdamW(plain.parameters(), lr=0.01)
    for step in range(12):
        reference.zero_grad()
        loss_of(plain, step).backward()
        reference.step()
    assert largest_difference(scaled, plain) == 0
    assert optimizer.last_outcome.gradient_norm == pytest.approx(
        reference.last_outcome.gradient_norm, rel=1e-12
    )


def test_clipping_after_unscale_is_clipping_in_the_daemon():
    in_trainer, in_daemon = small_model(), small_model()
    scaled_run(torch.optim.AdamW, in_trainer, unscale=True, max_norm=0.05)
    scaler_less, _ = scaled_run(
        lambda parameters, lr: optstate.AdamW(parameters, lr=lr, max_norm=0.05),
        in_daemon,
        unscale=False,
    )
    assert largest_difference(in_trainer, in_daemon) < 1e-5
    assert scaler_less.last_outcome.clip_coefficient < 1


def test_an_overflow_skips_the_step_and_says_so():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model[0].bias.grad[0] = float("nan")
    optimizer.step()
    outcome = optimizer.last_outcome
    assert not outcome.applied and outcome.found_inf
    assert outcome.step == optimizer.committed_step == 2
    assert all(map(torch.equal, model.parameters(), before))
    assert optimizer.fetch_state(model[0].bias)["step"] == 1
    model[0].bias.grad[0] = 0
    optimizer.step()
    assert optimizer.last_outcome.applied and optimizer.committed_step == 3


def test_fp16_gradients_with_a_scaler():
    model = small_model(dtype=torch.float16)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    first = loss_of(model, 0).item()
    for step in range(40):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert loss_of(model, 0).item() < first / 2
