"""Makes tests/compatibility/VERSION from the installed wheel; README.md has how it is called."""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

import archive
import numpy
from daemon import Daemon, program, start_daemon_with_disks

BYTES_MAX = 300 << 10


def format_versions() -> dict[str, str]:
    """Returns what the daemon says of its formats, as an upgrade asks it."""
    said = subprocess.run(
        [program("optstated"), "--format-versions"], capture_output=True, text=True, check=True
    )
    found = dict(re.findall(r'^(\w+): "?([^"\n]*)"?$', said.stdout, re.MULTILINE))
    if "version" not in found:
        raise SystemExit(f"optstated --format-versions says no version:\n{said.stdout}")
    return found


def train(daemon: Daemon, scratch: pathlib.Path) -> tuple[dict, dict]:
    """Makes every job; returns its bytes, and what its client sent."""
    recorder = archive.SessionRecorder(scratch / "recorder.sock", daemon.socket)
    expected: dict[str, numpy.ndarray] = {}
    sessions: dict[str, numpy.ndarray] = {}
    for name in archive.JOBS:
        model, optimizer = archive.attach(daemon, name, recorder.shm)
        for step in range(1, archive.STEPS + 1):
            archive.take_step(model, optimizer, step)
        expected |= archive.keyed(name, archive.PACKED, archive.contents(model, optimizer))
        optimizer.close()
        hello, register = recorder.sessions[0]
        recorder.sessions.clear()
        sessions[f"{name}/hello"] = numpy.frombuffer(hello, numpy.uint8)
        sessions[f"{name}/register"] = numpy.frombuffer(register, numpy.uint8)
    recorder.close()
    return expected, sessions


def go_on(daemon: Daemon, expected: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    """Takes the further step in the daemon that has started again."""
    further: dict[str, numpy.ndarray] = {}
    for name in archive.JOBS:
        model, optimizer = archive.attach(daemon, name)
        if optimizer.committed_step != archive.STEPS:
            raise SystemExit(f"{name} is at step {optimizer.committed_step} after a restart")
        found = archive.contents(model, optimizer)
        wrong = archive.differences(expected, name, archive.PACKED, found)
        if wrong:
            raise SystemExit(f"{name} changed over a restart: {', '.join(wrong)}")
        archive.take_step(model, optimizer, archive.STEPS + 1)
        further |= archive.keyed(name, archive.FURTHER, archive.contents(model, optimizer))
        optimizer.close()
    return further


def record(version: str, target: pathlib.Path) -> None:
    versions = format_versions()
    if versions["version"] != version:
        raise SystemExit(f"{program('optstated')} is version {versions['version']}, not {version}")
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="optstate-record-"))
    made = scratch / "archive"
    made.mkdir()
    try:
        daemon = start_daemon_with_disks(scratch, "disk")
        try:
            expected, sessions = train(daemon, scratch)
            daemon.stop_gently()
            archive.pack(made / archive.STATE, daemon.directory / "state", scratch / "disk")
            daemon.start()
            expected |= go_on(daemon, expected)
        finally:
            daemon.stop()
        numpy.savez_compressed(made / archive.EXPECTED, **expected)
        numpy.savez_compressed(made / archive.SESSION, **sessions)
        about = {**versions, "machine": platform.machine(), "steps": archive.STEPS}
        about["jobs"] = sorted(archive.JOBS)
        (made / archive.ABOUT).write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
        size = sum(path.stat().st_size for path in made.iterdir())
        if size > BYTES_MAX:
            raise SystemExit(f"the archive has {size} bytes, at most {BYTES_MAX} are to be kept")
        shutil.copytree(made, target)
        archive.RELEASES.write_text("\n".join([*archive.releases(), version]) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{target}: {size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests/compatibility/record",
        description="Makes the archive of a release from the wheel that is installed in .venv; "
        "$OPTSTATE_DAEMON replaces its daemon.",
    )
    parser.add_argument("version", help="the version that the daemon must have, such as 0.1.0")
    arguments = parser.parse_args()
    if not re.fullmatch(r"\d+\.\d+\.\d+", arguments.version):
        parser.error(f"{arguments.version!r} is no version")
    target = archive.FOLDER / arguments.version
    if target.exists():
        sys.exit(f"{target} exists: a release's archive is made once, and does not change")
    record(arguments.version, target)


if __name__ == "__main__":
    main()
