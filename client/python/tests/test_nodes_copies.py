"""A node that has no job gets the state of the others: it was replaced, lost its memory, or is new.
Afterwards all nodes have the bits of an undisturbed run, to the last array."""

from __future__ import annotations

import dataclasses
import math
import os
import signal

import nodes as on_nodes
import optstate
import pytest
import ranks
import torch
from optstate import _optctl
from optstate._torch.nodes import copied_state, copy_note, copying, new_copy
from optstate._torch.nodes.copy_note import CopyNote
from optstate._torch.optimizer_info import infos
from optstate.session import Session
from optstate.session_spec import ParameterSpec, SessionSpec
from training import bits, loss_of, small_model

nodes = on_nodes.nodes

SCALER = optstate.LossScaler(init_scale=1024.0, growth_interval=3, hysteresis=3)
CASES = {
    "AdamW": {},
    "amsgrad": {"amsgrad": True},
    "clipped": {"max_norm": 0.1},
    "bfloat16": {},
    "split": {"master": "split"},
    "state": {"state_dtype": "bfloat16"},
    "eight": {"state_dtype": "dynamic8"},
    "Lion": {"state_dtype": "dynamic8"},
    "accumulate": {"accumulate": True},
    "scaler": {"loss_scaler": SCALER},
    "static": {"loss_scaler": optstate.LossScaler(init_scale=8.0, dynamic=False)},
    "inf": {},
    "SGD": {"momentum": 0.9},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "NAdam": {},
    "Adafactor": {},
    "Muon": {},
}


def _make(rank, endpoints, per_node, job, case, kwargs):
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    is_half = case in ("bfloat16", "split")
    model = small_model(dtype=torch.bfloat16 if is_half else torch.float32)
    kind = getattr(optstate, case if hasattr(optstate, case) else "AdamW")
    parameters = list(model.named_parameters())
    if kind is optstate.Muon:
        parameters = [(name, each) for name, each in parameters if each.ndim == 2]
    kwargs = {"lr": 0.01, "across_nodes": "replicated", **kwargs}
    optimizer = kind(parameters, job=job, endpoint=endpoint, **kwargs)
    return model, parameters, optimizer


def _train(connection, rank, endpoints, per_node, job, case, until, wait_at=None):
    """Trains with equal data on all ranks; returns where it began, and the bits of everything."""
    kwargs = CASES[case]
    model, parameters, optimizer = _make(rank, endpoints, per_node, job, case, kwargs)
    begun = optimizer.committed_step
    outcomes = []
    for step in range(begun, until):
        for micro_step in range(2 if case == "accumulate" else 1):
            if micro_step:
                optimizer.accumulate_step()
            optimizer.zero_grad()
            loss = loss_of(model, 10 * step + micro_step)
            (optimizer.scale(loss) if "loss_scaler" in kwargs else loss).backward()
        if case in ("inf", "scaler") and step in (1, 4, 5):
            parameters[0][1].grad.view(-1)[0] = math.inf
        if step % 2 and len(parameters) > 1:
            parameters[-1][1].grad = None  # it has another step count than the others
        optimizer.step()
        outcomes.append((optimizer.last_outcome.applied, optimizer.last_outcome.gradient_norm))
    state = optimizer.state_dict()["state"]
    arrays = [value for _, entry in sorted(state.items()) for value in entry.values()]
    scaler = optimizer._served.attachment.session.loss_scaler_state()
    found = bits([each for _, each in parameters]), bits(arrays), scaler, optimizer.committed_step
    if wait_at is not None:
        ranks.say(connection, begun)
        connection.recv()
    optimizer.close()
    return begun, found, outcomes


def _endpoints(nodes):
    return [each.shm for each in nodes]


def _lose(node, job):
    """Deletes the job there, and waits until it is gone."""
    address = SessionSpec(job=job, optimizer=0, group_options=[], parameters=[], endpoint=node.shm)
    copy_note.delete_job(address, job)


