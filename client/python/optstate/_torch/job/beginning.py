"""Checks before the first values are loaded into a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from optstate import errors
from optstate._torch.job.attachment import Attachment
from optstate._torch.names import quoted
from optstate._torch.ranks import Ranks
from optstate._torch.shards import key_of, local_of
from optstate._torch.tensors import bits_sum
from optstate._torch.warn import warn
from optstate.session_spec import ParameterSpec


def raise_failure(attachment: Attachment) -> NoReturn:
    """Raises the daemon's error for a job that is FAILED, or else DataLossError."""
    attachment.arrays.fetch_step_counts([0])
    raise errors.DataLossError(f'job "{attachment.job}" has failed; see optctl describe job')


def deleted(job: str) -> RuntimeError:
    """Returns the error of a job that is gone while it is extended."""
    return RuntimeError(
        f'job "{job}" was deleted while new parameters extended it, and its state with it: start'
        " again from a checkpoint"
    )


def check_extended(attachment: Attachment) -> None:
    """Raises RuntimeError, on every rank, when the job is new: its state would be empty."""
    if any(attachment.ranks.gather(attachment.session.created)):
        raise deleted(attachment.job)


def first_to_load(attachment: Attachment) -> int:
    """Returns the first parameter without state of a job that waits for a load. Parameters
    before it have state when the job was extended and the new ones were never loaded.

    DataLossError when a job that has taken steps has no state at all: loading the trainer's
    initial parameters would silently undo its training.
    """
    first, step = attachment.session.load_required_from, attachment.session.committed_step
    if first == 0 and step > 0:
        raise errors.DataLossError(
            f'job "{attachment.job}" has committed step {step}, but an older daemon\'s load into it'
            " was interrupted, so its state is not whole. Delete it"
            f" (optctl delete job {attachment.job}) and start it again from a checkpoint"
        )
    if first > 0:
        names = [attachment.arrays.name(i) for i in range(first, attachment.parameters.count)]
        warn(
            f'job "{attachment.job}" was being extended by {quoted(names)} at step {step} when'
            " its trainer died: they begin with their present values, and go on without state"
        )
    return first


def check_replicas(attachment: Attachment, tensors: Sequence[torch.Tensor], first: int) -> None:
    """Raises ValueError, on every rank, when ranks would begin a job with different values
    of the parameters from index `first` on.

    Each rank loads the parameters that it owns, so the job would begin with a mixture.
    """
    # A rank holds some shards of each parameter, or all parameters.
    keys = attachment.keys[first:]
    mine = {key: bits_sum(local_of(each)) for key, each in zip(keys, tensors[first:])}
    if attachment.shared_out is not None:  # nodes may have nothing of them in their jobs
        whole = dict(zip(attachment.shared_out.names, attachment.shared_out.tensors))
        new = set(map(id, tensors[first:]))
        mine.update({(n, "whole"): bits_sum(t) for n, t in whole.items() if id(t) in new})
    differs = _find_differing(attachment.ranks, mine)
    if differs is not None:
        raise ValueError(
            f'parameter "{differs}" has other values on other ranks: a job begins with the same on'
            " all (seed alike, or construct the optimizer after DistributedDataParallel, which"
            " broadcasts them). Ranks that train models of their own need jobs, and with"
            " torch.distributed a process_group, of their own"
        )


def sums_of(specs: Sequence[ParameterSpec], tensors: Sequence[torch.Tensor]) -> dict[tuple, int]:
    """Returns sums of this rank's parts of parameters, for check_added()."""
    return {key_of(spec): bits_sum(local_of(each)) for spec, each in zip(specs, tensors)}


def check_added(ranks: Ranks, sums: Mapping[tuple, int]) -> None:
    """Raises ValueError, on every rank, when ranks would extend a job by different values.
    Collective."""
    differs = _find_differing(ranks, sums)
    if differs is not None:
        raise ValueError(
            f'parameter "{differs}", which the job is to be extended by, has other values on other'
            " ranks. The job is as it was: give the parameter the same values on all ranks (seed"
            " alike, or torch.distributed.broadcast()) before it is added or has a gradient"
        )


def _find_differing(ranks: Ranks, mine: Mapping[tuple, int]) -> str | None:
    """Returns the first parameter of which ranks have other sums of the same part. Collective.

    mine: this rank's sums, by what identifies the part, whose parameter's name comes first.
    """
    sums: dict[tuple, set[int]] = {}
    for of_rank in ranks.gather(mine):
        for key, found in of_rank.items():
            sums.setdefault(key, set()).add(found)
    return next((key[0] for key, of_ranks in sums.items() if len(of_ranks) > 1), None)
