"""Copies of the optimizer, and new optimizers for its job."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch

from programs.model import random_values
from programs.registry import batch, of, operation


@operation(1)
def deepcopy(side: Any) -> None:
    """The script goes on with copies."""
    former = side.optimizer
    model, optimizer = copy.deepcopy((side.model, side.optimizer))
    side.model = model
    side.adopt(optimizer)
    if side.is_ours:
        former.close()
        optimizer.attach(side.next_job())


@operation(1)
def pickled(side: Any) -> None:
    former = side.optimizer
    side.model, optimizer = pickle.loads(pickle.dumps((side.model, former)))
    side.adopt(optimizer)
    if side.is_ours:
        former.close()
        optimizer.attach(side.next_job())


@operation(
    3,
    lambda program: program.has_job,
    wire=of("shm", "grpc_unix", "grpc_tcp"),
    seed=batch,
    scrambles=of(True, True, False),
)
def reattach(side: Any, wire: str, seed: int, scrambles: bool) -> None:
    """A script that starts anew: other first values, the same job."""
    groups = side.groups_again()
    trained = {id(each) for group in side.optimizer.param_groups for each in group["params"]}
    if side.is_ours:
        # Edits since the last step are only here.
        side.optimizer.upload_parameters()
        side.optimizer.load_state_dict(side.optimizer.state_dict())
        side.optimizer.close()
        if scrambles:
            with torch.no_grad():
                for number, parameter in enumerate(side.model.distinct()):
                    # A parameter that is frozen, or in no group, is in no job.
                    if parameter.requires_grad and id(parameter) in trained:
                        parameter.copy_(random_values(parameter.shape, seed + number))
        side.adopt(side.make_optimizer(groups, wire))
        # Uploads, because a load before the first step puts back what attaching replaced.
        side.optimizer.upload_parameters()
    else:
        former = side.optimizer
        side.adopt(side.make_optimizer(groups, wire))
        made = [dict(group) for group in side.optimizer.param_groups]
        side.optimizer.load_state_dict(former.state_dict())
        for group, options in zip(side.optimizer.param_groups, made):
            group.update(options)


@operation(1, lambda program: program.has_job and program.scaler != "daemon")
def take_over(side: Any) -> None:
    """Goes on as a private optimizer with a checkpoint of the job's."""
    saved = copy.deepcopy(side.optimizer.state_dict())
    saved_model = copy.deepcopy(side.model.state_dict())
    groups = side.groups_again()
    if side.is_ours:
        side.optimizer.close()
        side.next_job()
    side.adopt(side.make_optimizer(groups, side.program.wire))
    side.model.load_state_dict(saved_model)
    side.optimizer.load_state_dict(saved)
