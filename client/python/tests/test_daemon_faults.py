"""The daemon dies, drains or is replaced under a trainer."""

from __future__ import annotations

import os
import pathlib
import signal

import optstate
import pytest
import torch
from training import largest_difference, loss_of, small_model, train


def whole_run(steps):
    model = small_model()
    train(model, optstate.AdamW(model.parameters(), lr=0.01), range(steps))
    return model


@pytest.mark.parametrize("wire", ["shm", "grpc_unix", "grpc_tcp"])
def test_an_engine_killed_between_steps_is_a_delay(wire, own_daemon, job):
    model = small_model()
    endpoint = getattr(own_daemon, wire)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=endpoint)
    for start in (0, 3, 6):
        train(model, optimizer, range(start, start + 3))
        os.kill(int(own_daemon.optctl("describe", "job", job)["engine_pid"]), 9)
    train(model, optimizer, range(9, 12))
    assert optimizer.committed_step == 12
    assert largest_difference(model, whole_run(12)) == 0
    optimizer.close()


def test_an_engine_killed_after_a_push_is_a_delay(own_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=own_daemon.shm)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    attachment = optimizer._served.attachment
    attachment.gradients.push(3, 0, attachment.gradients.gather())
    attachment.session.flush()
    os.kill(int(own_daemon.optctl("describe", "job", job)["engine_pid"]), 9)
    optimizer.step()
    assert largest_difference(model, whole_run(3)) == 0
    optimizer.close()


