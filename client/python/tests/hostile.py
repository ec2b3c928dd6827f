"""A hostile user of a daemon: floods its sockets in every way that costs nothing.

    python hostile.py UNIX_SOCKET TCP_HOST:PORT SEED ATTACKS

Speaks every protocol by hand, with the standard library alone, so that it can run as any user.
Bounded: it makes ATTACKS attacks, each kind at least once, and holds at most CONNECTIONS_MAX
connections. Prints what it did as JSON.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import socket
import struct
import sys

CONNECTIONS_MAX = 600
SEND_TIMEOUT_S = 2.0

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
REFLECTION = b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GET_STATUS = b"/optstate.v1.Admin/GetStatus"
FORGED = b"2026-01-01T00:00:00.000Z error optstated[1] forged by a stranger"


def h2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def hpack(text: bytes) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text


def call(stream: int, path: bytes, *extra: tuple[bytes, bytes]) -> bytes:
    """HEADERS of a gRPC call."""
    block = b"\x83\x86\x04" + hpack(path) + b"\x01" + hpack(b"x")
    block += b"\x0f\x10" + hpack(b"application/grpc") + b"\x00" + hpack(b"te") + hpack(b"trailers")
    for name, value in extra:
        block += b"\x00" + hpack(name) + hpack(value)
    return h2_frame(HEADERS, END_HEADERS, stream, block)


def varint(value: int) -> bytes:
    out = b""
    while value >= 128:
        out += bytes([128 + value % 128])
        value //= 128
    return out + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def frame(payload: bytes) -> bytes:
    return b"OPST" + struct.pack("<I", len(payload)) + payload


def hello(job: str, versions: tuple[int, int] = (3, 3), client: bytes = b"") -> bytes:
    return frame(
        field(1, versions[0])
        + field(2, versions[1])
        + field(3, 1)  # shared memory
        + field(4, job.encode())
        + (field(6, client) if client else b"")
    )


class Hostile:
    """Draws one attack after the other."""

    def __init__(self, unix: str, tcp: str, seed: int) -> None:
        self.unix = unix
        self.host, port = tcp.rsplit(":", 1)
        self.port = int(port)
        self.random = random.Random(seed)
        self.held: collections.deque[socket.socket] = collections.deque()
        self.did: collections.Counter[str] = collections.Counter()

    def connect(self, *, tcp: bool = False) -> socket.socket:
        if tcp:
            peer = socket.create_connection((self.host, self.port), timeout=SEND_TIMEOUT_S)
        else:
            peer = socket.socket(socket.AF_UNIX)
            peer.settimeout(SEND_TIMEOUT_S)
            peer.connect(self.unix)
        while len(self.held) >= CONNECTIONS_MAX:
            self.held.popleft().close()
        self.held.append(peer)
        return peer

    def say(self, data: bytes, *, tcp: bool = False) -> socket.socket:
        peer = self.connect(tcp=tcp)
        with contextlib.suppress(OSError):  # refused, or slowed down
            peer.sendall(data)
        return peer

    def silent(self) -> None:
        for _ in range(60):
            self.say(self.random.choice([b"", b"OP", hello("x")[:11], b"PRI"]))

    def silent_over_tcp(self) -> None:
        for _ in range(60):
            self.say(b"", tcp=True)

    def garbage(self) -> None:
        for _ in range(20):
            self.say(self.random.randbytes(self.random.randrange(1, 4096)))
            self.say(PREFACE + self.random.randbytes(self.random.randrange(1, 4096)))

    def silent_streams(self) -> None:
        streams = b"".join(call(stream, REFLECTION) for stream in range(1, 31, 2))
        self.say(PREFACE + h2_frame(SETTINGS, 0, 0, b"") + streams)

    def resets(self) -> None:
        data = PREFACE + h2_frame(SETTINGS, 0, 0, b"")
        for stream in range(1, 600, 2):
            data += call(stream, GET_STATUS) + h2_frame(DATA, END_STREAM, stream, bytes(5))
            data += h2_frame(RST_STREAM, 0, stream, b"\0\0\0\x08")
        self.say(data)

    def pings(self) -> None:
        self.say(PREFACE + h2_frame(SETTINGS, 0, 0, b"") + h2_frame(PING, 0, 0, bytes(8)) * 5000)

    def huge_header(self) -> None:
        block = (
            b"\x83\x86\x04" + hpack(GET_STATUS) + b"\x00" + hpack(b"big") + b"\x7f\x81\xff\xff\x07"
        )
        data = PREFACE + h2_frame(SETTINGS, 0, 0, b"") + h2_frame(HEADERS, 0, 1, block)
        data += h2_frame(CONTINUATION, 0, 1, bytes(16384)) * 1023
        self.say(data + h2_frame(CONTINUATION, END_HEADERS, 1, bytes(16384)))

    def forged_lines(self) -> None:
        for _ in range(250):
            self.say(hello("forger", versions=(98, 99), client=b"1\n" + FORGED))
        for _ in range(30):
            bad = call(1, GET_STATUS, (b"Upper:Case", b"\n" + FORGED))
            self.say(PREFACE + h2_frame(SETTINGS, 0, 0, b"") + bad)

    def oversized_registration(self) -> None:
        """Registers a layout that does not exist, of two bytes a parameter."""
        peer = self.say(hello(f"big-{self.random.randrange(2)}"))
        with contextlib.suppress(OSError):
            peer.recv(4096)  # the reply: an engine has it
            layout = field(3, b"") * (8 << 20)
            peer.sendall(frame(field(1, 1) + field(2, field(1, layout))))

    def many_jobs(self) -> None:
        for _ in range(4):
            self.say(hello(f"grab-{self.random.randrange(1000)}"))

    def run(self, count: int) -> None:
        attacks = [
            self.silent,
            self.silent_over_tcp,
            self.garbage,
            self.silent_streams,
            self.resets,
            self.pings,
            self.huge_header,
            self.forged_lines,
            self.oversized_registration,
            self.many_jobs,
        ]
        # The registration comes first: later all its jobs may be there. Then each once, in some
        # order, then whatever is drawn.
        order = [self.oversized_registration, *self.random.sample(attacks, len(attacks))]
        order += self.random.choices(attacks, k=max(0, count - len(order)))
        for attack in order:
            try:
                attack()
                self.did[attack.__name__] += 1
            except OSError as error:
                self.did[f"{attack.__name__}: {error}"] += 1


def main() -> None:
    unix, tcp, seed, attacks = sys.argv[1:]
    hostile = Hostile(unix, tcp, int(seed))
    hostile.run(int(attacks))
    print(json.dumps(hostile.did))


if __name__ == "__main__":
    main()
