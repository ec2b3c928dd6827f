"""speculative=True: the daemon begins steps while backward() runs, to the same bits."""

from __future__ import annotations

import optstate
import pytest
import torch
from training import loss_of, small_model


def _train(change=None, **options):
    """Returns the parameters after twenty steps; change() is called before each."""
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, overlap=True, **options)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if change is not None:
            change(model, optimizer, step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _new_rate(model, optimizer, step):
    if step % 10 == 9:
        optimizer.param_groups[0]["lr"] *= 0.5


def _new_gradients(model, optimizer, step):
    """Pushed again, after the daemon may have used the first ones."""
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


@pytest.mark.parametrize("change", [None, _new_rate, _new_gradients])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_the_same_bits(change, max_norm):
    plain = _train(change, max_norm=max_norm)
    early = _train(change, max_norm=max_norm, speculative=True)
    for expected, got in zip(plain, early):
        assert torch.equal(expected, got)


def test_what_cannot_be_taken_back_is_refused():
    model = small_model()
    with pytest.raises(optstate.UnimplementedError, match="lamb"):
        optstate.LAMB(model.parameters(), lr=0.01, speculative=True)
