"""loss_scaler=: the daemon scales as a GradScaler does, and goes on with what it has."""

from __future__ import annotations

import copy
import math
import pickle

import optstate
import pytest
import torch
from training import parameters_of


def test_loss_scaler_of_the_daemon_is_grad_scaler(seed, job):
    """Scale by scale through overflows, and across a new trainer."""
    (parameter,) = parameters_of([[100]], seed, torch.float32)
    settings = optstate.LossScaler(init_scale=1024.0, growth_interval=3)
    optimizer = optstate.SGD([parameter], lr=0.1, job=job, loss_scaler=settings)
    torchs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    other = torch.nn.Parameter(parameter.detach().clone())
    reference = torch.optim.SGD([other], lr=0.1)
    for step in range(30):
        overflow = step % 7 == 5
        for each, scale, opt in (
            (parameter, optimizer.scale, optimizer),
            (other, torchs.scale, None),
        ):
            each.grad = None
            scale((each * each).sum()).backward()
            if overflow:
                each.grad[3] = math.inf
            if opt is None:
                torchs.step(reference)
                torchs.update()
            else:
                opt.step()
                assert opt.last_outcome.applied != overflow
        assert optimizer.loss_scale == torchs.get_scale(), step
        if step == 15:  # the trainer is replaced
            optimizer.close()
            optimizer = optstate.SGD([parameter], lr=0.1, job=job, loss_scaler=settings)
    torch.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-7)


def grown(optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    return optimizer


def copied(optimizer):
    other = copy.deepcopy(optimizer)
    optimizer.close()
    other.attach()
    return other


def pickled(optimizer):
    with optimizer:
        other = pickle.loads(pickle.dumps(optimizer))
    other.attach()
    return other


@pytest.mark.parametrize("goes_on", [grown, copied, pickled])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_loss_scaler_that_goes_on_in_another_job_forgets_nothing(goes_on, dynamic):
    """The scale, the steps since it changed, and the overflows that it still bears."""
    overflows = (2, 9, 10, 11, 20)

    def scales(goes_on_after):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = optstate.SGD(
            [parameter],
            lr=0.0,
            loss_scaler=optstate.LossScaler(
                init_scale=1024.0, growth_interval=4, hysteresis=2, dynamic=dynamic
            ),
        )
        found = []
        for step in range(24):
            if step == goes_on_after:
                optimizer = goes_on(optimizer)
            for each in optimizer.param_groups[0]["params"]:
                value = math.inf if step in overflows else 1.0
                each.grad = torch.full_like(each, value)
            optimizer.step()
            found.append(optimizer.loss_scale)
        optimizer.close()
        return found

    whole = scales(None)
    assert len(set(whole)) == (3 if dynamic else 1)
    for step in range(1, 24):
        assert scales(step) == whole, step
