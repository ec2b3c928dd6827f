"""The gradients that one push takes."""

from __future__ import annotations

import array
import itertools
import operator
from collections.abc import Sequence

import torch

from optstate._torch.tensors import is_contiguous, is_cpu, is_negated, pointer_of


class Gradients:
    """Gradients to be pushed: addresses of those in contiguous host memory, and the others."""

    def __init__(self) -> None:
        self.indices = array.array("I")
        self.pointers = array.array("Q")
        self.others: dict[int, torch.Tensor] = {}
        self.owners: list[torch.Tensor] = []  # keep memory that a signal handler may release
        self.takes_back = False  # gradients that were pushed early have changed since
        self.missing: list[int] = []  # parameters without a gradient

    def add(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        self.owners += gradients
        direct = list(map(operator.and_, map(is_cpu, gradients), map(is_contiguous, gradients)))
        negated = list(map(is_negated, gradients))
        if any(negated):
            direct = list(map(operator.gt, direct, negated))
        if not all(direct):
            self.others.update(
                (index, gradient)
                for index, gradient, is_direct in zip(indices, gradients, direct)
                if not is_direct
            )
            indices = list(itertools.compress(indices, direct))
            gradients = list(itertools.compress(gradients, direct))
        self.indices.extend(indices)
        self.pointers.extend(map(pointer_of, gradients))
