"""Jobs that are sharded over nodes go on with other nodes or ranks: their state moves.

All ranks train on equal data, so that the mean of their gradients does not depend on how many they
are (1, 2 or 4), and a run that has moved must end with the bits of one that never has."""

from __future__ import annotations

import math

import nodes as on_nodes
import optstate
import pytest
import ranks
import sharded
import torch
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
nodes = on_nodes.nodes


def _make(rank, endpoints, per_node, job, kind, case, kwargs):
    """kind: "fsdp", of shards, or "zero", of whole parameters that nodes share out."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    dtype = torch.bfloat16 if case in ("bfloat16", "split") else torch.float32
    if kind == "fsdp":
        model = sharded.fsdp(sharded.make_model(dtype=dtype))
    else:
        model = small_model(dtype=dtype)
    parameters = list(model.named_parameters())
    if case == "Muon":
        parameters = [(name, each) for name, each in parameters if each.ndim == 2]
    make = getattr(optstate, case if hasattr(optstate, case) else "AdamW")
    kwargs = {"lr": 0.01, "across_nodes": "sharded", **CASES[case], **kwargs}
    return model, make(parameters, job=job, endpoint=endpoint, **kwargs)


def _step(model, optimizer, kind, case, step):
    loss = sharded.loss_of if kind == "fsdp" else loss_of
    optimizer.zero_grad()
    found = loss(model, step)
    (optimizer.scale(found) if case == "scaler" else found).backward()
    if case == "scaler" and step in (1, 4):
        first = next(model.parameters()).grad
        local = first.to_local() if kind == "fsdp" else first
        if local.numel():
            local.view(-1)[0] = math.inf
    if case == "AdamW" and step % 2:  # some parameters have other step counts than others
        list(model.parameters())[-1].grad = None
    optimizer.step()


def _train(connection, rank, endpoints, per_node, job, kind, case, until, kwargs=None, pause=None):
    """Trains to a step; returns where it began, and bits of parameters and of all state."""
    if pause is not None:
        pause(connection, rank)
    model, optimizer = _make(rank, endpoints, per_node, job, kind, case, kwargs or {})
    begun = optimizer.committed_step
    for step in range(begun, until):
        _step(model, optimizer, kind, case, step)
    result = begun, *_bits(model, optimizer, kind), optimizer.loss_scale
    assert optimizer.committed_step == until
    optimizer.close()
    return result


def _bits(model, optimizer, kind):
    if kind == "fsdp":
        state = [value for entry in sharded.whole_state(optimizer) for value in entry.values()]
        return bits(sharded.wholes(model)), bits(state)
    if optimizer._served.attachment.shared_out is not None:
        optimizer.consolidate_state_dict(to=None)
    state = optimizer.state_dict()["state"]
    arrays = [value for _, entry in sorted(state.items()) for value in entry.values()]
    return bits(model.parameters()), bits(arrays)


def _endpoints(nodes):
    return [each.shm for each in nodes]


def _run(endpoints, per_node, job, kind="fsdp", case="AdamW", until=UNTIL, **kwargs):
    world = len(endpoints) * per_node
    results = ranks.run(_train, world, endpoints, per_node, job, kind, case, until, kwargs)
    assert len(set(map(repr, results))) == 1
    return results[0]


def _unmoved(daemon, job, kind="fsdp", case="AdamW", **kwargs):
    """The bits of a run that stays on one node."""
    return _run([daemon.shm], 2, f"{job}-unmoved", kind, case, **kwargs)[1:]


def _jobs(nodes):
    return [each.jobs() for each in nodes]


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("fsdp", "AdamW"),
        ("fsdp", "amsgrad"),
        ("fsdp", "split"),
        ("fsdp", "scaler"),
        ("zero", "AdamW"),
        ("zero", "bfloat16"),
        ("zero", "scaler"),
        ("zero", "NAdam"),
        ("zero", "Adafactor"),
        ("zero", "Muon"),
    ],
)
def test_one_node_becomes_two(kind, case, nodes, daemon, job):
    expected = _unmoved(daemon, job, kind, case)
    assert _run([nodes[0].shm], 2, job, kind, case, until=3)[0] == 0
    begun, *found = _run(_endpoints(nodes), 2, job, kind, case)
    assert begun == 3 and tuple(found) == expected
    assert _jobs(nodes) == [[job], [job]]
