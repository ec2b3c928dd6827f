"""Keywords that decide which collectives ranks take part in: all ranks give the same."""

from __future__ import annotations

import optstate
import pytest
import ranks
import torch.distributed as dist
from nodes import enter
from nodes import nodes as nodes
from training import small_model

KEYWORDS = (
    ("across_nodes", ("replicated", "sharded")),
    ("across_nodes", (None, "replicated")),
    ("reduction", ("trainer", "collective")),
)


def _other_keywords(connection, rank, endpoints, job):
    endpoint = enter(rank, endpoints, 1)
    said = []
    for name, values in KEYWORDS:
        kwargs = {"across_nodes": "replicated", name: values[rank]}
        with pytest.raises(ValueError) as raised:
            optstate.AdamW(small_model().named_parameters(), job=job, endpoint=endpoint, **kwargs)
        said.append(str(raised.value))
    return said


def test_ranks_with_other_keywords_are_named(nodes, job):
    for said in ranks.run(_other_keywords, 2, [each.shm for each in nodes], job):
        for text, (name, values) in zip(said, KEYWORDS):
            assert f"rank 1 has {name}={values[1]!r}, and rank 0 {name}={values[0]!r}" in text
    assert nodes[0].jobs() == nodes[1].jobs() == []


def _replaces_in_a_group(connection, rank, endpoint, job):
    groups = [dist.new_group([each]) for each in range(2)]
    with pytest.raises(ValueError, match='cannot be had with stale_nodes="replace"') as raised:
        optstate.AdamW(
            small_model().parameters(),
            job=f"{job}-{rank}",
            endpoint=endpoint,
            process_group=groups[rank],
            norm_group=dist.group.WORLD,
            across_nodes="replicated",
            stale_nodes="replace",
        )
    return str(raised.value)


def test_a_norm_group_replaces_no_nodes(daemon, job):
    ranks.run(_replaces_in_a_group, 2, daemon.shm, job)
    assert job not in daemon.jobs()
