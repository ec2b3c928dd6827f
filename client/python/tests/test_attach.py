"""Jobs outlive trainers: attaching, re-attaching, SIGKILL at any time."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time

import optstate
import pytest
import torch
from ranks import Ranks, running, say
from training import largest_difference, loss_of, small_model, train


def test_a_new_job_starts_from_the_trainers_parameters(job):
    model = small_model(seed=3)
    with optstate.AdamW(model.parameters(), job=job) as optimizer:
        assert optimizer.committed_step == 0 and optimizer.last_outcome is None
        assert optimizer.job == job
    assert largest_difference(model, small_model(seed=3)) == 0


def test_re_attaching_goes_on_where_the_job_is(job, daemon):
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(10))
    model = small_model()
    with optstate.AdamW(model.parameters(), lr=0.01, job=job) as optimizer:
        train(model, optimizer, range(6))
    for endpoint in (daemon.grpc_unix, daemon.shm):
        again = small_model(seed=5)  # other values: they are overwritten in place
        tensors = list(again.parameters())
        optimizer = optstate.AdamW(again.parameters(), lr=0.01, job=job, endpoint=endpoint)
        assert all(a is b for a, b in zip(tensors, again.parameters()))
        assert optimizer.committed_step == 6
        assert largest_difference(again, model) == 0
        optimizer.close()
    optimizer = optstate.AdamW(again.parameters(), lr=0.01, job=job)
    train(again, optimizer, range(optimizer.committed_step, 10))
    assert largest_difference(again, whole) == 0


def test_names_follow_the_model_wherever_it_is_wrapped(job):
    model = small_model()
    with optstate.AdamW(model.parameters(), job=job, model=model):
        pass
    with optstate.AdamW(small_model().named_parameters(), job=job):
        pass

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    wrapped = Wrapper(small_model())
    with optstate.AdamW(wrapped.parameters(), job=job, model=wrapped):
        pass


def test_another_layout_is_refused_by_its_first_difference(job):
    with optstate.AdamW(small_model().named_parameters(), job=job):
        pass
    other = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 5))
    with pytest.raises(optstate.FailedPreconditionError, match="parameter 2"):
        optstate.AdamW(other.named_parameters(), job=job)
    with pytest.raises(optstate.FailedPreconditionError, match="bfloat16"):
        optstate.AdamW(small_model(dtype=torch.bfloat16).named_parameters(), job=job)
    with pytest.raises(optstate.FailedPreconditionError):
        optstate.Adam(small_model().named_parameters(), job=job)
    with pytest.raises(optstate.FailedPreconditionError):
        optstate.AdamW(small_model().named_parameters(), job=job, amsgrad=True)


def _attaches(connection, _, job, endpoint):
    optimizer = optstate.AdamW(small_model().parameters(), job=job, endpoint=endpoint)
    say(connection, os.getpid())
    connection.recv()
    optimizer.close()


def test_a_rank_is_attached_once(job, daemon):
    """Another process cannot take it."""
    with running(_attaches, 1, job, daemon.shm, grouped=False) as other:
        pid = other.hear(0)
        with pytest.raises(optstate.AlreadyExistsError, match=f"process {pid}"):
            optstate.AdamW(small_model().parameters(), job=job)
        other.connections[0].send("close")
        other.results()
    optstate.AdamW(small_model().parameters(), job=job).close()


def test_close_and_collection_free_the_rank(job, daemon):
    optimizer = optstate.AdamW(small_model().parameters(), job=job)
    optimizer.close()
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.state_dict()
    optimizer = optstate.AdamW(small_model().parameters(), job=job)
    del optimizer
    gc.collect()
    optstate.AdamW(small_model().parameters(), job=job).close()
    optimizer = optstate.AdamW(small_model().parameters())
    private = optimizer.job
    assert {private, job} <= set(daemon.jobs())
    optimizer.close()
    # The daemon deletes it in its own time.
    assert any(private not in daemon.jobs() for _ in range(1000))
    assert job in daemon.jobs()


def test_two_jobs_interleaved(job):
    whole = []
    for seed in (1, 2):
        model = small_model(seed=seed)
        train(model, optstate.AdamW(model.parameters(), lr=0.01 * seed), range(10))
        whole.append(model)
    models = [small_model(seed=1), small_model(seed=2)]
    optimizers = [
        optstate.AdamW(model.parameters(), lr=0.01 * (index + 1), job=f"{job}-{index}")
        for index, model in enumerate(models)
    ]
    for step in range(10):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            loss_of(model, step).backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
    for model, expected in zip(models, whole):
        assert largest_difference(model, expected) == 0


def _train_until_killed(connection, rank, job, endpoint):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=endpoint)
    say(connection, optimizer.committed_step)
    for step in range(optimizer.committed_step, 40):
        train(model, optimizer, [step])
        say(connection, step)
    return [parameter.detach().numpy() for parameter in model.parameters()]


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_sigkill_of_all_ranks(world_size, wire, job, daemon):
    """A run that is killed three times at random moments ends with the bits of one without a
    break."""
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(40))
    endpoint = getattr(daemon, wire)
    committed = 0
    for kill_after in (5, 12, 3, None):
        with running(_train_until_killed, world_size, job, endpoint) as ranks:
            for rank in range(world_size):
                assert ranks.hear(rank) >= committed
            if kill_after is None:
                for rank in range(world_size):
                    while ranks.hear(rank) < 39:
                        pass
                results = ranks.results()
                break
            for _ in range(kill_after):
                step = ranks.hear(0)
            ranks.kill(*range(world_size))
            committed = step + 1
    for result in results:
        for parameter, expected in zip(result, whole.parameters()):
            assert torch.equal(torch.from_numpy(parameter), expected)


def _push_and_wait(connection, rank, job, endpoint):
    """Stages a gradient of another size of step and never commits."""
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=endpoint)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    gradients = optimizer._served.attachment.gradients
    gradients.push(optimizer.committed_step + 1, 0, gradients.gather())
    optimizer._served.attachment.session.flush()
    say(connection, "pushed")
    connection.recv()


@pytest.mark.parametrize("wire", ["shm", "grpc_tcp"])
def test_what_a_killed_rank_staged_is_dropped(wire, job, daemon):
    with running(_push_and_wait, 1, job, getattr(daemon, wire)) as ranks:
        assert ranks.hear(0) == "pushed"
        ranks.kill(0)
    model, expected = small_model(), small_model()
    train(expected, optstate.AdamW(expected.parameters(), lr=0.01), range(3))
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    assert optimizer.committed_step == 0
    train(model, optimizer, range(3))
    assert largest_difference(model, expected) == 0


def test_a_forked_child_leaves_the_session_alone(job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job)
    train(model, optimizer, range(2))
    dataset = torch.utils.data.TensorDataset(torch.arange(8))
    for _ in torch.utils.data.DataLoader(dataset, num_workers=1, multiprocessing_context="fork"):
        train(model, optimizer, range(1))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            optimizer.step()
        except optstate.FailedPreconditionError as error:
            status = 0 if "forked" in str(error) else 2
        optimizer.close()
        gc.collect()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(model, optimizer, range(2))
    optimizer.close()


_TRAINER_WITH_WORKER = """
import os, sys
import optstate
from training import small_model
job, endpoint = sys.argv[1:]
optimizer = optstate.AdamW(small_model().parameters(), job=job, endpoint=endpoint)
if os.fork() == 0:
    sys.stdin.read()  # until the test closes its end
    os._exit(0)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("wire", ["shm", "grpc_unix", "grpc_tcp"])