@pytest.mark.parametrize("case", CASES)
def test_a_node_that_lost_its_job_gets_it_back(case, nodes, job):
    endpoints = _endpoints(nodes)
    expected = ranks.run(_train, 2, endpoints, 1, f"{job}-whole", case, 8)[0]
    for until, loser in ((3, 1), (6, 0)):
        ranks.run(_train, 2, endpoints, 1, job, case, until)
        _lose(nodes[loser], job)
    for begun, found, outcomes in ranks.run(_train, 2, endpoints, 1, job, case, 8):
        assert begun == 6
        assert found == expected[1]
        assert repr(outcomes) == repr(expected[2][6:])
    # The notes go when the copies have taken a step.
    assert all(each.jobs().count(copy_note.job_of_note(job)) == 0 for each in nodes)


@pytest.mark.parametrize("wire", ["grpc_unix", "grpc_tcp"])
def test_over_grpc(wire, nodes, job):
    endpoints = [getattr(each, wire) for each in nodes]
    expected = ranks.run(_train, 2, endpoints, 1, f"{job}-whole", "AdamW", 5)[0]
    ranks.run(_train, 2, endpoints, 1, job, "AdamW", 3)
    _lose(nodes[1], job)
    for begun, found, _ in ranks.run(_train, 2, endpoints, 1, job, "AdamW", 5):
        assert begun == 3 and found == expected[1]


def test_several_ranks_on_each_node(nodes, job):
    endpoints = _endpoints(nodes)
    expected = ranks.run(_train, 4, endpoints, 2, f"{job}-whole", "scaler", 7)[0]
    ranks.run(_train, 4, endpoints, 2, job, "scaler", 4)
    _lose(nodes[0], job)
    for begun, found, _ in ranks.run(_train, 4, endpoints, 2, job, "scaler", 7):
        assert begun == 4 and found == expected[1]


def test_two_of_three_nodes_are_lost(nodes, daemon, job):
    endpoints = _endpoints([*nodes, daemon])
    expected = ranks.run(_train, 2, endpoints, 1, f"{job}-whole", "scaler", 7)[0]
    ranks.run(_train, 3, endpoints, 1, job, "scaler", 4)
    for lost in (nodes[0], daemon):
        _lose(lost, job)
    for begun, found, _ in ranks.run(_train, 3, endpoints, 1, job, "scaler", 7):
        assert begun == 4 and found == expected[1]


def _thaws(connection, rank, endpoints, per_node, job, until):
    """Trains; the last parameter is frozen for two steps, and then extends the job."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    model = small_model()
    parameters = list(model.named_parameters())

    def freeze(step):
        parameters[-1][1].requires_grad_(step >= 2)

    freeze(until - 2)  # it is thawed in the first run alone
    optimizer = optstate.AdamW(
        parameters, lr=0.01, job=job, endpoint=endpoint, across_nodes="replicated"
    )
    begun = optimizer.committed_step
    for step in range(begun, until):
        freeze(step)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    arrays = [value for _, entry in sorted(state.items()) for value in entry.values()]
    found = bits([each for _, each in parameters]), bits(arrays)
    optimizer.close()
    return begun, found


def test_a_job_that_was_extended(nodes, job):
    """The ranks ask for one group, and the job has two. Rank 0's node has no job to ask."""
    one, other = _endpoints(nodes)
    ranks.run(_thaws, 1, [other], 1, f"{job}-whole", 3)
    [(_, expected)] = ranks.run(_thaws, 1, [other], 1, f"{job}-whole", 6)
    ranks.run(_thaws, 1, [other], 1, job, 3)
    for begun, found in ranks.run(_thaws, 2, [one, other], 1, job, 6):
        assert begun == 3 and found == expected


def test_one_node_becomes_two(nodes, job):
    """One node takes a step in one phase, which has no digest."""
    endpoints = _endpoints(nodes)
    expected = ranks.run(_train, 2, endpoints, 1, f"{job}-whole", "AdamW", 6)[0]
    ranks.run(_train, 1, endpoints, 1, job, "AdamW", 3)
    for begun, found, _ in ranks.run(_train, 2, endpoints, 1, job, "AdamW", 6):
        assert begun == 3 and found == expected[1]


