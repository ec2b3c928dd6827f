"""endpoint="embedded": a private daemon that lives and dies with its trainer."""

from __future__ import annotations

import os
import pathlib
import warnings

import optstate
import pytest
import torch
from ranks import running, say
from training import largest_difference, small_model, train


def _directory(endpoint: str) -> pathlib.Path:
    return pathlib.Path(endpoint.removeprefix("unix:")).parent


def _children(pid: int) -> list[int]:
    """Processes whose ancestor is `pid`."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, frontier = [], [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def _wait_for_end(pid: int) -> None:
    """Returns when the process is gone; at once when it is already."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    ended, _, _ = select.select([handle], [], [], 60)
    os.close(handle)
    assert ended, f"process {pid} lives on"


def _without_daemon(monkeypatch):
    """False where the node has one."""
    monkeypatch.delenv("OPTSTATE_ENDPOINT")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    own = f"/tmp/optstate-{os.geteuid()}/optstated.sock"
    return not any(map(os.path.exists, ["/run/optstate/optstated.sock", own]))


def test_default_when_there_is_no_daemon(monkeypatch):
    if not _without_daemon(monkeypatch):
        monkeypatch.setenv("OPTSTATE_ENDPOINT", "embedded")
    model, expected = small_model(), small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    assert optimizer.endpoint.startswith("unix:") and optimizer.wire == "shm"
    train(model, optimizer, range(5))
    train(expected, torch.optim.AdamW(expected.parameters(), lr=0.01), range(5))
    assert largest_difference(model, expected) < 1e-5
    optimizer.close()


def test_a_named_job_that_will_not_outlive_the_trainer_is_warned_of(monkeypatch):
    if not _without_daemon(monkeypatch):
        pytest.skip("this machine runs a daemon of its own")
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.warns(UserWarning, match='"brief".*Start optstated') as told:
        optstate.AdamW(parameters, job="brief").close()
    assert [each.filename for each in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optstate.AdamW(parameters).close()
        optstate.AdamW(parameters, job="brief", endpoint="embedded").close()
        monkeypatch.setenv("OPTSTATE_ENDPOINT", "embedded")
        optstate.AdamW(parameters, job="brief").close()


def test_a_named_job_lives_as_long_as_the_trainer():
    model = small_model()
    with optstate.AdamW(model.parameters(), job="mine", endpoint="embedded") as optimizer:
        train(model, optimizer, range(3))
    with optstate.AdamW(small_model().parameters(), job="mine", endpoint="embedded") as again:
        assert again.committed_step == 3


def _train_embedded(connection, rank):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), endpoint="embedded")
    train(model, optimizer, range(3))
    say(connection, (os.getpid(), optimizer.endpoint))
    connection.recv()


def test_nothing_is_left_when_the_trainer_is_killed():
    with running(_train_embedded, 1, grouped=False) as ranks:
        trainer, endpoint = ranks.hear(0)
        processes = _children(trainer)
        directory = _directory(endpoint)
        assert processes and directory.is_dir()
        ranks.kill(0)
        for pid in processes:
            _wait_for_end(pid)
    assert not directory.exists()


def _train_and_end(connection, rank):
    optimizer = optstate.AdamW(small_model().parameters(), endpoint="embedded")
    return os.getpid(), _children(os.getpid()), optimizer.endpoint


def test_nothing_is_left_when_the_trainer_ends():
    with running(_train_and_end, 1, grouped=False) as ranks:
        _, processes, endpoint = ranks.results()[0]
        assert processes
        for pid in processes:
            _wait_for_end(pid)
    assert not _directory(endpoint).exists()
