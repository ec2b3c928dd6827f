"""What attaching to a job replaced, should a checkpoint be loaded after it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from optstate._collective import Ranks
from optstate._torch_parameters import Parameters
from optstate._torch_tensors import bits_sum, in_memory

# What a checkpoint's state that is loaded before the first step does to a job that was there:
# the job is put back to it, it is left out, or the load is refused.
CHOICES = ("checkpoint", "job", "error")


class ReplacedParameters:
    """Parameters as they were before a job overwrote them, in host memory.

    Frameworks load the model of a checkpoint, construct the optimizer, which attaches to
    the job and takes its parameters, and load the optimizer's state of the checkpoint
    last. The parameters of that checkpoint are nowhere else by then. Kept until the first
    step, and only those that differ.
    """

    def __init__(self, parameters: Parameters) -> None:
        """Before the parameters are read."""
        self._parameters = parameters
        self._values = {
            index: in_memory(parameters.tensors[index]).clone() for index in parameters.different()
        }
        self._versions: list[int] = []
        self.left_out = False  # a checkpoint's state, because the job goes on

    @property
    def count(self) -> int:
        """How many differed."""
        return len(self._values)

    def note_read(self, parameters: Parameters) -> None:
        """After they were read, perhaps of another session with the same parameters first."""
        self._parameters = parameters
        self._versions = [tensor._version for tensor in parameters.tensors]

    def drop_changed(self) -> None:
        """Forgets those that the trainer has changed since."""
        kept = set(self._kept())
        self._values = {index: each for index, each in self._values.items() if index in kept}

    def _kept(self) -> list[int]:
        """Those whose present values are the job's because attaching put them there."""
        tensors = self._parameters.tensors
        written = {
            index for index, each in enumerate(tensors) if each._version != self._versions[index]
        }
        if written and dist.is_available() and dist.is_initialized():
            # DistributedDataParallel writes all of them when it is constructed, unchanged.
            if not self._parameters.different():
                written = set()
        return [index for index in self._values if index not in written]

    def to_put_back(self, ranks: Ranks, is_of_another_step: bool) -> list[int]:
        """Parameters to put back with state that is loaded. Collective.

        is_of_another_step: else the state is one for the job's own parameters.

        RuntimeError, on every rank, when ranks would put back other ones.
        """
        kept = self._kept() if is_of_another_step else []
        found = ranks.gather([(index, bits_sum(self._values[index])) for index in kept])
        if any(other != found[0] for other in found):
            raise RuntimeError(
                "load_state_dict() of a checkpoint that is not the job's state would put back the"
                " parameters that attaching replaced, but ranks had other ones: load the"
                " model's checkpoint on every rank before the optimizer is constructed, or after"
                ' it, or say resume="job"'
            )
        return kept

    @torch.no_grad()
    def put_back(self, indices: list[int]) -> None:
        """Writes these, and forgets the others."""
        self._values = {index: self._values[index] for index in indices}
        for index, values in self._values.items():
            self._parameters.tensors[index].copy_(values)
