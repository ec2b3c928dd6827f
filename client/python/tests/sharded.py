"""Small models that ranks shard, and their whole values, for tests of several modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """7 rows and 1 row: of 2 or 3 ranks the last have fewer rows, or none."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 7), torch.nn.Tanh(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.to(dtype)


def fsdp(model: torch.nn.Module, mesh: Any = None, **kwargs: Any) -> torch.nn.Module:
    """Shards a model as FSDP2 scripts do: a layer by itself, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    fully_shard(model[0], mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    return model


def loss_of(model: torch.nn.Module, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + batch)
    inputs = torch.randn(16, 8, generator=generator)
    dtype = next(model.parameters()).dtype
    outputs = model(inputs.to(dtype)).float()
    return (outputs - inputs[:, :1].sin()).square().mean()


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int], **how: Any
) -> None:
    """Each rank has batches of its own. how: max_norm, of torch's clip_grad_norm_."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step * dist.get_world_size() + dist.get_rank()).backward()
        if how:
            torch.nn.utils.clip_grad_norm_(model.parameters(), **how)
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor. Collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def wholes(model: torch.nn.Module) -> list[torch.Tensor]:
    return [whole(parameter).clone() for parameter in model.parameters()]


def whole_state(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    """The whole state of each parameter, in order. Collective."""
    state = optimizer.state_dict()["state"]
    return [
        {key: whole(value).clone() for key, value in state[index].items()}
        for index in sorted(state)
    ]


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Two runs of optimizers that round differently."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-5, atol=2e-6)


def assert_states_close(found: Sequence[dict], expected: Sequence[dict]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        # torch's SGD counts no steps.
        assert one.keys() - {"master_param", "step"} == other.keys() - {"step"}
        assert_close([one[key] for key in other], list(other.values()))


def assert_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.shape == other.shape and torch.equal(one, other)
