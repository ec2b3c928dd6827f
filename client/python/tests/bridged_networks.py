"""Networks of this machine, any number of them, for tests: namespaces that a bridge connects."""

from __future__ import annotations

import itertools
import os
import subprocess

from two_networks import INTERFACE, run_ip

_numbers = itertools.count()


class BridgedNetworks:
    """Network namespaces, each with one link to a bridge; OSError, which says why, when none can be
    made.

    Sockets in the file system are reached from all. close() removes the namespaces.
    """

    def __init__(self, count: int) -> None:
        unique = f"optstate-test-{os.getpid()}-bridged-{next(_numbers)}"
        self.names = [f"{unique}-{number}" for number in range(count)]
        self._switch = f"{unique}-switch"
        try:
            run_ip("netns", "add", self._switch)
            run_ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            run_ip("-n", self._switch, "link", "set", "bridge", "up")
            for number, name in enumerate(self.names):
                self._add(name, f"node-{number}", f"10.213.8.{number + 1}/24")
        except OSError:
            self.close()
            raise

    def _add(self, name: str, port: str, address: str) -> None:
        run_ip("netns", "add", name)
        ends = ["type", "veth", "peer", "name", port, "netns", self._switch]
        run_ip("-n", name, "link", "add", INTERFACE, *ends)
        run_ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        run_ip("-n", name, "address", "add", address, "dev", INTERFACE)
        run_ip("-n", name, "link", "set", "lo", "up")
        run_ip("-n", name, "link", "set", INTERFACE, "up")

    def close(self) -> None:
        for name in [*self.names, self._switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
