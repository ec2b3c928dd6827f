"""Wrappers as frameworks make them: of the class without the instance, of the __dict__, and
by forwarding."""

from __future__ import annotations

import copy
import pickle

import optstate
import pytest
import torch
from ranks import run
from training import largest_difference, loss_of, small_model, train


class Forwarding:
    """A wrapper like Lightning's and Fabric's: a subclass of ours whose instance has no
    attribute of ours, and forwards what is missing."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self._strategy = None
        name = "Forwarding" + type(optimizer).__name__
        self.__class__ = type(name, (type(self), type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Copying:
    """A wrapper like older Lightning's: a subclass of ours with a copy of the __dict__."""

    def __init__(self, optimizer):
        self.__dict__ = {k: v for k, v in vars(optimizer).items() if k not in ("step", "__del__")}
        name = "Copying" + type(optimizer).__name__
        self.__class__ = type(name, (type(self), type(optimizer)), {})
        self._optimizer = optimizer

    def step(self, closure=None):
        return self._optimizer.step(closure)


class Prepared(torch.optim.Optimizer):
    """A wrapper like Accelerate's: an optimizer that has ours and loads its own state into it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        optimizer.load_state_dict(optimizer.state_dict())

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.optimizer.step(closure)


WRAPPERS = (Forwarding, Copying)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_sees_the_wrapped(wrapper, job, daemon):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, max_norm=0.5)
    wrapped = wrapper(optimizer)
    before = set(daemon.jobs())
    assert isinstance(wrapped, optstate.AdamW)
    train(model, wrapped, range(3))
    assert wrapped.committed_step == optimizer.committed_step == 3
    assert wrapped.last_outcome == optimizer.last_outcome and wrapped.last_outcome.step == 3
    assert (wrapped.job, wrapped.endpoint, wrapped.wire) == (job, optimizer.endpoint, "shm")
    assert wrapped.max_norm == 0.5 and wrapped.gradient_norms() == optimizer.gradient_norms()
    saved, expected = wrapped.state_dict()["state"], optimizer.state_dict()["state"]
    assert len(saved) == 6
    assert all(torch.equal(saved[i][k], expected[i][k]) for i in saved for k in saved[i])
    assert torch.equal(wrapped.fetch_state(model[0].weight)["exp_avg"], saved[0]["exp_avg"])
    assert torch.equal(wrapped.state[model[0].weight]["exp_avg"], saved[0]["exp_avg"])
    assert set(daemon.jobs()) == before


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_done_to_a_wrapper_is_done_to_the_wrapped(wrapper, job):
    model, plain = small_model(), small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    wrapped = wrapper(optimizer)
    wrapped.max_norm = 0.01
    assert optimizer.max_norm == 0.01
    wrapped.max_norm = None
    saved = None
    for step in range(6):
        if step == 2:
            saved = wrapped.state_dict(), reference.state_dict()
            saved = copy.deepcopy(saved)
        elif step == 4:
            wrapped.load_state_dict(saved[0])
            reference.load_state_dict(saved[1])
            wrapped.state[model[0].weight]["exp_avg"].zero_()
            reference.state[plain[0].weight]["exp_avg"].zero_()
            wrapped.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.02
        train(model, wrapped, [step])
        train(plain, reference, [step])
    assert largest_difference(model, plain) < 1e-5
    assert wrapped.param_groups is optimizer.param_groups
    assert optimizer.param_groups[0]["lr"] == 0.02
    extra = torch.nn.Parameter(torch.ones(3))
    wrapped.add_param_group({"params": [extra]})
    assert len(optimizer.param_groups) == 2 and optimizer.committed_step == 6
    extra.grad = torch.ones(3)
    optimizer.step()
    assert wrapped.committed_step == 7 and not torch.equal(extra, torch.ones(3))
    wrapped.close()
    with pytest.raises(RuntimeError, match="it is closed"):
        optimizer.step()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_grad_scaler_that_is_given_a_wrapper_scales_back(wrapper):
    model, plain = small_model(), small_model()
    optimizer = optstate.SGD(model.parameters(), lr=0.01)
    reference = torch.optim.SGD(plain.parameters(), lr=0.01)
    wrapped = wrapper(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        train(plain, reference, [step])
        wrapped.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(wrapped)
        scaler.update()
    assert largest_difference(model, plain) < 1e-5


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_copy_of_a_wrapper_is_an_optimizer_of_its_own(wrapper):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    wrapped = wrapper(optimizer)
    train(model, wrapped, range(2))
    other_model, other = copy.deepcopy((model, wrapped))
    other.attach()
    assert optimizer.job != other.job
    loss_of(other_model, 2).backward()
    optstate.AdamW.step(other)
    assert (optimizer.committed_step, other.committed_step) == (2, 1)
    assert other.fetch_state(other_model[0].weight)["step"] == 3


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_of_a_copy_makes_no_job(wrapper, daemon):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    before = set(daemon.jobs())
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        wrapped = wrapper(other)
        for use in (wrapped.step, lambda w=wrapped: w.fetch_state(model[0].weight)):
            with pytest.raises(RuntimeError, match=r"call attach\(\)"):
                use()
        assert len(wrapped.state_dict()["state"]) == 6
    assert set(daemon.jobs()) == before


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "dynamic8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_preparing_changes_nothing(dtype, state_dtype, job, monkeypatch):
    """load_state_dict(state_dict()) sends nothing, of a new job, one that was trained, and one
    that is re-attached; going on is bit-identical."""
    whole = small_model(dtype=dtype)
    reference = optstate.NAdam(whole.parameters(), lr=0.01, state_dtype=state_dtype)
    train(whole, reference, range(6))
    model = None
    for first in (0, 3):
        model = small_model(seed=first, dtype=dtype)
        optimizer = optstate.NAdam(model.parameters(), lr=0.01, state_dtype=state_dtype, job=job)
        session = optimizer._served.attachment.session
        with monkeypatch.context() as patch:
            patch.setattr(session, "begin_load", lambda: pytest.fail("sent"))
            prepared = Prepared(optimizer)
            train(model, prepared, range(first, first + 1))
            prepared.load_state_dict(prepared.state_dict())
        train(model, prepared, range(first + 1, first + 3))
        optimizer.close()
    assert largest_difference(model, whole) == 0


def _prepare(connection, rank, endpoint, job):
    bits = []
    for first in (0, 3):
        model = small_model(seed=first)
        optimizer = optstate.AdamW(
            model.parameters(), lr=0.01, job=job, endpoint=endpoint, partition="contiguous"
        )
        session = optimizer._served.attachment.session
        begin, session.begin_load = session.begin_load, None  # nothing is sent
        prepared = Prepared(optimizer)
        session.begin_load = begin
        train(model, prepared, range(first, first + 3))
        optimizer.close()
        bits = [parameter.detach().tolist() for parameter in model.parameters()]
    return bits


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_preparing_on_ranks_changes_nothing(daemon, job, wire):
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(6))
    for values in run(_prepare, 2, getattr(daemon, wire), job):
        assert values == [parameter.detach().tolist() for parameter in whole.parameters()]
