"""Gradients that are views and that a script keeps: their values stay, as in torch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading

import numpy as np
import optstate
import pytest
import ranks
import torch
from gradients_in_place import OPTIONS, SGD, assert_as_torchs, backward, in_place, run, viewable
from optstate._torch.gradients import views as gradient_views
from optstate._torch.tensors import memory_view
from training import bits, largest_difference, loss_of, small_model


class Kept:
    """Keeps a script's references to gradients of each step, and the values that they had then."""

    def __init__(self, keep):
        self.keep = keep
        self.tensors = []
        self.values = []

    def __call__(self, model, optimizer, step):
        backward(model, optimizer, step)
        for parameter in model.parameters():
            self.tensors.append(self.keep(parameter.grad))
            self.values.append(parameter.grad.clone())

    def check(self):
        for tensor, value in zip(self.tensors, self.values):
            held = torch.as_tensor(tensor) if not isinstance(tensor, torch.Tensor) else tensor
            assert torch.equal(held.reshape(value.shape), value)


KEEPS = {
    "object": lambda gradient: gradient,
    "detached": torch.Tensor.detach,
    "data": lambda gradient: gradient.data,
    "slice": lambda gradient: gradient.view(-1)[:],
    "numpy": torch.Tensor.numpy,
    "memoryview": lambda gradient: np.asarray(memoryview(gradient.numpy())),
    "dlpack": lambda gradient: np.from_dlpack(gradient),
    "other dtype": lambda gradient: gradient.view(torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("how", KEEPS)
def test_all_gradients_of_all_steps(how):
    ours, theirs = Kept(KEEPS[how]), Kept(KEEPS[how])
    model, _ = run(SGD, ours)
    reference, _ = run(torch.optim.SGD, theirs)
    ours.check()
    theirs.check()
    assert largest_difference(model, reference) < 1e-6


@pytest.mark.parametrize("how", ["object", "numpy", "dlpack"])
def test_a_storage_that_is_kept_now_and_then(how):
    kept = []

    def between(model, optimizer, step):
        backward(model, optimizer, step)
        if step in (1, 4):
            gradient = list(model.parameters())[step % 3].grad
            kept.append((KEEPS[how](gradient), gradient.clone()))

    assert_as_torchs(between)
    assert len(kept) == 6
    for held, value in kept:
        assert torch.equal(torch.as_tensor(held), value)


def test_values_that_a_graph_has_saved():
    """Autograd would not notice that the memory holds another step's gradient."""

    def found(optimizer_class):
        model = small_model()
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        backward(model, optimizer, 0)
        weight = torch.ones_like(model[0].weight, requires_grad=True)
        loss = (weight * model[0].weight.grad).sum()
        optimizer.step()
        optimizer.zero_grad()
        backward(model, optimizer, 1)
        optimizer.step()
        loss.backward()
        return weight.grad

    assert torch.equal(found(SGD), found(torch.optim.SGD))


def test_a_kept_gradient_that_the_script_replaces():
    """The new one is copied into the area, where the kept one was."""
    kept = []

    def between(model, optimizer, step):
        backward(model, optimizer, step)
        for parameter in model.parameters():
            kept.append((parameter.grad, parameter.grad.clone()))
            parameter.grad = parameter.grad * 0.5

    assert_as_torchs(between)
    for held, value in kept:
        assert torch.equal(held, value)


def test_a_kept_gradient_can_be_written():
    """A write to a kept gradient is not in the step of another gradient."""

    def between(model, optimizer, step):
        former = getattr(between, "former", None)
        backward(model, optimizer, step)
        if former is not None and step:
            former.fill_(1e6)
        between.former = model[0].weight.grad

    assert_as_torchs(between)


def test_only_what_is_kept_is_copied_afterwards():
    model = small_model()
    with SGD(model.parameters(), lr=0.1) as optimizer:
        kept = []
        for step in range(3):
            optimizer.zero_grad()
            backward(model, optimizer, step)
            optimizer.step()
            kept.append(model[0].weight.grad)
        assert viewable(optimizer) == {1, 2, 3, 4, 5}
        assert in_place(optimizer) == {1, 2, 3, 4, 5}
        del kept


def test_references_that_are_gone_cost_nothing():
    model = small_model()
    with SGD(model.parameters(), lr=0.1) as optimizer:
        for step in range(3):
            backward(model, optimizer, step)
            held = [each.grad.numpy() for each in model.parameters()]
            optimizer.step()
            del held
            optimizer.zero_grad()
        assert viewable(optimizer) == set(range(6))


@pytest.mark.parametrize("how", ["close", "collected", "add_param_group", "attach again"])
def test_the_end_of_the_optimizer(how, job):
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1, job=job)
    backward(model, optimizer, 0)
    optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters()]
    values = bits(gradients)
    assert in_place(optimizer) == set(range(6))
    if how == "add_param_group":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4))]})
    elif how == "collected":
        del optimizer
        gc.collect()
    else:
        optimizer.close()
    if how == "attach again":
        optimizer = SGD(model.parameters(), lr=0.1, job=job)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert not any(each.any() for each in gradients)
        backward(model, optimizer, 1)
        optimizer.step()
        return
    assert bits(gradients) == values
    backward(model, None, 0)  # adds in place
    assert bits(gradients) != values
    for gradient in gradients:
        gradient.fill_(1.0)
    if how == "add_param_group":
        optimizer.step()
        optimizer.close()


