"""Two networks of this machine, for tests: namespaces whose one link can be cut."""

from __future__ import annotations

import ctypes
import itertools
import os
import pathlib
import subprocess
import time

INTERFACE = "veth-optstate"
_CLONE_NEWNET = 0x40000000
_LOSS_TIMEOUT_S = 60
_numbers = itertools.count()


def _ip(*arguments: str) -> None:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise OSError(f"there is no ip command: {error}") from None
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _segments_sent_again(process: int) -> int:
    """Returns the count of TCP segments sent again, in the network of a process; -1: it ended."""
    try:
        text = pathlib.Path(f"/proc/{process}/net/snmp").read_text()
    except FileNotFoundError:
        return -1
    names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


class TwoNetworks:
    """Two network namespaces with one link; OSError, which says why, when none can be made.

    Sockets in the file system are reached from both. close() removes the namespaces.
    """

    def __init__(self) -> None:
        unique = f"optstate-test-{os.getpid()}-{next(_numbers)}"
        self.names = [f"{unique}-{number}" for number in range(2)]
        try:
            for name in self.names:
                _ip("netns", "add", name)
            self._join()
        except OSError:
            self.close()
            raise

    def _join(self) -> None:
        one, other = self.names
        ends = ["type", "veth", "peer", "name", INTERFACE, "netns", other]
        _ip("-n", one, "link", "add", INTERFACE, *ends)
        for number, name in enumerate(self.names):
            _ip("-n", name, "address", "add", f"10.213.7.{number + 1}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")

    def cut(self) -> None:
        """Drops all packets from now on; connections stay."""
        _ip("-n", self.names[1], "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        _ip("-n", self.names[1], "link", "set", INTERFACE, "up")

    def await_loss(self, *processes: int) -> None:
        """Returns once one of these processes' networks has sent something in vain, or one of the
        processes has ended, which needed the link no more."""
        before = [_segments_sent_again(process) for process in processes]
        deadline = time.monotonic() + _LOSS_TIMEOUT_S
        now = before
        while now == before and -1 not in now:
            assert time.monotonic() < deadline, "nothing was sent over the link"
            time.sleep(0.01)
            now = [_segments_sent_again(process) for process in processes]

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def enter(name: str) -> None:
    """Moves the calling thread, and those that it starts, into a network namespace."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
    finally:
        os.close(descriptor)
