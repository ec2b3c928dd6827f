"""Jobs that are sharded over nodes, which go on with other nodes or ranks, for tests of several
modules.

All ranks train on equal data, so that the mean of their gradients does not depend on how many they
are (1, 2 or 4), and a run that has moved must end with the bits of one that never has."""

from __future__ import annotations

import math

import nodes as on_nodes
import optstate
import ranks
import sharded
import torch
from torch.distributed.device_mesh import init_device_mesh
from training import bits, loss_of, small_model

UNTIL = 6  # where all runs end; they move at step 3
SCALER = optstate.LossScaler(init_scale=1024.0, growth_interval=4, hysteresis=3)
CASES = {
    "AdamW": {},
    "amsgrad": {"amsgrad": True},
    "bfloat16": {},
    "split": {"master": "split"},
    "state": {"state_dtype": "bfloat16"},
    "scaler": {"loss_scaler": SCALER},
    "NAdam": {},
    "Adafactor": {},
    "Muon": {},
}


def make(rank, endpoints, per_node, job, kind, case, kwargs):
    """kind: "fsdp", of shards; "hsdp", of a replica on each node; "zero", of whole parameters that
    nodes share out."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    dtype = torch.bfloat16 if case in ("bfloat16", "split") else torch.float32
    if kind == "zero":
        model = small_model(dtype=dtype)
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (len(endpoints), per_node), mesh_dim_names=("r", "s"))
        model = sharded.fsdp(sharded.make_model(dtype=dtype), mesh)
    else:
        model = sharded.fsdp(sharded.make_model(dtype=dtype))
    parameters = list(model.named_parameters())
    if case == "Muon":
        parameters = [(name, each) for name, each in parameters if each.ndim == 2]
    kind_of = getattr(optstate, case if hasattr(optstate, case) else "AdamW")
    kwargs = {"lr": 0.01, "across_nodes": "sharded", **CASES[case], **kwargs}
    return model, kind_of(parameters, job=job, endpoint=endpoint, **kwargs)


def take_step(model, optimizer, kind, case, step):
    loss = loss_of if kind == "zero" else sharded.loss_of
    optimizer.zero_grad()
    found = loss(model, step)
    (optimizer.scale(found) if case == "scaler" else found).backward()
    if case == "scaler" and step in (1, 4):
        first = next(model.parameters()).grad
        local = first if kind == "zero" else first.to_local()
        if local.numel():
            local.view(-1)[0] = math.inf
    if case == "AdamW" and step % 2:  # some parameters have other step counts than others
        list(model.parameters())[-1].grad = None
    optimizer.step()


def train(connection, rank, endpoints, per_node, job, kind, case, until, kwargs=None, pause=None):
    """Trains to a step; returns where it began, and bits of parameters and of all state."""
    if pause is not None:
        pause(connection, rank)
    model, optimizer = make(rank, endpoints, per_node, job, kind, case, kwargs or {})
    begun = optimizer.committed_step
    for step in range(begun, until):
        take_step(model, optimizer, kind, case, step)
    result = begun, *_all_bits(model, optimizer, kind), optimizer.loss_scale
    assert optimizer.committed_step == until
    optimizer.close()
    return result


def _all_bits(model, optimizer, kind):
    if kind != "zero":
        state = [value for entry in sharded.whole_state(optimizer) for value in entry.values()]
        return bits(sharded.wholes(model)), bits(state)
    if optimizer._served.attachment.shared_out is not None:
        optimizer.consolidate_state_dict(to=None)
    state = optimizer.state_dict()["state"]
    arrays = [value for _, entry in sorted(state.items()) for value in entry.values()]
    return bits(model.parameters()), bits(arrays)


def endpoints(nodes):
    return [each.shm for each in nodes]


def run(endpoints, per_node, job, kind="fsdp", case="AdamW", until=UNTIL, **kwargs):
    world = len(endpoints) * per_node
    results = ranks.run(train, world, endpoints, per_node, job, kind, case, until, kwargs)
    assert len(set(map(repr, results))) == 1
    return results[0]


def unmoved(daemon, job, kind="fsdp", case="AdamW", **kwargs):
    """The bits of a run that stays on one node."""
    return run([daemon.shm], 2, f"{job}-unmoved", kind, case, **kwargs)[1:]


def jobs(nodes):
    return [each.jobs() for each in nodes]


def said(connection, rank, endpoints, per_node, job, kwargs):
    """The error with which the optimizer is not constructed."""
    try:
        make(rank, endpoints, per_node, job, "fsdp", "AdamW", kwargs)[1].close()
    except Exception as error:
        return type(error).__name__, str(error)
    return None
