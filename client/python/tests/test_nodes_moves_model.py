"""State that moves, while ranks are killed and power is lost at random: no daemon, but the rule by
which the next ranks find it."""

from __future__ import annotations

import random

import pytest
from moves_model import World
from optstate._torch.nodes.moves.choosing import Refused

SEEDS = 600
_STARTS = 12
# Changes of nodes until all ranks are killed.
_KILLED_AFTER = (3, 8, 15, 25, 40, 1000)


def _run(seed, durability, broken=""):
    """Raises AssertionError with what has happened: the state is not that of one step, or ranks
    are refused that could go on."""
    chosen = random.Random(seed)
    world = World(chosen, durability, broken)
    for _ in range(_STARTS):
        there = [number for number, node in enumerate(world.nodes) if node.has_something]
        more = [n for n in range(len(world.nodes)) if n not in there and chosen.random() < 0.4]
        nodes = [*there, *more] or [0]
        chosen.shuffle(nodes)
        count = chosen.choice(_KILLED_AFTER)
        try:
            for _, _ in zip(range(count), world.start(nodes)):
                pass
        except Refused as refused:
            is_known = "nothing says" in str(refused) and world.is_unknown()
            assert is_known, f"{refused}: {world.said}"
            return
        world.said.append(f"killed after {count}")
        if durability and chosen.random() < 0.4:
            world.lose_power()


@pytest.mark.parametrize("durability", ["", "every 2"], ids=["in memory", "durable"])
def test_kills_and_losses_of_power(durability):
    for seed in range(SEEDS):
        _run(seed, durability)


@pytest.mark.parametrize(
    ("broken", "durability"),
    [("early", ""), ("late", ""), ("early", "every 2"), ("unwritten", "every 2")],
)
def test_the_model_notices_mistakes(broken, durability):
    with pytest.raises(AssertionError):
        for seed in range(SEEDS):
            _run(seed, durability, broken)
