"""A memory control group of this machine, for tests: a limit that the kernel asserts."""

from __future__ import annotations

import os
import pathlib
import tempfile

_ROOT = pathlib.Path("/sys/fs/cgroup")


def _own_group() -> tuple[pathlib.Path, bool]:
    """Returns this process's group with a memory controller, and whether it is of version 2."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / path.lstrip("/"), False
        if not controllers and (_ROOT / "cgroup.controllers").exists():
            return _ROOT / path.lstrip("/"), True
    raise OSError("there is no memory controller")


class MemoryGroup:
    """An empty group without a limit; OSError, which says why, when none can be made.

    A process is put into it before it takes memory. close() removes the group, once it is empty.
    """

    def __init__(self) -> None:
        parent, self._is_v2 = _own_group()
        self._path = pathlib.Path(tempfile.mkdtemp(prefix="optstate-test-", dir=parent))
        try:
            if not (self._path / self._file("max", "limit_in_bytes")).exists():
                raise OSError(f"{parent} does not give its memory controller to groups below it")
        except OSError:
            self.close()
            raise

    def _file(self, v2: str, v1: str) -> str:
        return f"memory.{v2 if self._is_v2 else v1}"

    def _read(self, v2: str, v1: str) -> int:
        return int((self._path / self._file(v2, v1)).read_text())

    def enter(self) -> None:
        """Puts the calling process into the group."""
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, size: int) -> None:
        """Limits memory and swap together."""
        (self._path / self._file("max", "limit_in_bytes")).write_text(str(size))
        if self._is_v2:
            (self._path / "memory.swap.max").write_text("0")
            return
        together = self._path / "memory.memsw.limit_in_bytes"
        if together.exists():  # absent where the kernel does not account for swap
            together.write_text(str(size))
        else:
            (self._path / "memory.swappiness").write_text("0")

    @property
    def usage(self) -> int:
        return self._read("current", "usage_in_bytes")

    @property
    def max_usage(self) -> int:
        return self._read("peak", "max_usage_in_bytes")

    def close(self) -> None:
        self._path.rmdir()