def test_a_checkpoint_that_was_loaded_before_the_first_step(nodes, job):
    endpoints = _endpoints(nodes)
    ranks.run(_train, 2, endpoints, 1, job, "AdamW", 0)
    _lose(nodes[1], job)
    expected = ranks.run(_train, 2, endpoints, 1, f"{job}-whole", "AdamW", 2)[0]
    for begun, found, _ in ranks.run(_train, 2, endpoints, 1, job, "AdamW", 2):
        assert begun == 0 and found == expected[1]


def test_pieces_of_bounded_size(nodes, job, monkeypatch):
    """Each array is a piece of its own, and arrives."""
    endpoints = _endpoints(nodes)
    expected = ranks.run(_train, 2, endpoints, 1, f"{job}-whole", "AdamW", 4)[0]
    ranks.run(_train, 2, endpoints, 1, job, "AdamW", 2)
    _lose(nodes[1], job)
    for begun, found, _ in ranks.run(_small_pieces, 2, endpoints, job):
        assert begun == 2 and found == expected[1]


def _small_pieces(connection, rank, endpoints, job):
    copied_state._PIECE_ELEMENTS = 1
    return _train(connection, rank, endpoints, 1, job, "AdamW", 4)


def _small_parts(connection, rank, endpoints, job):
    """Each array is broadcast in parts; the second ranks of the nodes have memory for one."""
    copied_state._PIECE_ELEMENTS = 1
    copying.BROADCAST_ELEMENTS = 7
    sizes = []
    memory = copying._memory
    copying._memory = lambda numel: sizes.append(numel) or memory(numel)
    begun, found, _ = _train(connection, rank, endpoints, 2, job, "AdamW", 4)
    return begun, found, max(sizes, default=0)


def test_large_arrays_are_broadcast_in_parts(nodes, job):
    endpoints = _endpoints(nodes)
    expected = ranks.run(_train, 4, endpoints, 2, f"{job}-whole", "AdamW", 4)[0]
    ranks.run(_train, 4, endpoints, 2, job, "AdamW", 2)
    _lose(nodes[1], job)
    most = []
    for begun, found, size in ranks.run(_small_parts, 4, endpoints, job):
        assert begun == 2 and found == expected[1]
        most.append(size)
    # Rank 0 reads, and rank 2 makes the copy.
    assert most == [0, 7, 128, 7]


# Trainers that are killed while they copy.


def _stops(connection, rank, endpoints, job, where):
    """Stops the rank that makes the copy, at this point."""
    name, at = where
    called = 0
    method = getattr(new_copy.NewCopy, name)

    def stopping(self, *arguments):
        nonlocal called
        called += 1
        if called == at:
            ranks.say(connection, "stopped")
            connection.recv()
        return method(self, *arguments)

    setattr(new_copy.NewCopy, name, stopping)
    copied_state._PIECE_ELEMENTS = 1
    return _train(connection, rank, endpoints, 1, job, "AdamW", 6)


@pytest.mark.parametrize(
    "where",
    [
        ("begin", 1),
        ("_write_note", 1),  # the job is made, and nothing says that it is a copy
        ("take", 1),
        ("take", 5),
        ("finish_load", 1),
        ("check", 1),
        ("end", 1),  # the copy has all state, and is at step 0
        ("close", 1),  # it is whole
    ],
    ids=lambda where: "-".join(map(str, where)),
)
def test_a_trainer_that_is_killed_while_it_copies(where, nodes, job):
    endpoints = _endpoints(nodes)
    expected = ranks.run(_train, 2, endpoints, 1, f"{job}-whole", "AdamW", 6)[0]
    ranks.run(_train, 2, endpoints, 1, job, "AdamW", 4)
    _lose(nodes[1], job)
    with ranks.running(_stops, 2, endpoints, job, where) as running:
        assert running.hear(1) == "stopped"
        running.kill(1, 0)
    for begun, found, _ in ranks.run(_train, 2, endpoints, 1, job, "AdamW", 6):
        assert begun == 4 and found == expected[1]
    assert nodes[1].jobs().count(copy_note.job_of_note(job)) == 0


