"""group=, private= and readers=: who may use a new job besides its owner."""

from __future__ import annotations

import getpass
import grp
import os
import pickle
import subprocess

import optstate
import pytest
import ranks
import torch
from daemon import program
from optstate._access import Access, access, check_same
from training import small_model, train


def _access_of(daemon, job):
    return daemon.optctl("describe", "job", job)["access"]


def _own_group():
    """A group that the tables have this test's user in, which a job's owner may name."""
    return grp.getgrgid(os.getgid()).gr_name


def _attach(job, **kwargs):
    return optstate.AdamW(small_model().named_parameters(), lr=0.01, job=job, **kwargs)


@pytest.mark.parametrize("wire", ["shm", "grpc_unix", "grpc_tcp"])
def test_a_new_job_has_what_is_asked_for(wire, daemon, job):
    readers = [getpass.getuser(), "4711", f"@{_own_group()}"]
    asked = {"group": _own_group(), "private": True, "readers": readers}
    optimizer = _attach(job, endpoint=getattr(daemon, wire), **asked)
    model = small_model()
    assert optimizer.committed_step == 0
    found = _access_of(daemon, job)
    assert found == {"group": _own_group(), "is_private": True, "readers": readers}
    optimizer.close()
    # Whoever asks for nothing keeps what there is, and is told nothing.
    again = optstate.AdamW(model.named_parameters(), lr=0.01, job=job)
    train(model, again, range(2))
    assert _access_of(daemon, job) == found


def test_by_default_the_job_is_its_owners_and_all_may_look(daemon, job):
    _attach(job)
    assert _access_of(daemon, job) == {"group": "", "is_private": False, "readers": []}


def test_a_job_that_is_there_keeps_its_own(daemon, job, capfd):
    _attach(job).close()
    capfd.readouterr()
    optimizer = _attach(job, private=True)
    said = capfd.readouterr().err
    assert "keeps who may use it (not private)" in said and f"optctl set job {job}" in said
    assert not _access_of(daemon, job)["is_private"]
    optimizer.close()
    daemon.run_optctl("set", "job", job, "private=true")
    assert _access_of(daemon, job)["is_private"]
    _attach(job, private=True)
    assert "keeps who may use it" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"group": "a,b"}, ValueError, "Invalid group"),
        ({"group": ""}, ValueError, "Invalid group"),
        ({"group": 1.5}, TypeError, "no name or number"),
        ({"private": 1}, TypeError, "not True or False"),
        ({"private": True, "readers": "alice"}, TypeError, "give a list"),
        ({"private": True, "readers": ["a/b"]}, ValueError, "Invalid reader"),
        ({"private": True, "readers": ["@"]}, ValueError, "Invalid reader"),
        ({"readers": ["alice"]}, ValueError, "needs private=True"),
        ({"private": True, "readers": ["a"] * 33}, ValueError, "33 readers; at most 32"),
        ({"group": "no-such-group"}, optstate.InvalidArgumentError, "no-such-group"),
        (
            {"private": True, "readers": ["no-such-user"]},
            optstate.InvalidArgumentError,
            "no-such-user",
        ),
    ],
)
def test_what_is_wrong_is_said(asked, error, says, daemon, job):
    with pytest.raises(error, match=says):
        _attach(job, **asked)
    assert job not in daemon.jobs()


def test_numbers_are_taken_as_names(daemon, job):
    _attach(job, group=os.getgid(), private=True, readers=[os.getuid(), "@0"])
    found = _access_of(daemon, job)
    assert found["group"] == str(os.getgid()) and found["readers"] == [str(os.getuid()), "@0"]


def test_a_job_without_a_name_has_one_user():
    with pytest.raises(ValueError, match="needs job="):
        optstate.AdamW(small_model().parameters(), lr=0.01, private=True)
    with pytest.raises(ValueError, match="needs job="):
        optstate.ParameterStore({"w": ((4,), torch.float32)}, lr=0.01, group="root")


def test_a_private_daemon_refuses(job):
    with pytest.raises(optstate.FailedPreconditionError, match="which has one user"):
        _attach(job, private=True, endpoint="embedded")


def test_a_store_has_them_too(daemon, job):
    store = optstate.ParameterStore(
        {"w": ((4,), torch.float32)}, lr=0.01, job=job, placement="host", private=True
    )
    assert _access_of(daemon, job)["is_private"]
    store.close()


def test_a_copy_asks_for_the_same(daemon, job):
    optimizer = _attach(job, private=True)
    copied = pickle.loads(pickle.dumps(optimizer))
    copied.attach(f"{job}-copy")
    assert _access_of(daemon, f"{job}-copy")["is_private"]


def _differ(connection, rank, job):
    with pytest.raises(ValueError, match="rank 1 asks for a job with .*private=True") as refused:
        _attach(job, private=rank == 1)
    return str(refused.value)


def test_ranks_that_differ_are_told(daemon, job):
    first, second = ranks.run(_differ, 2, job)
    assert first == second and "give all ranks the same" in first
    assert job not in daemon.jobs()


def _alike(connection, rank, job):
    return _attach(job, private=True, readers=["4711"]).job


def test_ranks_that_ask_alike_attach(daemon, job):
    assert ranks.run(_alike, 2, job) == [job, job]
    assert _access_of(daemon, job)["readers"] == ["4711"]


def test_the_values_are_compared_as_a_whole():
    assert access() is None and access(None, False, []) is None
    check_same([None, Access(), access()])
    with pytest.raises(ValueError, match="rank 2 asks for a job with group='a', private=False"):
        check_same([None, None, access("a")])


def test_another_user_finds_no_such_job(daemon, job):
    """A user of the machine other than the one who runs the daemon: it takes root to be one."""
    if os.getuid() != 0:
        pytest.skip("takes root, to run optctl as another user")
    optimizer = _attach(job, private=True)

    def ask(*arguments: str) -> subprocess.CompletedProcess:
        command = [program("optctl"), "--endpoint", daemon.shm, *arguments]
        return subprocess.run(
            command, user=4711, group=4711, extra_groups=[], capture_output=True, text=True
        )

    def shown(*arguments: str) -> str:
        done = ask(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        reached = ask("status")
    except PermissionError as error:
        pytest.skip(f"user 4711 may not run optctl: {error}")
    if reached.returncode != 0:
        pytest.skip(f"user 4711 does not reach the daemon: {reached.stderr}")
    open_job = f"{job}-open"
    _attach(open_job).close()
    for verb in (("get", "jobs"), ("events",)):
        # The longer name has the shorter one in it.
        assert open_job in shown(*verb)
        assert job not in shown(*verb).replace(open_job, "")
    for verb in (("describe", "job"), ("delete", "job"), ("sleep",)):
        refused = ask(*verb, job)
        assert refused.returncode == 3 and f'there is no job "{job}"' in refused.stderr
    daemon.run_optctl("set", "job", job, "readers=4711")
    for verb in (("get", "jobs"), ("events",)):
        assert job in shown(*verb).replace(open_job, "")
    assert ask("delete", "job", job).returncode == 4
    optimizer.close()
