"""LoRA over frozen and over quantised weights: model.parameters() as it is."""

from __future__ import annotations

import optstate
import pytest
import torch
from beside_torch import OPTIONS, assert_same_parameters, assert_same_state
from tiny import batch, loss_on, tiny_model

STEPS = 6


def trained(model, optimizer_class, **keywords):
    optimizer = optimizer_class(model.parameters(), **OPTIONS, **keywords)
    for step in range(getattr(optimizer, "committed_step", 0), STEPS):
        optimizer.zero_grad()
        loss_on(model, batch(step)).backward()
        optimizer.step()
    return optimizer


def lora_model():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        tiny_model(), peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    )


def test_lora(job, daemon):
    torchs, ours = lora_model(), lora_model()
    ours.load_state_dict(torchs.state_dict())
    reference = trained(torchs, torch.optim.AdamW)
    optimizer = trained(ours, optstate.AdamW, job=job, named_parameters=ours)
    assert_same_parameters(ours, torchs)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    names = [each["name"] for each in daemon.parameters(job)]
    assert names and all("lora_" in name for name in names)
    optimizer.close()
    again = lora_model()
    again.load_state_dict(torchs.state_dict())
    optimizer = optstate.AdamW(again.parameters(), **OPTIONS, job=job, named_parameters=again)
    assert optimizer.committed_step == STEPS
    assert_same_parameters(again, torchs)


class Adapter(torch.nn.Module):
    """A frozen linear layer beside two small matrices."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(2, linear.in_features) * 0.1)
        self.up = torch.nn.Parameter(torch.randn(linear.out_features, 2) * 0.1)

    def forward(self, rows):
        return self.linear(rows) + rows @ self.down.T @ self.up.T


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_quantised_frozen_weights(config, job, daemon):
    quantization = pytest.importorskip("torchao.quantization")

    def quantised():
        torch.manual_seed(5)
        model = torch.nn.Sequential(
            Adapter(torch.nn.Linear(8, 16, bias=False)),
            torch.nn.Tanh(),
            Adapter(torch.nn.Linear(16, 4, bias=False)),
        )
        quantization.quantize_(model, getattr(quantization, config)())
        for layer in (model[0], model[2]):
            layer.linear.requires_grad_(False)
        return model

    torchs, ours = quantised(), quantised()
    assert type(ours[0].linear.weight) is not torch.nn.Parameter
    reference = trained(torchs, torch.optim.AdamW)
    weights = [layer.linear.weight for layer in (ours[0], ours[2])]
    optimizer = trained(ours, optstate.AdamW, job=job, named_parameters=ours)
    for layer in (0, 2):
        torch.testing.assert_close(ours[layer].up, torchs[layer].up, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(ours[layer].down, torchs[layer].down, rtol=2e-5, atol=2e-5)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    assert len(daemon.parameters(job)) == 4
    # They are the same objects, with the same values.
    for layer, weight in zip((ours[0], ours[2]), weights):
        assert layer.linear.weight is weight
    rows = batch(0)
    assert torch.equal(ours[0].linear(rows), torchs[0].linear(rows))
