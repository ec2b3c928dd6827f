"""Comparison of a parameter, wherever it is, with the daemon's values."""

from __future__ import annotations

import torch

from optstate._torch.device.backends import backend_of, to_host
from optstate._torch.tensors import equal_bits

_PART = 4 << 20  # elements that are compared at a time


def equals_host(tensor: torch.Tensor, host: torch.Tensor) -> bool:
    """Returns whether a tensor has the bits of one in host memory; waits as to_host() does."""
    if backend_of(tensor) is None:
        return equal_bits(tensor, host)
    # In parts, which are all that page-locked memory is taken for.
    parts = zip(tensor.reshape(-1).split(_PART), host.reshape(-1).split(_PART))
    return all(equal_bits(to_host(one), other) for one, other in parts)