@pytest.mark.parametrize("call", ["load_many", "finish_load"])
@pytest.mark.parametrize("what", ["constructor", "change", "load_state_dict", "add_param_group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_killed_in_a_load_is_a_delay(dtype, what, call, own_daemon, job, monkeypatch):
    def run(kills):
        name = f"{job}-{kills}"
        called = getattr(optstate.session.Session, call)

        def kill_once(*arguments):
            monkeypatch.setattr(optstate.session.Session, call, called)
            os.kill(int(own_daemon.optctl("describe", "job", name)["engine_pid"]), 9)
            return called(*arguments)

        def perhaps_killed():
            if kills:
                monkeypatch.setattr(optstate.session.Session, call, kill_once)

        model = small_model().to(dtype)
        late = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        if what == "constructor":
            perhaps_killed()
        optimizer = optstate.SGD(
            model.parameters(), lr=0.01, momentum=0.9, job=name, endpoint=own_daemon.shm
        )
        train(model, optimizer, range(2))
        saved = optimizer.state_dict()
        train(model, optimizer, range(2, 4))
        if what == "change":
            with torch.no_grad():
                model[0].weight.mul_(2)
            perhaps_killed()
        elif what == "load_state_dict":
            perhaps_killed()
            optimizer.load_state_dict(saved)
        elif what == "add_param_group":
            perhaps_killed()
            optimizer.add_param_group({"params": [late]})
        train(model, optimizer, range(4, 7))
        assert getattr(optstate.session.Session, call) is called  # it was killed
        entries = optimizer.state_dict()["state"].values()
        optimizer.close()
        return [*model.parameters(), *(each for entry in entries for each in entry.values())]

    disturbed, expected = run(True), run(False)
    assert len(disturbed) == len(expected)
    assert all(map(torch.equal, disturbed, expected))


def stop_process(pid):
    os.kill(pid, signal.SIGSTOP)
    while "State:\tT" not in pathlib.Path(f"/proc/{pid}/status").read_text():
        pass


@pytest.mark.parametrize("what", ["change", "load_state_dict", "upload_parameters"])
def test_a_load_that_was_on_its_way_is_sent_again(what, own_daemon, job, monkeypatch):
    """Over gRPC a load is written before anything of it is answered."""

    def run(kills):
        name = f"{job}-{kills}"
        session = optstate.session.Session
        load_many, finish_load = session.load_many, session.finish_load

        def stop(*arguments):
            monkeypatch.setattr(session, "load_many", load_many)
            engine = int(own_daemon.optctl("describe", "job", name)["engine_pid"])
            monkeypatch.setattr(session, "finish_load", lambda *rest: kill(engine, *rest))
            stop_process(engine)
            return load_many(*arguments)

        def kill(engine, *arguments):
            monkeypatch.setattr(session, "finish_load", finish_load)
            os.kill(engine, signal.SIGKILL)
            return finish_load(*arguments)

        model = small_model()
        optimizer = optstate.AdamW(
            model.parameters(), lr=0.01, job=name, endpoint=own_daemon.grpc_unix
        )
        train(model, optimizer, range(2))
        saved = optimizer.state_dict()
        train(model, optimizer, range(2, 4))
        if kills:
            monkeypatch.setattr(session, "load_many", stop)
        if what == "change":
            with torch.no_grad():
                model[0].weight.mul_(2)
        elif what == "upload_parameters":
            model[0].weight.data.mul_(2)
            optimizer.upload_parameters()
        else:
            optimizer.load_state_dict(saved)
        train(model, optimizer, range(4, 7))
        assert session.finish_load is finish_load and session.load_many is load_many
        optimizer.close()
        return model

    assert largest_difference(run(True), run(False)) == 0


def test_a_daemon_that_is_killed_and_started_again(own_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=own_daemon.shm)
    train(model, optimizer, range(4))
    own_daemon.kill()
    own_daemon.start()
    train(model, optimizer, range(4, 8))
    optimizer.close()
    again = small_model(seed=4)
    with optstate.AdamW(again.parameters(), lr=0.01, job=job, endpoint=own_daemon.shm) as other:
        assert other.committed_step == 8
    assert largest_difference(again, whole_run(8)) == 0


def test_a_daemon_that_stays_away(own_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(), job=job, endpoint=own_daemon.shm, connect_timeout=0.5
    )
    train(model, optimizer, range(1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    own_daemon.process.terminate()
    own_daemon.process.wait()
    with pytest.raises(optstate.UnavailableError):
        optimizer.step()
    assert all((a == b).all() for a, b in zip(model.parameters(), before))
    own_daemon.start()
    train(model, optimizer, range(1, 2))
    assert optimizer.committed_step == 2
    optimizer.close()


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_an_engine_that_does_not_answer_in_time(wire, own_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(),
        lr=0.01,
        job=job,
        endpoint=getattr(own_daemon, wire),
        step_timeout=0.5,
    )
    train(model, optimizer, range(2))
    engine = int(own_daemon.optctl("describe", "job", job)["engine_pid"])
    os.kill(engine, signal.SIGSTOP)
    try:
        with pytest.raises(optstate.DeadlineExceededError):
            train(model, optimizer, range(2, 3))
    finally:
        os.kill(engine, signal.SIGCONT)
    train(model, optimizer, range(2, 4))  # the same step again
    assert optimizer.committed_step == 4
    assert largest_difference(model, whole_run(4)) == 0
    optimizer.close()


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_a_step_whose_answer_came_too_late_is_not_taken_twice(wire, own_daemon, job, monkeypatch):
    session = optstate.session.Session
    commit = session.commit
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(), lr=0.01, job=job, endpoint=getattr(own_daemon, wire), step_timeout=0.5
    )
    train(model, optimizer, range(2))
    engine = int(own_daemon.optctl("describe", "job", job)["engine_pid"])

    def stop(self, *arguments, **options):
        monkeypatch.setattr(session, "commit", commit)
        self.flush()  # so that the commit is sent
        stop_process(engine)
        return commit(self, *arguments, **options)

    monkeypatch.setattr(session, "commit", stop)
    try:
        with pytest.raises(optstate.DeadlineExceededError):
            train(model, optimizer, range(2, 3))
    finally:
        os.kill(engine, signal.SIGCONT)
    train(model, optimizer, range(2, 4))  # the same step again
    assert optimizer.committed_step == 4
    assert largest_difference(model, whole_run(4)) == 0
    optimizer.close()


def test_draining_refuses_a_step_and_resuming_takes_it(own_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=own_daemon.shm)
    train(model, optimizer, range(2))
    own_daemon.run_optctl("drain")
    with pytest.raises(optstate.UnavailableError, match="drain"):
        train(model, optimizer, range(2, 3))
    with pytest.raises(optstate.UnavailableError, match="drain"):
        optstate.AdamW(small_model().parameters(), endpoint=own_daemon.shm)
    own_daemon.run_optctl("drain", "--resume")
    train(model, optimizer, range(2, 4))
    assert largest_difference(model, whole_run(4)) == 0
    optimizer.close()