def test_a_forked_child_does_not_keep_a_dead_rank_attached(job, daemon, wire):
    """A data loader's worker that outlives its trainer holds nothing of it."""
    endpoint = getattr(daemon, wire)
    # A new process, because a fork of ours may have used gRPC already.
    command = [sys.executable, "-c", _TRAINER_WITH_WORKER, job, endpoint]
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as trainer:
        assert trainer.wait() == -9
        end = time.monotonic() + 20
        while daemon.optctl("describe", "job", job)["session_count"] != 0:
            assert time.monotonic() < end, "the rank is still attached"
        optimizer = optstate.AdamW(small_model().parameters(), job=job, endpoint=endpoint)
        optimizer.close()


def test_sigkill_of_one_rank_within_a_step(job, daemon):
    """The other rank waits; the one that comes again completes the step."""
    import threading

    from optstate import _native
    from optstate.session import Session
    from optstate.session_spec import ParameterSpec, SessionSpec

    def spec(rank):
        parameters = [ParameterSpec(name, [4], 4, 1, 1, 0) for name in ("a", "b")]
        return SessionSpec(job, 2, [0], parameters, daemon.shm, rank=rank, world_size=2)

    def hyperparams():
        groups = _native.array_of(_native.Hyperparams, 1)
        groups[0].value[:4] = [0.1, 0.9, 0.99, 1e-8]
        return groups

    def load(session):
        zeros = (ctypes.c_float * 4)()
        session.begin_load()
        for index in range(2):
            session.load(_native.MASTER, index, 1, ctypes.addressof(zeros))
        session.finish_load()

    def push(session, value):
        for parameter, address in session.gradient_addresses().items():
            (ctypes.c_float * 4).from_address(address)[:] = [value] * 4
            session.push(1, 0, parameter, 1)
        session.flush()

    stays = Session.open(spec(0))
    with running(_second_rank, 1, spec(1), grouped=False) as ranks:
        assert isinstance(ranks, Ranks)
        load(stays)
        assert ranks.hear(0) == "pushed"
        ranks.kill(0)
    push(stays, 1.0)
    outcomes = []
    waiting = threading.Thread(target=lambda: outcomes.append(stays.commit(1, hyperparams())))
    waiting.start()
    again = Session.open(spec(1))
    assert again.committed_step == 0
    push(again, 2.0)
    outcomes.append(again.commit(1, hyperparams()))
    waiting.join()
    # Gradients that the killed rank had staged (1000) are not in it.
    assert [outcome.gradient_norm for outcome in outcomes] == [pytest.approx(20**0.5)] * 2
    again.close()
    stays.close()


def _second_rank(connection, rank, spec):
    from optstate import _native
    from optstate.session import Session

    session = Session.open(spec)
    zeros = (ctypes.c_float * 4)()
    session.begin_load()
    for index in range(2):
        session.load(_native.MASTER, index, 1, ctypes.addressof(zeros))
    session.finish_load()
    for parameter, address in session.gradient_addresses().items():
        (ctypes.c_float * 4).from_address(address)[:] = [1000.0] * 4
        session.push(1, 0, parameter, 1)
    session.flush()
    say(connection, "pushed")
    connection.recv()
