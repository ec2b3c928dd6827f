"""Accelerate: prepare, accumulation, mixed precision, clipping, checkpoints."""

from __future__ import annotations

import optstate
import pytest
import torch
from beside_torch import (
    OPTIONS,
    assert_same_losses,
    assert_same_parameters,
    assert_same_state,
    assert_views,
)
from tiny import batch, loss_on, tiny_model

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def anew():
    """Accelerate keeps its state in classes."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield


def accelerator_of(**keywords):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **keywords)


class Run:
    """A prepared model, optimizer and scheduler."""

    def __init__(self, optimizer_class, keywords, **settings) -> None:
        self.accelerator = accelerator_of(**settings)
        self.model = tiny_model()
        optimizer = optimizer_class(self.model.parameters(), **OPTIONS, **keywords)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.inner = optimizer
        prepared = self.accelerator.prepare(self.model, optimizer, scheduler)
        self.wrapped, self.optimizer, self.scheduler = prepared
        self.losses = []

    def train(self, steps, clip=None) -> None:
        for step in steps:
            with self.accelerator.accumulate(self.wrapped):
                loss = loss_on(self.wrapped, batch(step))
                self.accelerator.backward(loss)
                if clip and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.wrapped.parameters(), clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())


SETTINGS = {
    "plain": {},
    "two micro-steps": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
    "bf16, two micro-steps": {"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_loop(settings, clip, job):
    torchs = Run(torch.optim.AdamW, {}, **SETTINGS[settings])
    torchs.train(range(8), clip)
    ours = Run(optstate.AdamW, {"job": job}, **SETTINGS[settings])
    ours.train(range(8), clip)
    assert_same_losses(ours.losses, torchs.losses)
    assert_same_parameters(ours.model, torchs.model)
    assert_same_state(ours.optimizer.state_dict(), torchs.optimizer.state_dict())
    expected = 4 if "micro" in settings else 8
    assert ours.inner.committed_step == expected
    assert_views(ours.inner)
    assert len(ours.optimizer.state) == len(torchs.optimizer.state)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "dynamic8"])
def test_prepare_changes_nothing(state_dtype, job):
    """Accelerate's prepare() loads what state_dict() gave, at each start."""
    run = Run(optstate.AdamW, {"job": job, "state_dtype": state_dtype})
    run.train(range(3))
    before = run.inner.state_dict()["state"]
    run.inner.close()
    again = Run(optstate.AdamW, {"job": job, "state_dtype": state_dtype})
    assert again.inner.committed_step == 3
    assert_same_parameters(again.model, run.model)
    for index, entry in again.inner.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[index][key]))
    again.train(range(3, 4))
    assert again.inner.committed_step == 4


@pytest.mark.parametrize("job_is", ["new", "live"])
def test_save_state_and_load_state(job_is, tmp_path, job):
    torchs = Run(torch.optim.AdamW, {})
    torchs.train(range(8))
    first = Run(optstate.AdamW, {"job": job})
    first.train(range(4))
    first.accelerator.save_state(str(tmp_path))
    first.train(range(4, 6))
    first.inner.close()
    ours = Run(optstate.AdamW, {"job": job if job_is == "live" else f"{job}-new"})
    ours.accelerator.load_state(str(tmp_path))
    ours.train(range(4, 8))
    assert_same_parameters(ours.model, torchs.model)
    assert_same_state(ours.optimizer.state_dict(), torchs.optimizer.state_dict())
