"""Messages when an optimizer attaches, and its repr."""

from __future__ import annotations

import logging

import optstate
import pytest
import ranks
import torch
from training import small_model, train


@pytest.fixture
def said(caplog):
    """Records of the logger so far, which are forgotten then."""
    caplog.set_level(logging.INFO, logger="optstate")

    def take():
        records = [each for each in caplog.records if each.name == "optstate"]
        caplog.clear()
        return records

    return take


def test_new_and_attached_again(job, daemon, said):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job)
    (new,) = said()
    assert new.levelno == logging.INFO
    for word in (f'"{job}"', daemon.shm, "new", "stays in the daemon"):
        assert word in new.getMessage()
    train(model, optimizer, range(2))
    optimizer.close()
    # Equal values: nothing is lost.
    optstate.AdamW(model.parameters(), job=job).close()
    (again,) = said()
    assert again.levelno == logging.INFO
    assert "attached again at step 2" in again.getMessage()


def test_a_fresh_run_over_a_live_job_is_warned_of(job, said):
    """The fresh run's first parameters are replaced, so there is a warning."""
    model = small_model()
    with optstate.AdamW(model.parameters(), job=job) as optimizer:
        train(model, optimizer, range(3))
    said()
    with optstate.AdamW(small_model().parameters(), job=job):
        pass
    (warning,) = said()
    assert warning.levelno == logging.WARNING
    for words in ("begins with the parameters of step 3", f"optctl delete job {job}", "6 of 6"):
        assert words in warning.getMessage()


def test_a_private_job_is_said_to_end(said):
    model = small_model()
    with optstate.AdamW(model.parameters()) as optimizer:
        (new,) = said()
        assert "ends with this optimizer" in new.getMessage()
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert not said()


def test_an_embedded_daemon_is_said_to_end(job, said):
    with optstate.AdamW(small_model().parameters(), job=job, endpoint="embedded"):
        (new,) = said()
        assert "ends with this process" in new.getMessage()


def _lines(connection, rank, job, endpoint):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("optstate").addHandler(handler)
    logging.getLogger("optstate").setLevel(logging.INFO)
    optstate.AdamW(small_model().parameters(), job=job, endpoint=endpoint)
    return len(records)


def test_rank_0_alone_says_it(job, daemon):
    assert ranks.run(_lines, 2, job, daemon.shm) == [1, 0]


def test_repr(job, daemon):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job)
    train(model, optimizer, range(2))
    shown = repr(optimizer)
    assert shown.startswith("AdamW (\n")
    for line in (
        f"    job: {job}\n",
        f"    endpoint: {daemon.shm}\n",
        "    step: 2\n",
        "    lr: 0.001",
    ):
        assert line in shown
    optimizer.close()
    assert "job: none, it is closed" in repr(optimizer)
