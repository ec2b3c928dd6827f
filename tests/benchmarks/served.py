"""optstate.AdamW through a daemon of the benchmark's own."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator, Sequence

import optstate
import torch

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# The daemon and the processes of the client's tests, and the model of the demo.
sys.path += [str(_ROOT / "client/python/tests"), str(_ROOT / "deploy/demo_app")]

import ranks  # noqa: E402, F401
from daemon import Daemon  # noqa: E402

# Bytes of one element: gradient and parameter of the trainer, their segments, and the state.
BYTES_PER_ELEMENT = 4 * (2 + 2 + 3)
RESERVE_BYTES = 2 << 30


@contextlib.contextmanager
def running_daemon(*arguments: str) -> Iterator[Daemon]:
    """arguments: further ones of optstated."""
    daemon = Daemon(*arguments)
    try:
        yield daemon
    finally:
        daemon.stop()


def available_bytes() -> int:
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def why_not(elements: int) -> str:
    """Returns why so many elements in one job cannot be measured now; empty when they can."""
    wanted, found = elements * BYTES_PER_ELEMENT + RESERVE_BYTES, available_bytes()
    if wanted <= found:
        return ""
    return f"needs {wanted / 2**30:.0f} GiB of memory, {found / 2**30:.0f} GiB are available"


def parameters_of(sizes: Sequence[int]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(len(sizes))
    parameters = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-2
    return parameters


def adamw(parameters, endpoint: str, **options) -> optstate.AdamW:
    return optstate.AdamW(parameters, lr=1e-4, endpoint=endpoint, **options)
