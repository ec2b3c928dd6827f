"""resume="job" on nodes that share parameters out: all ranks have the job's values at once."""

from __future__ import annotations

import copy

import optstate
import pytest
import ranks
import torch
from nodes import enter
from nodes import nodes as nodes
from training import small_model, train


def _resumes(connection, rank, endpoints, job, partition):
    endpoint = enter(rank, endpoints, 1)

    def make(model):
        return optstate.AdamW(
            model.named_parameters(),
            lr=0.01,
            job=job,
            endpoint=endpoint,
            across_nodes="sharded",
            partition=partition,
            resume="job",
        )

    model = small_model()
    optimizer = make(model)
    train(model, optimizer, range(2))
    optimizer.consolidate_state_dict(to=None)
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    at_the_end = copy.deepcopy(model.state_dict())
    optimizer.close()

    again = small_model(seed=9)
    optimizer = make(again)
    again.load_state_dict(checkpoint[0])
    with pytest.warns(UserWarning):
        optimizer.load_state_dict(checkpoint[1])
    # Before any step: backward() is to run on the values of one step.
    assert all(torch.equal(again.state_dict()[key], at_the_end[key]) for key in at_the_end)
    train(again, optimizer, range(4, 5))
    optimizer.close()
    return [value.numpy() for value in again.state_dict().values()]


@pytest.mark.parametrize("partition", ["greedy", "contiguous"])
def test_parameters_loaded_before_are_the_jobs_on_all_ranks(nodes, job, partition):
    first, second = ranks.run(_resumes, 2, [each.shm for each in nodes], job, partition)
    assert all((a == b).all() for a, b in zip(first, second))
