"""The table of operations."""

from __future__ import annotations

import random
from typing import Any, Callable, NamedTuple

Draw = Callable[[random.Random], Any]


class Kind(NamedTuple):
    """An operation: how often, its arguments, what it does, and for which programs."""

    name: str
    weight: float
    draws: dict[str, Draw]
    apply: Callable[..., Any]
    suits: Callable[[Any], bool]


KINDS: dict[str, Kind] = {}


def operation(
    weight: float, suits: Callable[[Any], bool] = lambda program: True, **draws: Draw
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """weight: how often, beside the others'. suits: programs that it is for."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        KINDS[function.__name__] = Kind(function.__name__, weight, draws, function, suits)
        return function

    return register


def of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def often(usual: Any, odds: float, *others: Any) -> Draw:
    """The usual one, but with these odds one of the others."""
    return lambda rng: rng.choice(others) if rng.random() < odds else usual


def index(rng: random.Random) -> int:
    return rng.randrange(12)


def batch(rng: random.Random) -> int:
    return rng.randrange(1, 10_000)


def some(rng: random.Random) -> list[int]:
    """A few indices, mostly none."""
    return [index(rng) for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 4]))]
