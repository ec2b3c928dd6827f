"""A few kills of tests/crash/node_kills.py, which takes more."""

from __future__ import annotations

import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/crash"))

from node_kills import Campaign


def test_nodes_end_at_one_step_whoever_is_killed():
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    campaign = Campaign(seed, kills=8)
    try:
        campaign.run()
    finally:
        campaign.close()
