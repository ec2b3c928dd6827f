"""Two networks of this machine whose packets come late, for tests: a thread of the test carries
them from one to the other. It needs no sch_netem in the kernel, and a seed gives its delays again.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time

import two_networks

DELAY_MAX_S = 0.02
_PACKET_BYTES_MAX = 1 << 16
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_RELEASE = 2


def _open_device(namespace: str) -> int:
    """Makes the interface of a network namespace; returns the descriptor of what it sends."""
    opened: list[int | OSError] = []

    def open_there() -> None:  # in a thread, which alone enters the namespace
        try:
            two_networks.enter(namespace)
            descriptor = os.open("/dev/net/tun", os.O_RDWR)
            name = two_networks.INTERFACE.encode()
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name, _IFF_TUN_NO_PI))
            opened.append(descriptor)
        except OSError as error:
            opened.append(error)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    if isinstance(opened[0], OSError):
        raise opened[0]
    return opened[0]


class LateNetworks(two_networks.TwoNetworks):
    """TwoNetworks where each packet is under way for a time of its own, so that packets overtake
    each other. cut(), mend() and await_loss() are of no use here."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._devices: list[int] = []
        self._wakes, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry)
        self.overtaken = 0  # packets that arrived after one that was sent later
        super().__init__()

    def _link(self) -> None:
        for name in self.names:
            self._devices.append(_open_device(name))
        self._thread.start()

    def hold(self, sender: int, after: int = 0) -> None:
        """Keeps what a network sends, until release(), but for so many more packets."""
        os.write(self._wake, bytes([sender, after]))

    def release(self) -> None:
        os.write(self._wake, bytes([_RELEASE, 0]))

    def close(self) -> None:
        os.close(self._wake)
        if self._thread.ident is not None:
            self._thread.join()
        for descriptor in (self._wakes, *self._devices):
            os.close(descriptor)
        super().close()

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []  # when it arrives, number, sender, it
        held: list[tuple[int, bytes]] = []
        holding, passing = _RELEASE, 0
        count, latest = 0, [0, 0]
        while True:
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            readable, _, _ = select.select([self._wakes, *self._devices], [], [], wait)
            sent: list[tuple[int, bytes]] = []
            if self._wakes in readable:
                command = os.read(self._wakes, 2)
                if not command:
                    return
                holding, passing = command
                if holding == _RELEASE:
                    sent, held = held, []
            for sender, device in enumerate(self._devices):
                if device in readable:
                    packet = os.read(device, _PACKET_BYTES_MAX)
                    is_held = sender == holding and passing == 0
                    (held if is_held else sent).append((sender, packet))
                    passing -= sender == holding and passing > 0
            for sender, packet in sent:
                count += 1
                arrives = time.monotonic() + self._random.uniform(0, DELAY_MAX_S)
                heapq.heappush(under_way, (arrives, count, sender, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, number, sender, packet = heapq.heappop(under_way)
                self.overtaken += number < latest[sender]
                latest[sender] = max(latest[sender], number)
                with contextlib.suppress(OSError):  # the interface is not up yet
                    os.write(self._devices[1 - sender], packet)
