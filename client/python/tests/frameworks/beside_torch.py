"""Compares an optimizer of optstate with torch's after the same run of a framework."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# With torch's eps of 1e-8 a gradient that is 0 but for rounding (of a key's bias, say) moves its
# parameter as far as any other, and each run elsewhere.
OPTIONS = {"lr": 0.01, "eps": 1e-4}
# fp32 sums are taken in another order than torch's.
TOLERANCE = 2e-5


def assert_same_parameters(ours: torch.nn.Module, torchs: torch.nn.Module) -> None:
    expected = dict(torchs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), expected[name].detach(), rtol=TOLERANCE, atol=TOLERANCE, msg=name
        )


def assert_views(optimizer: torch.optim.Optimizer) -> None:
    """The framework has left parameters the daemon's memory."""
    use = optimizer.memory()
    assert use.views == use.parameters > 0 == use.copies


def assert_same_losses(ours: Sequence[float], torchs: Sequence[float]) -> None:
    assert len(ours) == len(torchs) > 0
    torch.testing.assert_close(
        torch.tensor(ours), torch.tensor(torchs), rtol=10 * TOLERANCE, atol=10 * TOLERANCE
    )


def assert_same_state(ours: dict, torchs: dict) -> None:
    """Two state_dicts: the same entries by index, and the same indices in the groups."""
    assert [group["params"] for group in ours["param_groups"]] == [
        group["params"] for group in torchs["param_groups"]
    ]
    assert ours["state"].keys() == torchs["state"].keys()
    for index, expected in torchs["state"].items():
        entry = ours["state"][index]
        assert entry["step"] == expected["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                entry[key], expected[key], rtol=1e-3, atol=TOLERANCE, msg=f"{index} {key}"
            )
