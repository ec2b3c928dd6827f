"""A daemon of an earlier build, for tests: relays to a real one, and forgets what it can do.

The greeting says what a daemon knows (v1.HelloReply); an earlier build's lacks the newer fields.
"""

from __future__ import annotations

import array
import os
import pathlib
import socket
import struct
import threading

_HEADER = struct.Struct("<4sI")  # of a frame: proto/shm/frame.h
_KNOWS_TWO_PHASES = 5
_KNOWS_AWAITED_NORMS = 6
LACKS = (_KNOWS_TWO_PHASES, _KNOWS_AWAITED_NORMS)
_FDS_MAX = 4
_BYTES_MAX = 1 << 20


def _varint(payload: bytes, at: int) -> tuple[int, int]:
    """Returns the number, and where it ends."""
    value = shift = 0
    while True:
        byte = payload[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def without_field(payload: bytes, field: int) -> bytes:
    """Returns a message of protobuf without a field that is a number."""
    kept, at = b"", 0
    while at < len(payload):
        begin = at
        key, at = _varint(payload, at)
        size, after = _varint(payload, at)  # of a number, the number
        at = after + (size if key & 7 == 2 else 0)
        assert key & 7 in (0, 2), f"kind {key & 7} of field {key >> 3} is not expected"
        if key >> 3 != field:
            kept += payload[begin:at]
    return kept


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise EOFError
        found += more
    return found


def _relay(source: socket.socket, sink: socket.socket) -> None:
    """Relays bytes and file descriptors until an end closes."""
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(source, _BYTES_MAX, _FDS_MAX)
            if not data:
                break
            try:
                ancillary = []
                if descriptors:
                    packed = array.array("i", descriptors)
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)]
                sent = sink.sendmsg([data], ancillary)
                sink.sendall(data[sent:])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
    except OSError:
        pass  # an end is gone
    for each in (source, sink):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class OlderDaemon:
    """A socket that reaches a daemon, which does not know steps of two phases while `is_older`,
    or not those that await a norm."""

    def __init__(self, path: pathlib.Path, daemon: pathlib.Path, lacks: int) -> None:
        self._lacks = lacks
        self._path, self._daemon = path, daemon
        self.is_older = True
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def shm(self) -> str:
        return f"unix:{self._path}"

    @property
    def grpc_unix(self) -> str:
        return f"grpc:unix:{self._path}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        self._ends += [client, server]
        try:
            server.connect(str(self._daemon))
            self._greet(client, server)
        except (OSError, EOFError):  # the daemon is away, or a peer only knocked
            client.close()
            server.close()
            return
        threading.Thread(target=_relay, args=(client, server), daemon=True).start()
        _relay(server, client)

    def _greet(self, client: socket.socket, server: socket.socket) -> None:
        magic, size = _HEADER.unpack(_receive_exactly(client, _HEADER.size))
        server.sendall(_HEADER.pack(magic, size) + _receive_exactly(client, size))
        magic, size = _HEADER.unpack(_receive_exactly(server, _HEADER.size))
        reply = _receive_exactly(server, size)
        if self.is_older:
            reply = without_field(reply, self._lacks)
        client.sendall(_HEADER.pack(magic, len(reply)) + reply)

    def cut(self) -> None:
        """Ends all connections, as the end of an engine does."""
        ends, self._ends = self._ends, []
        for each in ends:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
