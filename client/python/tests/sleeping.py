"""Facts of jobs that sleep, for tests of several modules."""

from __future__ import annotations

import pathlib


def is_in_memory(path: pathlib.Path) -> bool:
    """Returns whether a path is on a file system in memory, where no job sleeps."""
    kinds = {}
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        kinds[fields.split()[4]] = rest.split()[0]
    places = [str(path.resolve()), *map(str, path.resolve().parents)]
    return next(kinds[place] for place in places if place in kinds) in ("tmpfs", "ramfs")


def phase(daemon, job):
    """Returns what optctl calls the phase of a job."""
    return daemon.optctl("describe", "job", job)["phase"]
