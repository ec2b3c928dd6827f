"""Copies and pickles of an optimizer whose ranks are a process group of their own."""

from __future__ import annotations

import copy
import pickle

import optstate
import pytest
import torch
import torch.distributed as dist
from ranks import run
from training import largest_difference, small_model, train


def _copy_of_own_group(connection, rank, endpoint):
    """Each rank trains a model of its own, in a group of its own."""
    mine = [dist.new_group([each]) for each in range(2)][rank]
    model = small_model(seed=rank)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, endpoint=endpoint, process_group=mine)
    train(model, optimizer, range(2))
    copied_model, copied = copy.deepcopy((model, optimizer))
    copied.attach()
    pickled_model, pickled = pickle.loads(pickle.dumps((model, optimizer)))
    with pytest.raises(RuntimeError, match=r"attach\(process_group="):
        pickled.attach()
    again_model, again = copy.deepcopy((pickled_model, pickled))
    with pytest.raises(RuntimeError, match=r"attach\(process_group="):
        again.attach()
    pickled.attach(process_group=mine)
    jobs = {optimizer.job, copied.job, pickled.job}
    assert len(jobs) == 3
    for each, net in ((optimizer, model), (copied, copied_model), (pickled, pickled_model)):
        train(net, each, range(2, 2 + 2 * (rank + 1)))  # not as many on each rank
    assert largest_difference(model, copied_model) == largest_difference(model, pickled_model) == 0
    dist.barrier()
    return [parameter.detach().tolist() for parameter in model.parameters()], jobs


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_ranks_with_groups_of_their_own(daemon, wire):
    results = run(_copy_of_own_group, 2, getattr(daemon, wire))
    assert not results[0][1] & results[1][1]
    for rank, (values, _) in enumerate(results):
        model = small_model(seed=rank)
        train(model, optstate.AdamW(model.parameters(), lr=0.01), range(2 + 2 * (rank + 1)))
        for value, parameter in zip(values, model.parameters()):
            assert torch.equal(torch.tensor(value), parameter.detach())


def test_a_pickle_without_a_group_attaches():
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    other_model, other = pickle.loads(pickle.dumps((model, optimizer)))
    other.attach()
    for each, net in ((optimizer, model), (other, other_model)):
        train(net, each, range(2, 4))
    assert largest_difference(model, other_model) == 0
