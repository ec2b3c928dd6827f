"""Raw reads and writes of as many bytes as a state has: what the disk alone would take."""

from __future__ import annotations

import concurrent.futures
import mmap
import os
import pathlib

BLOCK_BYTES = 4 << 20
# Enough for the disk to have always several requests; each thread has one block of memory.
THREADS = 8


class RawDisk:
    """A file that each step() reads once and writes once, past the page cache (O_DIRECT)."""

    def __init__(self, path: pathlib.Path, size_bytes: int) -> None:
        if size_bytes % BLOCK_BYTES:
            raise ValueError(f"{size_bytes} bytes are not whole blocks of {BLOCK_BYTES}")
        self._blocks = size_bytes // BLOCK_BYTES
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        # mmap gives whole pages: O_DIRECT needs aligned memory.
        self._buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(THREADS)]
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS)
        # Blocks that were never written are holes: reads of them would not reach the disk.
        self._run(self._write)

    def __enter__(self) -> RawDisk:
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown()
        os.close(self._fd)

    @property
    def memory_bytes(self) -> int:
        return BLOCK_BYTES * THREADS

    def step(self) -> None:
        self._run(self._read_and_write)

    def _run(self, move) -> None:
        def all_of(thread: int) -> None:
            for block in range(thread, self._blocks, THREADS):
                move(self._buffers[thread], block * BLOCK_BYTES)

        for _ in self._pool.map(all_of, range(THREADS)):
            pass

    def _read_and_write(self, buffer: mmap.mmap, offset: int) -> None:
        if os.preadv(self._fd, [buffer], offset) != BLOCK_BYTES:
            raise OSError(f"short read at {offset}")
        self._write(buffer, offset)

    def _write(self, buffer: mmap.mmap, offset: int) -> None:
        if os.pwritev(self._fd, [buffer], offset) != BLOCK_BYTES:
            raise OSError(f"short write at {offset}")
