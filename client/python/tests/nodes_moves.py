"""Jobs that are sharded over nodes, which go on with other nodes or ranks, for tests of several
modules.

All ranks train on equal data, so that the mean of their gradients does not depend on how many they
are (1, 2 or 4), and a run that has moved must end with the bits of one that never has."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal

import nodes as on_nodes
import optstate
import ranks
import sharded
import torch
from optstate._torch.nodes.moves import mover, new_job
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
    "eight": {"state_dtype": "dynamic8"},
    "Lion": {"state_dtype": "dynamic8"},
    "scaler": {"loss_scaler": SCALER},
    "NAdam": {},
    "Adafactor": {},
    "Muon": {},
}


def make(rank, endpoints, per_node, job, kind, case, kwargs):
    """kind: "fsdp", of shards; "wide", of shards that 1, 2 and 4 ranks cut at multiples of 256
    elements; "hsdp", of a replica on each node; "zero", of whole parameters that nodes share out.
    """
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    dtype = torch.bfloat16 if case in ("bfloat16", "split") else torch.float32
    if kind == "zero":
        model = small_model(dtype=dtype)
    elif kind == "wide":
        model = sharded.fsdp(_wide_model())
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


def _wide_model():
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(256, 8, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(8, 256, generator=generator) * 0.1)
    return model


def _wide_loss(model, step):
    generator = torch.Generator().manual_seed(2000 + step)
    inputs = torch.randn(16, 256, generator=generator)
    return (model(inputs) - inputs[:, :8].sin()).square().mean()


def take_step(model, optimizer, kind, case, step):
    loss = {"zero": loss_of, "wide": _wide_loss}.get(kind, sharded.loss_of)
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


# A place where a rank stops while state moves, and is killed.


@dataclasses.dataclass(frozen=True)
class Stop:
    """After a call of NewJob's method, or before a rank deletes a job, when the ranks before it
    have done so."""

    name: str
    count: int
    rank: int = 1

    def __call__(self, connection, rank):
        if self.name == "delete_left":
            self._stop_deleting(connection, rank)
        elif rank == self.rank:
            self._stop_after(connection)

    def _stop_after(self, connection):
        original, calls = getattr(new_job.NewJob, self.name), []

        def stopping(*args, **kwargs):
            result = original(*args, **kwargs)
            calls.append(self.name)
            if len(calls) == self.count:
                ranks.say(connection, "stopped")
                connection.recv()
            return result

        setattr(new_job.NewJob, self.name, stopping)

    def _stop_deleting(self, connection, rank):
        original, calls = mover.delete_left, []

        def stopping(spec, job):
            calls.append(job)
            if len(calls) != self.count:
                original(spec, job)
                return
            if rank < self.rank:
                original(spec, job)
            ranks.say(connection, "stopped")
            connection.recv()

        mover.delete_left = stopping

    @property
    def stopped(self):
        """The ranks that stop."""
        return range(self.rank + 1) if self.name == "delete_left" else [self.rank]


STOPS = [
    ("begin", 1),  # the parcel is made,
    ("take", 1),
    ("finish_load", 1),
    ("load_nothing", 1),  # and is whole
    ("delete_left", 1),  # one node has no former job any more
    ("begin", 2),  # the job is made,
    ("finish_load", 2),
    ("begin_at", 1),  # is at its step,
    ("make_durable", 1),  # and is durable, if it was
    ("delete_left", 2),  # one node has no parcel any more
]


def kill_while_moving(endpoints, per_node, job, stop, kind="fsdp", **kwargs):
    """Ranks are killed while the state moves to them."""
    arguments = (endpoints, per_node, job, kind, "AdamW", UNTIL, kwargs, stop)
    world = len(endpoints) * per_node
    with ranks.running(train, world, *arguments) as running:
        for rank in stop.stopped:
            assert running.hear(rank) == "stopped"
        running.kill(*range(world))


def lose_power(nodes):
    """Kills the daemons and all engines, and removes all that they had in memory."""
    engines = [on_nodes.engine(each, job) for each in nodes for job in each.jobs()]
    for each in nodes:
        each.kill()
    for engine in engines:
        os.kill(engine, signal.SIGKILL)
    for each in nodes:
        shutil.rmtree(each.directory / "state")
        each.start()
