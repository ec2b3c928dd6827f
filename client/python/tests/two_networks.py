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
_ESTABLISHED = 1
_LOSS_TIMEOUT_S = 60
_numbers = itertools.count()


def run_ip(*arguments: str) -> None:
    """Runs the command `ip`; OSError: it is not there, or refuses."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise OSError(f"there is no ip command: {error}") from None
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _bytes_in_flight(process: int) -> int:
    """Returns how many bytes the other ends of a process's network's TCP connections have not
    acknowledged; -1: the process has ended."""
    total = 0
    for table in ["tcp", "tcp6"]:
        try:
            lines = pathlib.Path(f"/proc/{process}/net/{table}").read_text().splitlines()
        except OSError:
            return -1
        for line in lines[1:]:
            _, _, _, state, queues, *_ = line.split()
            if int(state, 16) == _ESTABLISHED:
                total += int(queues.split(":")[0], 16)
    return total


class TwoNetworks:
    """Two network namespaces with one link; OSError, which says why, when none can be made.

    Sockets in the file system are reached from both. close() removes the namespaces.
    """

    def __init__(self) -> None:
        unique = f"optstate-test-{os.getpid()}-{next(_numbers)}"
        self.names = [f"{unique}-{number}" for number in range(2)]
        try:
            for name in self.names:
                run_ip("netns", "add", name)
            self._link()
            for number, name in enumerate(self.names):
                run_ip("-n", name, "address", "add", f"10.213.7.{number + 1}/24", "dev", INTERFACE)
                run_ip("-n", name, "link", "set", "lo", "up")
                run_ip("-n", name, "link", "set", INTERFACE, "up")
        except OSError:
            self.close()
            raise

    def _link(self) -> None:
        """Makes the interfaces, which are not up yet."""
        one, other = self.names
        ends = ["type", "veth", "peer", "name", INTERFACE, "netns", other]
        run_ip("-n", one, "link", "add", INTERFACE, *ends)

    def cut(self) -> None:
        """Drops all packets from now on; connections stay."""
        run_ip("-n", self.names[1], "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        run_ip("-n", self.names[1], "link", "set", INTERFACE, "up")

    def await_loss(self, *processes: int) -> None:
        """Returns once one of these processes' networks has sent something in vain, or one of the
        processes has ended, which needed the link no more. The link is cut."""
        deadline = time.monotonic() + _LOSS_TIMEOUT_S
        while all(_bytes_in_flight(process) == 0 for process in processes):
            assert time.monotonic() < deadline, "nothing was sent over the link"
            time.sleep(0.01)

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
