"""DeepSpeed's engine exchanges the tensors of param_groups, which is refused in plain words."""

from __future__ import annotations

import importlib

import optstate
import pytest
import torch
from beside_torch import OPTIONS, assert_same_parameters
from tiny import batch, loss_on, tiny_model

deepspeed = pytest.importorskip("deepspeed")


@pytest.fixture(autouse=True, scope="module")
def one_process(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # An all-reduce for several ranks, which it would compile.
        patch.setattr(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)
        # ZeRO's third stage leaves its own there.
        patch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            patch.setenv(name, value)
        meeting = tmp_path_factory.mktemp("gloo") / "meeting"
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=0, world_size=1
        )
        yield
        torch.distributed.destroy_process_group()


def trained(optimizer_class, stage, *, bf16=False, **keywords):
    model = tiny_model()
    optimizer = optimizer_class(model.parameters(), **OPTIONS, **keywords)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_batch_size": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": bf16},
        },
        dist_init_required=False,
    )
    dtype = torch.bfloat16 if bf16 else torch.float32
    for step in range(4):
        engine.backward(loss_on(engine, batch(step).to(dtype)))
        engine.step()
    return model, optimizer


def test_without_zero(job):
    torchs, _ = trained(torch.optim.AdamW, 0)
    ours, optimizer = trained(optstate.AdamW, 0, job=job)
    assert_same_parameters(ours, torchs)
    assert optimizer.committed_step == 4
    # Which way it takes, as the README says.
    use = optimizer.memory()
    assert use.views > 0 and use.copies == 0
    assert not use.makes_gradient_views


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_refused(stage, job):
    with pytest.raises((RuntimeError, TypeError), match="DeepSpeed") as raised:
        trained(optstate.AdamW, stage, bf16=True, job=job)
    assert "ZeRO" in str(raised.value)
