"""A few kills of view_kills.py, which takes more."""

from __future__ import annotations

import random

import pytest
from view_kills import Campaign


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_are_of_one_step_whoever_is_killed(world_size):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    campaign = Campaign(seed, world_size, kills=6)
    try:
        campaign.run()
    finally:
        campaign.close()
