"""Small models and gradient streams that tests share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch


def small_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.to(dtype)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    """The loss on the batch of a step: data follow from the step alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    dtype = next(model.parameters()).dtype
    batch = torch.randn(32, 8, generator=generator).to(dtype)
    return (model(batch).float() - batch[:, :4].float().sin()).square().mean()


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int],
    scheduler: object = None,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def parameters_of(shapes: Sequence[Sequence[int]], seed: int, dtype: torch.dtype) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(list(shape), generator=generator).to(dtype))
        for shape in shapes
    ]


def gradients(
    shapes: Sequence[Sequence[int]], seed: int, steps: int, missing: float = 0.0
) -> Iterator[list]:
    """Gradients over several orders of magnitude; some None with `missing` odds."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        made = []
        for shape in shapes:
            scale = 10 ** torch.empty(1).uniform_(-4, 1, generator=generator).item()
            gradient = torch.randn(list(shape), generator=generator) * scale
            is_missing = torch.rand(1, generator=generator).item() < missing
            made.append(None if is_missing else gradient)
        yield made


def set_gradients(parameters: Sequence[torch.Tensor], values: Sequence) -> None:
    for parameter, value in zip(parameters, values):
        parameter.grad = None if value is None else value.to(parameter.dtype)


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Returns the content of tensors, to be compared bit by bit."""
    return [
        bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())
        for tensor in tensors
    ]


def values_of(model: torch.nn.Module) -> list[np.ndarray]:
    """Returns the values of its parameters that a rank sends to the test."""
    return [parameter.detach().numpy() for parameter in model.parameters()]


def assert_values(results: Sequence[Sequence[np.ndarray]], model: torch.nn.Module) -> None:
    """Asserts that every rank has the model's parameters."""
    for result in results:
        for found, expected in zip(result, model.parameters()):
            assert torch.equal(torch.from_numpy(found), expected)


def largest_difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    return max(
        (a.detach().double() - b.detach().double()).abs().max().item()
        for a, b in zip(one.parameters(), other.parameters())
    )
