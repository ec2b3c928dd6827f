"""The model of a program, and its loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from programs.program import Weight


def random_values(
    shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def parameter_of(weight: Weight, seed: int) -> torch.nn.Parameter:
    values = random_values(weight.shape, seed, getattr(torch, weight.dtype))
    if weight.layout == "transposed" and values.dim() >= 2:
        values = values.transpose(0, -1).contiguous().transpose(0, -1)
    elif weight.layout == "strided" and values.dim() >= 1 and values.numel():
        roomy = torch.zeros((*values.shape[:-1], 2 * values.shape[-1]), dtype=values.dtype)
        values = roomy[..., ::2].copy_(values)
    return torch.nn.Parameter(values, requires_grad=not weight.frozen)


class Base(torch.nn.Module):
    """Has one parameter; a model that uses it twice has the module twice."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = parameter


class Model(torch.nn.Module):
    """Parameters that a loss is linear in, so that gradients follow from the batch alone.

    The two sides of a program then have gradients of equal bits, however far rounding has
    taken their parameters apart.
    """

    def __init__(self, weights: Sequence[Weight], seed: int) -> None:
        super().__init__()
        self.grown = 0
        for index, weight in enumerate(weights):
            base = Base(parameter_of(weight, 1000 * seed + index))
            for use in range(weight.uses):
                # Uses one module under several names, or ties a parameter to another's.
                setattr(self, f"part{index}" + "abc"[use], base)
            if weight.uses > 1:
                setattr(self, f"tied{index}", base.weight)

    def uses(self) -> list[torch.nn.Parameter]:
        """Every parameter as often as it has names."""
        return [each for _, each in self.named_parameters(remove_duplicate=False)]

    def distinct(self) -> list[torch.nn.Parameter]:
        return list(self.parameters())

    def grow(self, weight: Weight, seed: int) -> torch.nn.Parameter:
        """Adds a parameter."""
        parameter = parameter_of(weight, seed)
        setattr(self, f"grown{self.grown}", Base(parameter))
        self.grown += 1
        return parameter

    def loss(self, batch: int, without: Collection[int] = (), poison: bool = False) -> torch.Tensor:
        """Returns the loss of one batch. without: indices of parameters that it does not depend
        on, modulo their number. poison: some gradient is infinite."""
        parameters = self.distinct()
        left_out = {index % len(parameters) for index in without}
        terms = []
        numbers = {id(each): index for index, each in enumerate(parameters)}
        for use, parameter in enumerate(self.uses()):
            index = numbers[id(parameter)]
            if index in left_out or not parameter.requires_grad:
                continue
            gradient = self._gradient(parameter, 100 * batch + use)
            if poison and gradient.numel():
                gradient.view(-1)[0] = torch.inf
                poison = False
            terms.append((parameter.float() * gradient).sum())
        if not terms:  # of nothing: a loss that can go backward
            return torch.zeros((), requires_grad=True)
        return torch.stack(terms).sum()

    @staticmethod
    def _gradient(parameter: torch.Tensor, seed: int) -> torch.Tensor:
        """Returns values of several orders of magnitude, with zeros; exact in the parameter's
        dtype."""
        generator = torch.Generator().manual_seed(seed)
        scale = 2.0 ** torch.randint(-12, 4, (), generator=generator).item()
        values = torch.randn(tuple(parameter.shape), generator=generator) * scale
        if torch.rand((), generator=generator).item() < 0.1:
            values[torch.rand(values.shape, generator=generator) < 0.5] = 0
        return values.to(parameter.dtype).float()
