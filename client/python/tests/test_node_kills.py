"""A few kills of tests/crash/node_kills.py: of a job of replicas, and of one of shards.

$OPTSTATE_TEST_KILLS=500 takes as many, and $OPTSTATE_TEST_SEED repeats what a seed has shown.
"""

from __future__ import annotations

import os
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/crash"))

import node_kills

KILLS = 6


def test_nodes_end_at_one_step_whoever_is_killed():
    kills = int(os.environ.get("OPTSTATE_TEST_KILLS", KILLS))
    seed = int(os.environ.get("OPTSTATE_TEST_SEED", random.SystemRandom().randrange(10**6)))
    # Two jobs at least, of seeds that follow each other: replicas, and shards.
    per_job = min(node_kills.KILLS_PER_JOB, -(-kills // 2))
    totals = node_kills.run(seed, kills, per_job)
    print(totals.table())
    assert totals.kills == kills
