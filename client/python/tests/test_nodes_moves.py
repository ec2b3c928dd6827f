"""Jobs that are sharded over nodes go on with other nodes or ranks: their state moves.

All ranks train on equal data, so that the mean of their gradients does not depend on how many they
are (1, 2 or 4), and a run that has moved must end with the bits of one that never has."""

from __future__ import annotations

import dataclasses
import math

import nodes as on_nodes
import optstate
import pytest
import ranks
import sharded
import torch
from optstate._torch.nodes.moves import holdings, mover, new_job
from optstate._torch.nodes.moves.blocks import Block
from optstate._torch.nodes.moves.choosing import Refused, choose
from optstate._torch.nodes.moves.handing_over import wishes_of
from optstate._torch.nodes.moves.holdings import HeldJob, Holding, Mark, mark_of, parcel_of
from optstate._torch.nodes.part_names import Part, part_of
from optstate._torch.nodes.resolution import Position, Step
from optstate.session_spec import LossScalerState, ParameterSpec, Shard
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


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_two_nodes_whose_ranks_are_on_others(kind, nodes, daemon, job):
    """The nodes change places, and have fewer ranks each."""
    expected = _unmoved(daemon, job, kind)
    _run(_endpoints(nodes), 2, job, kind, until=3)
    begun, *found = _run(_endpoints(nodes)[::-1], 1, job, kind)
    assert begun == 3 and tuple(found) == expected
    assert _jobs(nodes) == [[job], [job]]


def test_more_ranks_on_one_node(daemon, job):
    expected = _unmoved(daemon, job)
    _run([daemon.shm], 1, job, until=3)
    begun, *found = _run([daemon.shm], 4, job)
    assert begun == 3 and tuple(found) == expected


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_state_of_16_bits(kind, nodes, job):
    """What moves has the same bits; how later steps round it depends on where it lies."""
    before = _run(_endpoints(nodes), 1, job, kind, "state", until=3)
    after = _run(_endpoints(nodes)[::-1], 1, job, kind, "state", until=3)
    assert after == (3, *before[1:])


def _leave(connection, rank, endpoints, job, kind, until, leaving):
    """Trains to a step, and hands over what the leaving nodes have."""
    model, optimizer = _make(rank, endpoints, 1, job, kind, "AdamW", {})
    for step in range(optimizer.committed_step, until):
        _step(model, optimizer, kind, "AdamW", step)
        assert not optimizer.hand_over()
    assert optimizer.hand_over(leaves=rank in leaving)
    with pytest.raises(RuntimeError, match="was handed over"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_a_node_that_leaves_hands_over(kind, nodes, daemon, job):
    expected = _unmoved(daemon, job, kind)
    ranks.run(_leave, 2, _endpoints(nodes), job, kind, 3, (0,))
    assert nodes[0].jobs() == [] and len(nodes[1].jobs()) == 2  # its own part, and the other one
    begun, *found = _run([nodes[1].shm], 2, job, kind)
    assert begun == 3 and tuple(found) == expected
    assert _jobs(nodes) == [[], [job]]


def test_a_node_that_leaves_and_comes_back(nodes, daemon, job):
    expected = _unmoved(daemon, job)
    ranks.run(_leave, 2, _endpoints(nodes), job, "fsdp", 3, (1,))
    begun, *found = _run(_endpoints(nodes), 1, job)
    assert begun == 3 and tuple(found) == expected
    assert _jobs(nodes) == [[job], [job]]


def _refuses(connection, rank, endpoints, job):
    """What hand_over() refuses changes nothing."""
    said = []
    model, optimizer = _make(rank, endpoints, 1, job, "fsdp", "AdamW", {"accumulate": True})
    _step(model, optimizer, "fsdp", "AdamW", 0)
    try:
        optimizer.hand_over(leaves=True)
    except ValueError as error:
        said.append(str(error))
    sharded.loss_of(model, 1).backward()
    optimizer.accumulate_step()
    try:
        optimizer.hand_over(leaves=rank == 0)
    except RuntimeError as error:
        said.append(str(error))
    optimizer.abort_step()
    _step(model, optimizer, "fsdp", "AdamW", 1)
    step = optimizer.committed_step
    optimizer.close()
    return step, said


def test_what_hand_over_refuses(nodes, job):
    for step, said in ranks.run(_refuses, 2, _endpoints(nodes), job):
        assert step == 2
        assert "all nodes leave" in said[0] and "micro-steps" in said[1]
    assert _jobs(nodes) == [[job], [job]]


# Ranks that are killed while the state moves.


def _stops_after(owner, name, count):
    """Returns what stops rank 1 after the call of this number."""

    def pause(connection, rank):
        if rank != 1:
            return
        original, calls = getattr(owner, name), []

        def stopping(*args, **kwargs):
            result = original(*args, **kwargs)
            calls.append(name)
            if len(calls) == count:
                ranks.say(connection, "stopped")
                connection.recv()
            return result

        setattr(owner, name, stopping)

    return pause


class _Stop:
    """A place where ranks stop, which processes get by pickle."""

    def __init__(self, name, count):
        self._name, self._count = name, count

    def __call__(self, connection, rank):
        if self._name == "delete_left":
            _stops_while_deleting(connection, rank, self._count)
        else:
            _stops_after(new_job.NewJob, self._name, self._count)(connection, rank)


def _stops_while_deleting(connection, rank, count):
    """Rank 0 deletes the jobs of its node, and rank 1 stops before it does so."""
    original, calls = mover.delete_left, []

    def stopping(spec, job):
        calls.append(job)
        if len(calls) == count and rank == 1:
            ranks.say(connection, "stopped")
            connection.recv()
        original(spec, job)
        if len(calls) == count:
            ranks.say(connection, "stopped")
            connection.recv()

    mover.delete_left = stopping


def _kill_while_moving(endpoints, job, stop):
    """Two nodes go on as each other, and their ranks are killed while the state moves."""
    arguments = (endpoints, 1, job, "fsdp", "AdamW", UNTIL, None, stop)
    with ranks.running(_train, 2, *arguments) as running:
        assert running.hear(1) == "stopped"
        if stop._name == "delete_left":
            assert running.hear(0) == "stopped"
        running.kill(0, 1)


STOPS = [
    ("begin", 1),  # the parcel is made,
    ("take", 1),
    ("finish_load", 1),
    ("load_nothing", 1),  # and is whole
    ("delete_left", 1),  # one node has no former job any more
    ("begin", 2),  # the job is made,
    ("finish_load", 2),
    ("take_steps", 1),  # and is at its step
    ("delete_left", 2),  # one node has no parcel any more
]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: "-".join(map(str, stop)))
def test_ranks_that_are_killed_while_state_moves(stop, nodes, daemon, job):
    """The next ranks go on, whether they are on the nodes that it moved to or on those it was on,
    and in whichever number."""
    expected = _unmoved(daemon, job)
    there, back = _endpoints(nodes), _endpoints(nodes)[::-1]
    _run(there, 1, job, until=3)
    _kill_while_moving(back, job, _Stop(*stop))
    begun, *_ = _run(there, 1, job, until=4)
    assert begun == 3
    _kill_while_moving(back, job, _Stop(*stop))
    begun, *found = _run(back, 1, job)
    assert begun == 4 and tuple(found) == expected
    assert _jobs(nodes) == [[job], [job]]


