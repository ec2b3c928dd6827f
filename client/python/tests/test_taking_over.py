"""Constructing again in one process, as the cells of a notebook do."""

from __future__ import annotations

import optstate
import pytest
import ranks
from training import largest_difference, small_model, train


def test_the_same_cell_again_goes_on(job):
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(5))
    model = small_model()
    former = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    train(model, former, range(3))
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    assert optimizer.committed_step == 3
    train(model, optimizer, range(3, 5))
    assert largest_difference(model, whole) == 0
    for use in (former.step, former.state_dict, former.upload_parameters):
        with pytest.raises(RuntimeError, match=f'taken over job "{job}"'):
            use()
    assert "taken over" in repr(former)
    former.close()  # is none of the other's business
    train(model, optimizer, range(5, 6))
    assert optimizer.committed_step == 6


def test_after_a_cell_that_raised(job):
    def cell(fails):
        model = small_model()
        optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
        train(model, optimizer, [optimizer.committed_step])
        if fails:
            raise ValueError("a mistake")
        return optimizer.committed_step

    with pytest.raises(ValueError, match="a mistake") as kept:
        cell(fails=True)
    assert cell(fails=False) == 2
    assert kept.tb is not None  # which had the first one all the time


@pytest.mark.parametrize("first", ["shm", "grpc_unix", "embedded"])
@pytest.mark.parametrize("second", ["shm", "grpc_unix", "embedded"])
def test_over_whatever_wire(first, second, job, daemon):
    def endpoint(kind):
        return kind if kind == "embedded" else getattr(daemon, kind)

    model = small_model()
    former = optstate.AdamW(model.parameters(), job=job, endpoint=endpoint(first))
    train(model, former, range(2))
    other_daemon = (first == "embedded") != (second == "embedded")
    again = optstate.AdamW(small_model().parameters(), job=job, endpoint=endpoint(second))
    assert again.committed_step == (0 if other_daemon else 2)
    if other_daemon:  # a job of this name there, which is another
        former.step()
    else:
        with pytest.raises(RuntimeError, match="taken over"):
            former.step()


@pytest.mark.parametrize("endpoint", [None, "embedded"])
def test_a_cell_that_thawed_parameters(endpoint, job):
    """The job has grown since the cell was run for the first time."""

    def cell():
        model = small_model()
        model[0].weight.requires_grad_(False)
        return model, optstate.AdamW(model.parameters(), job=job, endpoint=endpoint)

    model, former = cell()
    train(model, former, range(2))
    model[0].weight.requires_grad_(True)
    train(model, former, range(2, 4))
    again, optimizer = cell()
    assert optimizer.committed_step == 4
    assert largest_difference(again, model) == 0
    assert optimizer.fetch_state(again[0].weight)["step"] == 2
    with pytest.raises(RuntimeError, match="taken over"):
        former.step()


def test_another_layout_takes_nothing_over(job):
    model = small_model()
    former = optstate.AdamW(model.parameters(), job=job)
    with pytest.raises(optstate.FailedPreconditionError):
        optstate.AdamW(list(small_model().parameters())[:3], job=job)
    train(model, former, range(1))
    assert former.committed_step == 1


def test_a_step_that_was_begun_is_dropped(job):
    model = small_model()
    former = optstate.AdamW(model.parameters(), job=job, accumulate=True)
    model(model[0].weight).sum().backward()
    former.accumulate_step()
    plain = small_model()
    train(plain, optstate.AdamW(plain.parameters()), range(1))
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job, accumulate=True)
    train(model, optimizer, range(1))
    assert largest_difference(model, plain) == 0


def _twice(connection, rank, job, endpoint):
    former = optstate.AdamW(small_model().parameters(), job=job, endpoint=endpoint)
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job, endpoint=endpoint)
    train(model, optimizer, range(2))
    with pytest.raises(RuntimeError, match="taken over"):
        former.step()
    return optimizer.committed_step


def test_every_rank_takes_its_own_over(job, daemon):
    assert ranks.run(_twice, 2, job, daemon.shm) == [2, 2]
