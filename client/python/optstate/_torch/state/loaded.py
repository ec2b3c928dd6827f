"""A state_dict that is loaded, beside the state that the job has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from optstate import errors
from optstate._torch.state import checkpoint
from optstate._torch.state.checkpoint import MASTER_PARAM, StateEntry
from optstate._torch.state.compare import has_all, same_bits

if TYPE_CHECKING:
    from optstate._torch.job.attachment import Attachment


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A state_dict that fits, in the job's order: groups, tensors with groups, and entries."""

    groups: Sequence[dict[str, Any]]
    tensors: list[tuple[torch.Tensor, dict[str, Any]]]
    entries: dict[int, StateEntry | None]
    own: dict[Any, Any]  # the user's own keys
    frozen: list[torch.Tensor]  # tensors that have entries and are not in the job yet

    def is_present(self, attachment: Attachment) -> bool:
        """Returns whether the job has all of what is to be loaded."""
        if self.frozen:
            return False
        tensors = self.tensors
        if attachment.broken_load is not None:
            # The parameters may be those that were to be loaded; masters round to the job's
            # instead.
            values = attachment.parameters.daemon_values
            tensors = [(values(index), group) for index, (_, group) in enumerate(tensors)]
        try:
            return has_all(attachment.arrays, attachment.info, tensors, self.entries)
        except errors.OptstateError:  # the load reports what is wrong
            return False

    def is_of_another_step(self, attachment: Attachment) -> bool:
        """Returns whether a checkpoint's parameters differ from the job's, as only its steps
        reveal."""
        try:
            counts = attachment.arrays.fetch_step_counts(range(len(self.entries)))
        except errors.OptstateError:  # the job has no complete state
            return True
        return checkpoint.is_of_another_step(attachment.info, self.entries, counts)

    def lacking_masters(self) -> set[int]:
        """Returns the 16-bit parameters without a master, which are their own masters."""
        return {
            index
            for index, (tensor, _) in enumerate(self.tensors)
            if tensor.dtype is not torch.float32 and MASTER_PARAM not in (self.entries[index] or {})
        }

    def unfitting_masters(self) -> dict[int, torch.Tensor]:
        """Returns a checkpoint's masters that do not round to the present parameters: torch's
        set_state_dict() loads the model after the optimizer."""
        masters = {index: (entry or {}).get(MASTER_PARAM) for index, entry in self.entries.items()}
        return {
            index: master.detach().clone()
            for index, master in masters.items()
            if master is not None
            and not same_bits(checkpoint.fitting_master(master, self.tensors[index][0]), master)
        }