def _engine_dies(connection, rank, endpoints, job):
    """The engine of the copy is killed once, while it is loaded; returns how many pieces it got."""
    copied_state._PIECE_ELEMENTS = 1
    take, taken = new_copy.NewCopy.take, []

    def dying(self, piece, flat):
        taken.append(piece)
        if len(taken) == 3:
            described = _optctl.ask(endpoints[rank], "describe", "job", job)
            os.kill(int(described["engine_pid"]), signal.SIGKILL)
        take(self, piece, flat)

    new_copy.NewCopy.take = dying
    return _train(connection, rank, endpoints, 1, job, "AdamW", 6), len(taken)


def test_an_engine_that_dies_while_it_is_loaded_is_a_delay(nodes, job):
    endpoints = _endpoints(nodes)
    expected = ranks.run(_train, 2, endpoints, 1, f"{job}-whole", "AdamW", 6)[0]
    ranks.run(_train, 2, endpoints, 1, job, "AdamW", 4)
    _lose(nodes[1], job)
    found = ranks.run(_engine_dies, 2, endpoints, job)
    for (begun, state, _), _ in found:
        assert begun == 4 and state == expected[1]
    # Six parameters with a master and two arrays each.
    assert found[1][1] > 3 * 6
    assert nodes[1].jobs().count(copy_note.job_of_note(job)) == 0


def _alone(connection, rank, endpoint, job, across):
    try:
        optimizer = optstate.AdamW(
            small_model().named_parameters(), job=job, endpoint=endpoint, across_nodes=across
        )
    except optstate.FailedPreconditionError as error:
        return str(error)
    return optimizer.committed_step


def test_a_half_made_copy_is_no_job(nodes, job):
    """Its step is not that of its state: nobody trains on with it."""
    endpoints = _endpoints(nodes)
    ranks.run(_train, 2, endpoints, 1, job, "AdamW", 4)
    _lose(nodes[1], job)
    with ranks.running(_stops, 2, endpoints, job, ("end", 1)) as running:
        assert running.hear(1) == "stopped"
        running.kill(1, 0)
    [said] = ranks.run(_alone, 1, endpoints[1], job, None)
    assert "was being copied to this node for step 4" in said and "half made" in said
    # The node alone knows what it has, and has nothing.
    assert ranks.run(_alone, 1, endpoints[1], job, "replicated") == [0]


def _trains_alone(connection, rank, endpoint, job, steps):
    """Trains a new job without looking for what other nodes have."""
    model = small_model()
    optimizer = optstate.AdamW(model.named_parameters(), job=job, endpoint=endpoint)
    assert optimizer.committed_step == 0
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_a_note_says_nothing_about_a_job_that_was_made_since(steps, nodes, job):
    """An operator deletes a half made copy, and another job of its name is trained there."""
    endpoints = _endpoints(nodes)
    ranks.run(_train, 2, endpoints, 1, job, "AdamW", 4)
    _lose(nodes[1], job)
    with ranks.running(_stops, 2, endpoints, job, ("end", 1)) as running:
        assert running.hear(1) == "stopped"
        running.kill(1, 0)
    _lose(nodes[1], job)
    ranks.run(_trains_alone, 1, endpoints[1], job, steps)
    for said in ranks.run(_both, 2, endpoints, job):
        assert "node0: step 4" in str(said) and f"node1: step {steps}" in str(said)
    assert nodes[1].jobs() == [job]
    assert int(nodes[1].optctl("describe", "job", job).get("committed_step", 0)) == steps


SPEC = SessionSpec(
    job="gpt",
    optimizer=0,
    group_options=[0],
    parameters=[ParameterSpec("weight", (4,), 4, 1, 1, 0)],
)


def test_undo_leaves_what_another_script_has_made(daemon, job):
    spec = dataclasses.replace(SPEC, job=job, optimizer=infos()["sgd"].kind, endpoint=daemon.shm)
    note = CopyNote(3, 5, False, 1, "")
    copy = new_copy.NewCopy(spec, note, copied_state.Numbers([0], (), None))
    copy.begin()
    assert copy_note.read_note(spec) == note._replace(made_at=copy_note.made_at(spec))
    copy.close()
    copy_note.delete_job(spec, job)
    session = Session.open(spec)
    assert session.created
    copy.undo()
    assert job in daemon.jobs() and copy_note.job_of_note(job) not in daemon.jobs()
    session.close()


