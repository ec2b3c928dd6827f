"""The accelerators that there are."""

from __future__ import annotations

from typing import Any, Callable

import torch

from optstate._torch.device.cuda import CudaBackend
from optstate._torch.device.interface import Backend

# By type of device; made when the first tensor of the type is seen. Tests add a type.
FACTORIES: dict[str, Callable[[], Backend]] = {"cuda": CudaBackend}
_backends: dict[str, Backend] = {}


def device_of(tensor: torch.Tensor) -> torch.device:
    """Returns the device, with its own streams, that has the tensor. Tests replace this."""
    return tensor.device


def backend_of(tensor: torch.Tensor) -> Backend | None:
    """Returns the accelerator that has the tensor; None: none whose copies can be awaited."""
    kind = tensor.device.type
    if kind not in FACTORIES:
        return None
    if kind not in _backends:
        _backends.setdefault(kind, FACTORIES[kind]())  # another thread may be as far
    return _backends[kind]


def forget_backends() -> None:
    """Makes the backends anew when they are needed; for tests that exchange FACTORIES."""
    _backends.clear()


def to_list(tensor: torch.Tensor) -> Any:
    """Returns what tensor.tolist() does, and waits as to_host() does."""
    return to_host(tensor).tolist()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns values in host memory. Waits for the tensor's own stream of copies alone, so that
    other work of the device goes on."""
    backend = backend_of(tensor)
    if backend is None:
        return tensor.detach().cpu()
    source = tensor.detach().resolve_neg().contiguous()
    size = source.numel() * source.element_size()
    host = backend.pinned(size).view(source.dtype).view(source.shape)
    stream = backend.stream(source.device, "to_host")
    stream.follow()
    stream.copy(host, source)
    stream.record().synchronize()
    return host