def test_views_outlive_the_optimizer_and_each_other():
    first = small_model()
    with SGD(first.parameters(), lr=0.1) as optimizer:
        backward(first, optimizer, 0)
        kept = first[0].weight.grad
        value = kept.clone()
    del optimizer, first
    gc.collect()
    again = small_model()
    with SGD(again.parameters(), lr=0.1) as optimizer:
        backward(again, optimizer, 1)
        optimizer.step()
    assert torch.equal(kept, value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, optstate.UnavailableError, ZeroDivisionError])
@pytest.mark.parametrize("where", ["push_gradients", "commit"])
def test_a_step_that_ends_with_an_error(error, where, monkeypatch):
    """Nothing that the script writes until the next step is in the area, which may be read."""
    model = small_model()
    with SGD(model.parameters(), lr=0.1) as optimizer:
        backward(model, optimizer, 0)
        session = optimizer._served.attachment.session
        area = [
            memory_view(session.gradient_addresses()[each.parameter], each.numel, torch.float32)
            for each in session.pieces
        ]
        pushed = bits([each.grad for each in model.parameters()])
        assert bits(area) == pushed

        def fail(*_, **__):
            raise error("now")

        with monkeypatch.context() as patch:
            patch.setattr(session, where, fail)
            if error is optstate.UnavailableError:
                patch.setattr(session, "abort", fail)
            with pytest.raises(error):
                optimizer.step()
        assert not in_place(optimizer)
        assert bits([each.grad for each in model.parameters()]) == pushed
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        if optimizer._served.attachment.committing or optimizer._served.attachment.must_abort:
            backward(model, optimizer, 1)
            optimizer.zero_grad()
            backward(model, optimizer, 2)
            assert not in_place(optimizer)
            assert bits(area) == pushed
        optimizer.step()
        backward(model, optimizer, 3)
        optimizer.zero_grad()
        backward(model, optimizer, 3)
        assert in_place(optimizer) == set(range(6))


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_while_views_are_left(again, monkeypatch):
    """Views that were left in part are left whole before the area is used again."""
    real = gradient_views._Mapping.keep

    def interrupted(mapping, *parts):
        real(mapping, *parts)
        raise KeyboardInterrupt

    model = small_model()
    reference = small_model()
    torchs = torch.optim.SGD(reference.parameters(), **OPTIONS)
    with SGD(model.parameters(), **OPTIONS) as optimizer:
        kept = []
        for step in range(5):
            optimizer.zero_grad()
            torchs.zero_grad()
            backward(model, optimizer, step)
            backward(reference, torchs, step)
            if step == 2:
                with monkeypatch.context() as patch:
                    patch.setattr(gradient_views._Mapping, "keep", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        optimizer._served.attachment.gradients.leave_views()
                for parameter in (*model.parameters(), *reference.parameters()):
                    parameter.grad.mul_(0.5)
                if again:
                    for which in (model, reference):
                        which.zero_grad()
                        backward(which, None, 9)
            kept += [(each.grad, each.grad.clone()) for each in list(model.parameters())[:2]]
            optimizer.step()
            torchs.step()
        for held, value in kept:
            assert torch.equal(held, value)
    assert largest_difference(model, reference) < 1e-6


def _interrupted(connection, rank, endpoint, job):
    model = small_model()
    optimizer = SGD(model.named_parameters(), **OPTIONS, endpoint=endpoint, job=job)
    mine = {piece.parameter for piece in optimizer._served.attachment.session.pieces if piece.numel}
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step < 2:
            optimizer.step()
    assert in_place(optimizer) == mine
    if rank == 1:
        ranks.say(connection, "attached")
        connection.recv()
        optimizer.step()
    else:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad.fill_(1e6)
        loss_of(model, 9).backward()
        optimizer.zero_grad()
        loss_of(model, 9).backward()
        ranks.say(connection, "interrupted")
        connection.recv()
        assert optimizer.committed_step == 3
    values = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    optimizer.close()
    return values


def test_ctrl_c_while_the_step_is_under_way(daemon, job):
    """Changes of gradients after the interrupt are not in that step."""
    with ranks.running(_interrupted, 2, daemon.shm, job) as running:
        assert running.hear(1) == "attached"
        while "step 3: rank 1 has not" not in daemon.run_optctl("describe", "job", job):
            pass
        os.kill(running.processes[0].pid, signal.SIGINT)
        assert running.hear(0) == "interrupted"
        for connection in running.connections:
            connection.send("go")
        results = running.results()
    whole = small_model()
    optimizer = torch.optim.SGD(whole.parameters(), **OPTIONS)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(whole, step).backward()
        optimizer.step()
    for result in results:
        for found, expected in zip(result, whole.parameters()):
            assert torch.allclose(torch.from_numpy(found), expected, atol=1e-6)


def _write_gradients(model, connection):
    values = bits([each.grad for each in model.parameters()])
    for parameter in model.parameters():
        parameter.grad.fill_(1e6)
    loss_of(model, 5).backward()
    model.zero_grad()
    loss_of(model, 5).backward()
    connection.send((values, bits([each.grad for each in model.parameters()])))


@pytest.mark.parametrize("waits", [False, True])
def test_a_forked_child_writes_its_own_gradients(waits):
    """waits: until the parent has written its own."""
    fork = multiprocessing.get_context("fork")
    model, reference = small_model(), small_model()
    torchs = torch.optim.SGD(reference.parameters(), **OPTIONS)
    with SGD(model.parameters(), **OPTIONS) as optimizer:
        for step in range(4):
            for which, its in ((model, optimizer), (reference, torchs)):
                its.zero_grad()
                loss_of(which, step).backward()
            mine, theirs = fork.Pipe()
            values = bits([each.grad for each in model.parameters()])
            child = fork.Process(target=_write_gradients, args=(model, theirs))
            child.start()
            if waits:
                for parameter in (*model.parameters(), *reference.parameters()):
                    parameter.grad.mul_(0.5)
            assert mine.poll(20)
            seen, made = mine.recv()
            child.join()
            assert child.exitcode == 0
            assert seen == values
            loss_of(model, 5).backward()
            loss_of(reference, 5).backward()
            optimizer.step()
            torchs.step()
            assert made
    assert largest_difference(model, reference) < 1e-6


def test_a_child_after_the_optimizer_was_closed():
    fork = multiprocessing.get_context("fork")
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    backward(model, optimizer, 0)
    optimizer.close()
    del optimizer
    gc.collect()
    values = bits([each.grad for each in model.parameters()])
    mine, theirs = fork.Pipe()
    child = fork.Process(target=_write_gradients, args=(model, theirs))
    child.start()
    assert mine.poll(60)
    assert mine.recv()[0] == values
    child.join()
    assert bits([each.grad for each in model.parameters()]) == values


def test_a_fork_by_another_thread_during_backward():
    """No part of a gradient is lost, however the fork falls."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)))
    batch = torch.randn(1, 1024)
    ends = threading.Event()

    def fork_often():
        while not ends.is_set():
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

    with SGD(model.parameters(), lr=0.0) as optimizer:
        expected = torch.autograd.grad(model(batch).square().sum(), list(model.parameters()))
        thread = threading.Thread(target=fork_often)
        thread.start()
        try:
            for _ in range(50):
                optimizer.zero_grad()
                model(batch).square().sum().backward()
                for parameter, gradient in zip(model.parameters(), expected):
                    assert torch.equal(parameter.grad, gradient)
        finally:
            ends.set()
            thread.join()


@pytest.mark.parametrize("killed", ["engine", "daemon"])
def test_a_daemon_that_comes_back(killed, own_daemon):
    """The area is the same one: gradients go on as views, and kept ones keep their values."""
    model, reference = small_model(), small_model()
    torchs = torch.optim.SGD(reference.parameters(), **OPTIONS)
    optimizer = SGD(model.named_parameters(), **OPTIONS, endpoint=own_daemon.shm, job="killed")
    with optimizer:
        kept = []
        for step in range(5):
            for which, its in ((model, optimizer), (reference, torchs)):
                its.zero_grad()
                loss_of(which, step).backward()
            if step == 2:
                kept = [(each.grad, each.grad.clone()) for each in model.parameters()]
                if killed == "engine":
                    pid = own_daemon.optctl("describe", "job", "killed")["engine_pid"]
                    os.kill(int(pid), signal.SIGKILL)
                else:
                    own_daemon.kill()
                    own_daemon.start()
            optimizer.step()
            torchs.step()
        for held, value in kept:
            assert torch.equal(held, value)
    assert largest_difference(model, reference) < 1e-6