def test_a_job_is_copied_by_one_script(daemon, job, monkeypatch):
    """The second one that comes takes neither the job nor the note from the first."""
    spec = dataclasses.replace(SPEC, job=job, optimizer=infos()["sgd"].kind, endpoint=daemon.shm)
    numbers = copied_state.Numbers([0], (), None)
    first, second = (
        new_copy.NewCopy(spec, CopyNote(3, 5, False, 1, ""), numbers) for _ in range(2)
    )
    first.begin()
    with monkeypatch.context() as patched:
        patched.setattr(copy_note, "_DELETED_WITHIN_S", 0.0)
        with pytest.raises(optstate.FailedPreconditionError, match="1 ranks attached"):
            second.begin()
    second.undo()
    assert copy_note.read_note(spec) is not None and job in daemon.jobs()
    with pytest.raises(optstate.FailedPreconditionError, match="another script copies"):
        copy_note.write_note(spec, CopyNote(3, 5, False, 1, str(copy_note.made_at(spec))))
    first.undo()
    assert job not in daemon.jobs() and copy_note.job_of_note(job) not in daemon.jobs()


def test_a_whole_copy_that_has_not_stepped_yet(nodes, job):
    endpoints = _endpoints(nodes)
    expected = ranks.run(_train, 2, endpoints, 1, f"{job}-whole", "AdamW", 6)[0]
    ranks.run(_train, 2, endpoints, 1, job, "AdamW", 4)
    _lose(nodes[1], job)
    for again in range(2):  # ranks attach, take no step, and are killed
        with ranks.running(_train, 2, endpoints, 1, job, "AdamW", 4, "wait") as running:
            assert [running.hear(rank) for rank in range(2)] == [4, 4]
            running.kill(0, 1)
        assert nodes[1].jobs().count(copy_note.job_of_note(job)) == 1, again
    for begun, found, _ in ranks.run(_train, 2, endpoints, 1, job, "AdamW", 6):
        assert begun == 4 and found == expected[1]


def test_a_node_that_is_at_another_step_is_not_overwritten(nodes, job):
    endpoints = _endpoints(nodes)
    ranks.run(_train, 2, endpoints, 1, job, "AdamW", 3)
    _lose(nodes[1], job)
    ranks.run(_train, 1, [endpoints[1]], 1, job, "AdamW", 2)  # another run of this name
    for rank, said in enumerate(ranks.run(_both, 2, endpoints, job)):
        assert "node0: step 3" in said and "node1: step 2" in said, rank
        assert "or delete the job on node1 alone" in said
    assert [int(each.optctl("describe", "job", job)["committed_step"]) for each in nodes] == [3, 2]


def _both(connection, rank, endpoints, job):
    on_nodes.enter(rank, endpoints, 1)
    return _alone(connection, rank, endpoints[rank], job, "replicated")


def _fails(connection, rank, endpoints, job):
    """The copy is found to have other bits."""
    sums = copied_state.sums_of
    copying.sums_of = lambda values: [each + 1 for each in sums(values)]
    try:
        _make(rank, endpoints, 1, job, "AdamW", {})
    except optstate.DataLossError as error:
        return str(error)
    return ""


def test_a_copy_of_other_bits_is_removed(nodes, job):
    endpoints = _endpoints(nodes)
    ranks.run(_train, 2, endpoints, 1, job, "AdamW", 3)
    _lose(nodes[1], job)
    for said in ranks.run(_fails, 2, endpoints, job):
        assert "other bits than the job" in said and "it is removed" in said
    assert nodes[1].jobs() == [] and nodes[0].jobs() == [job]
    expected = ranks.run(_train, 2, endpoints, 1, f"{job}-whole", "AdamW", 5)[0]
    for begun, found, _ in ranks.run(_train, 2, endpoints, 1, job, "AdamW", 5):
        assert begun == 3 and found == expected[1]
