"""DistributedDataParallel without its all-reduce: the daemon averages instead."""

from typing import Any

import torch

from optstate._torch.gradients.pusher import expect_copies


def ddp_hook(_: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook that communicates nothing.

    It is for optimizers made with ``reduction="daemon"``, where the daemon takes each
    rank's own gradients and averages them in the same pass as the update::

        model = DistributedDataParallel(module)
        model.register_comm_hook(None, optstate.ddp_hook)
        optimizer = optstate.AdamW(module.parameters(), reduction="daemon")
    """
    expect_copies(bucket.parameters(), bucket.gradients())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