# What cannot move.


def _said(connection, rank, endpoints, per_node, job, kwargs):
    try:
        _make(rank, endpoints, per_node, job, "fsdp", "AdamW", kwargs)[1].close()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _refused(endpoints, per_node, job, **kwargs):
    """Returns the error that all ranks get."""
    found = ranks.run(_said, len(endpoints) * per_node, endpoints, per_node, job, kwargs)
    assert len(set(found)) == 1 or all(each[0] == found[0][0] for each in found)
    return found[0]


def test_a_node_that_left_with_its_memory(nodes, daemon, job):
    """The error names what is missing; with the node back, or another one gone, all goes on."""
    expected = _unmoved(daemon, job)
    _run(_endpoints(nodes), 1, job, until=3)
    for endpoints in ([nodes[0].shm], [nodes[0].shm, daemon.shm]):
        kind, text = _refused(endpoints, 1, job)
        assert kind == "FailedPreconditionError"
        assert 'of parameters "0.weight", "0.bias"' in text and "elements are missing" in text
        assert "those of part 2 have no ranks here" in text and "they go on from step 3" in text
        assert "of step 3 or before" in text
    begun, *found = _run(_endpoints(nodes), 1, job)
    assert begun == 3 and tuple(found) == expected


def test_a_parameter_that_the_script_lacks(nodes, job):
    _run([nodes[0].shm], 2, job, until=2)
    for kind, text in ranks.run(_lacks, 2, _endpoints(nodes), job):
        assert kind == "FailedPreconditionError"
        assert 'the script lacks its parameters "3.weight", "3.bias"' in text
    assert _jobs(nodes) == [[job], []]


def _lacks(connection, rank, endpoints, job):
    endpoint = on_nodes.enter(rank, endpoints, 1)
    parameters = list(sharded.fsdp(sharded.make_model()).named_parameters())[:-2]
    try:
        optstate.AdamW(parameters, job=job, endpoint=endpoint, across_nodes="sharded")
    except optstate.OptstateError as error:
        return type(error).__name__, str(error)
    return None


