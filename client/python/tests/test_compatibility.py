"""Today's daemon opens what each release has left: tests/compatibility/README.md.

Every job is there at its step, bit for bit, and goes on; a durable one comes back from its disk
alone. What a release's client sent to register is understood.
"""

from __future__ import annotations

import pathlib
import shutil
import sys

import pytest
from daemon import start_daemon_with_disks

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/compatibility"))

import archive

_RELEASES = [archive.FOLDER / version for version in archive.releases()]


def test_archives_are_there():
    assert not archive.problems()
    if not _RELEASES:
        pytest.skip(
            "no release has an archive yet, so nothing of a former build is opened: "
            "make the first one with tests/compatibility/record VERSION"
        )


@pytest.fixture(params=_RELEASES, ids=lambda folder: folder.name)
def release(request: pytest.FixtureRequest) -> pathlib.Path:
    return request.param


@pytest.fixture
def daemon_of_release(release, tmp_path):
    """A daemon of today with the jobs of the release."""
    running = start_daemon_with_disks(tmp_path, "disk")
    running.stop_gently()
    archive.unpack(release / archive.STATE, running.directory / "state", tmp_path / "disk")
    running.start()
    yield running
    running.stop()


def _jobs_of(release: pathlib.Path) -> list[str]:
    return archive.read_about(release)["jobs"]


def _goes_on(daemon, release: pathlib.Path, name: str) -> None:
    expected = archive.load(release / archive.EXPECTED)
    model, optimizer = archive.attach(daemon, name)
    assert optimizer.committed_step == archive.read_about(release)["steps"], daemon.log
    found = archive.contents(model, optimizer)
    assert not archive.differences(expected, name, archive.PACKED, found)
    archive.take_step(model, optimizer, optimizer.committed_step + 1)
    found = archive.contents(model, optimizer)
    assert not archive.differences(expected, name, archive.FURTHER, found)
    optimizer.close()


def test_jobs_go_on(release, daemon_of_release):
    assert sorted(daemon_of_release.jobs()) == _jobs_of(release), daemon_of_release.log
    for name in _jobs_of(release):
        _goes_on(daemon_of_release, release, name)


def test_a_durable_job_comes_back_from_its_disk(release, daemon_of_release):
    daemon_of_release.stop_gently()
    shutil.rmtree(daemon_of_release.directory / "state")
    daemon_of_release.start()
    assert daemon_of_release.jobs() == ["on-disk"], daemon_of_release.log
    _goes_on(daemon_of_release, release, "on-disk")


def test_sessions_of_the_release_are_understood(release, daemon_of_release):
    sessions = archive.load(release / archive.SESSION)
    for name in _jobs_of(release):
        hello, register = (sessions[f"{name}/{which}"].tobytes() for which in ("hello", "register"))
        _, registered = archive.replay(daemon_of_release.socket, hello, register)
        wanted = archive.layout_hash(daemon_of_release.directory / "state", name)
        # A refusal has no hash.
        assert wanted in registered, (name, registered)
