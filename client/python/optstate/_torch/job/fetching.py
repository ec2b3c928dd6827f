"""Fetches the state of an attachment's parameters as torch has it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from optstate._torch.shards import like_parameter, stand_in
from optstate._torch.state import checkpoint

if TYPE_CHECKING:
    from optstate._torch.job.attachment import Attachment


def fetch(
    attachment: Attachment, param_groups: Sequence[dict[str, Any]], keys: Collection[str] | None
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns state by tensor, without tensors that were never updated or are not in the job.
    Groups and tensors may be in any order. keys: names of the wanted arrays."""
    wanted = [
        (index, (tensor, group))
        for group in map(attachment.options.fixed_group, param_groups)
        for tensor in group["params"]
        if (index := attachment.parameters.index_of(tensor)) is not None
    ]
    entries = checkpoint.fetch_entries(
        attachment.arrays,
        attachment.info,
        [index for index, _ in wanted],
        [(stand_in(tensor), group) for _, (tensor, group) in wanted],
        keys=keys,
        is_initialised=attachment.is_initialised,
    )
    return {
        tensor: {key: like_parameter(value, tensor) for key, value in entry.items()}
        for (_, (tensor, _)), entry in zip(wanted, entries)
        if entry is not None
    }