def test_state_of_8_bits(nodes, job):
    kwargs = {"state_dtype": "dynamic8"}
    _run([nodes[0].shm], 2, job, until=2, **kwargs)
    kind, text = _refused(_endpoints(nodes), 1, job, **kwargs)
    assert kind == "UnimplementedError" and 'state_dtype="dynamic8"' in text
    assert _jobs(nodes) == [[job], []]
    assert _run([nodes[0].shm], 2, job, until=3, **kwargs)[0] == 2


def _in_group(connection, rank, endpoints, job, count, until):
    """Each job has half of the ranks, and all clip by one norm."""
    import torch.distributed as dist

    endpoint = on_nodes.enter(rank, endpoints, count // len(endpoints))
    halves = [list(range(0, count, 2)), list(range(1, count, 2))]
    groups = [dist.new_group(half) for half in halves]
    model = small_model()
    try:
        optimizer = optstate.AdamW(
            model[0].parameters() if rank % 2 else model[3].parameters(),
            job=f"{job}-{rank % 2}",
            endpoint=endpoint,
            process_group=groups[rank % 2],
            norm_group=dist.group.WORLD,
            across_nodes="sharded",
            max_norm=1.0,
        )
    except optstate.OptstateError as error:
        return type(error).__name__, str(error)
    for step in range(until):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    optimizer.close()
    return None


def test_jobs_that_clip_by_one_norm(nodes, job):
    assert ranks.run(_in_group, 2, [nodes[0].shm], job, 2, 2) == [None] * 2
    for kind, text in ranks.run(_in_group, 4, _endpoints(nodes), job, 4, 0):
        assert kind == "UnimplementedError" and "norm_group=" in text
    assert _jobs(nodes) == [[f"{job}-0", f"{job}-1"], []]
    assert ranks.run(_in_group, 2, [nodes[0].shm], job, 2, 1) == [None] * 2


# Jobs at other steps than each other.


def _stops_within_a_step(connection, rank, endpoints, job, where):
    model, optimizer = _make(rank, endpoints, 1, job, "fsdp", "AdamW", {})
    where(connection, rank, optimizer)
    for step in range(UNTIL):
        _step(model, optimizer, "fsdp", "AdamW", step)


@pytest.mark.parametrize(
    ("where", "resumed_at"),
    [
        (on_nodes.stops_when_prepared, 2),
        (on_nodes.stops_when_noted, 3),
        (on_nodes.stops_before_committing, 3),  # by one node
    ],
)
def test_a_step_that_was_under_way_is_settled_before(where, resumed_at, nodes, daemon, job):
    expected = _unmoved(daemon, job)
    endpoints = _endpoints(nodes)
    with ranks.running(_stops_within_a_step, 2, endpoints, job, where) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        running.kill(0, 1)
    begun, *found = _run(endpoints[::-1], 2, job)
    assert begun == resumed_at and tuple(found) == expected


def _behind(connection, rank, endpoints, job):
    """This rank's node says that it is one step behind, and knows nothing of the next."""
    position_of = holdings.position_of

    def behind(spec):
        found = position_of(spec)
        if found is None or rank != 1:
            return found
        step = dataclasses.replace(found.committed, step=found.committed.step - 1)
        return dataclasses.replace(found, committed=step)

    holdings.position_of = behind
    return _said(connection, rank, endpoints, 1, job, {})


def test_jobs_that_do_not_get_to_one_step(nodes, job):
    _run(_endpoints(nodes), 1, job, until=3)
    for kind, text in ranks.run(_behind, 2, _endpoints(nodes)[::-1], job):
        assert kind == "FailedPreconditionError" and "not at one step" in text
        assert "node0: step 3" in text and "node1: step 2" in text
    assert _run(_endpoints(nodes), 1, job, until=4)[0] == 3


# The rules, without a daemon.


def _block(name, begin, end, whole=8):
    shard = Shard(0, (whole,), (begin,))
    return Block(name, 0, ParameterSpec(name, (end - begin,), end - begin, 1, 1, 0, shard=shard))


def _job(begin, end, *, run="a", number=1, count=2, step=3, mark=None, loads=1, **more):
    """A job that has these elements of the one parameter."""
    part = None if mark or not count else Part(run, number, count)
    position = Position(Step(step, more.pop("digest", 7)), loads_finished=loads, **more)
    blocks = (_block("w", begin, end),)
    return HeldJob("gpt", part, mark, position, run, 1, 4, "", "", blocks)


def _parcel(begin, end, *, run="b", number=1, count=2, step=3, source="a", loads=2):
    mark = Mark(Part(run, number, count), step, source, None)
    return _job(begin, end, run=run, mark=mark, step=0, loads=loads)


FIRST, SECOND = _job(0, 4), _job(4, 8, number=2)
HALVES = _parcel(0, 4), _parcel(4, 8, number=2)


@pytest.mark.parametrize(
    ("found", "run", "sources", "debris"),
    [
        ([Holding(FIRST), Holding(SECOND)], "a", 2, 0),
        ([Holding(SECOND), Holding(FIRST), Holding()], "a", 2, 0),
        # A part was handed over.
        ([Holding(FIRST, (_parcel(4, 8, run="a", number=2),))], "a", 2, 0),
        # ... and its node was killed before its own was deleted.
        ([Holding(FIRST, (_parcel(4, 8, run="a", number=2),)), Holding(SECOND)], "a", 2, 1),
        # Parcels were being made: one is not whole, or not there.
        ([Holding(FIRST, HALVES[:1]), Holding(SECOND)], "a", 2, 1),
        ([Holding(FIRST, HALVES[:1]), Holding(SECOND, (_parcel(4, 8, loads=1),))], "a", 2, 2),
        # They were given up, and the job has gone on.
        ([Holding(_job(0, 8, count=0, step=9), (_parcel(0, 4, step=3),))], "a", 1, 1),
        # They are whole, and the former jobs are partly deleted.
        ([Holding(FIRST, HALVES[:1]), Holding(SECOND, HALVES[1:])], "b", 2, 2),
        ([Holding(None, HALVES[:1]), Holding(SECOND, HALVES[1:])], "b", 2, 1),
        # The jobs are being made of them.
        ([Holding(_job(0, 4, run="b", step=1, digest=0), HALVES)], "b", 2, 1),
        # The jobs are whole, and parcels are partly deleted.
        ([Holding(_job(0, 8, run="b", count=1, digest=0), HALVES[:1])], "b", 1, 1),
    ],
)
def test_where_the_state_is(found, run, sources, debris):
    choice = choose("gpt", [f"node{i}" for i in range(len(found))], found, len(found))
    assert choice is not None and choice.run == run and choice.step == 3 or choice.step == 9
    assert (len(choice.sources), len(choice.debris)) == (sources, debris)
    assert not set(choice.sources) & set(choice.debris)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([Holding(FIRST)], "those of part 2 have no ranks here"),
        ([Holding(FIRST), Holding(_job(4, 8, run="c", number=2))], "do not belong together"),
        # Two runs that have everything.
        ([Holding(_job(0, 8, count=1)), Holding(_job(0, 8, run="c", count=1))], "do not belong"),
        ([Holding(None, HALVES[:1])], "half made"),
        # A job that has gone on beside parcels that have everything, or is of another run.
        ([Holding(_job(0, 8, count=1, step=5), HALVES)], "of which it was not made"),
        ([Holding(_job(0, 8, run="c", count=1), HALVES)], "of which it was not made"),
        ([Holding(_job(0, 4, run="b", step=2), HALVES)], "of which it was not made"),
        # A parcel of another run, or one that is ahead.
        ([Holding(FIRST, (_parcel(0, 4, source="c"),)), Holding(SECOND)], "does not belong"),
        ([Holding(FIRST, (_parcel(0, 4, step=4),)), Holding(SECOND)], "does not belong"),
        # The job went on without a part that was handed over.
        ([Holding(_job(0, 4, step=5), (_parcel(4, 8, run="a", number=2),))], "at one step"),
    ],
)
def test_what_is_not_touched(found, text):
    with pytest.raises(Refused, match=text):
        choose("gpt", [f"node{i}" for i in range(len(found))], found, len(found))


def test_nothing_is_there():
    assert choose("gpt", ["node0"], [Holding()], 1) is None
    new = _job(0, 4, step=0, loads=0)
    assert choose("gpt", ["node0", "node1"], [Holding(new), Holding()], 2) is None


def test_a_mark_says_what_a_parcel_is():
    for scaler in (None, LossScalerState(0.1, 3, 2)):
        mark = Mark(Part("0af3", 2, 3), 17, "b00c", scaler)
        assert mark_of([mark.name]) == mark == mark_of([f"{mark.name}@0"])
    assert mark_of(["0.weight"]) is None and part_of([mark.name]) is None


def test_names_of_parcels_fit():
    part = Part("0123456789abcdef", 100000, 100000)
    assert parcel_of("gpt", Part("", 1, 1)) == "gpt.optstate-parcel-1of1"
    longest = parcel_of("x" * 128, part)
    assert len(longest) <= 128 and longest != parcel_of("y" * 128, part)


def test_what_leaving_nodes_hand_over():
    jobs = [FIRST, SECOND, _job(0, 4), _job(4, 8, number=2)]
    sources, wishes = wishes_of(jobs, {1, 3})
    assert [each.node for each in sources] == [1]
    assert [(each.node, each.part.number) for each in wishes] == [(0, 2)]
    assert wishes_of(jobs, {0, 1}) == ([], [])
