"""A load is whole or not at all, and ranks that do not load alike hear so at once."""

import copy
import os
import signal

import optstate
import pytest
import ranks
import torch
from optstate.session import Session
from training import largest_difference, loss_of, small_model, train


def _state(optimizer):
    return [
        (key, value.clone())
        for entry in optimizer.state_dict()["state"].values()
        for key, value in entry.items()
    ]


def _equal(one, other):
    return len(one) == len(other) and all(
        a == b and torch.equal(v, w) for (a, v), (b, w) in zip(one, other)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "dynamic8"])
def test_a_load_of_what_the_job_has_changes_nothing(state_dtype, dtype, daemon):
    def run(loads):
        model = small_model(dtype=dtype)
        optimizer = optstate.AdamW(
            model.parameters(), lr=0.01, weight_decay=0.1, state_dtype=state_dtype
        )
        for step in range(6):
            train(model, optimizer, range(step, step + 1))
            if loads:
                optimizer.load_state_dict(optimizer.state_dict())
        state = _state(optimizer)
        optimizer.close()
        return model, state

    (model, state), (expected, expected_state) = run(True), run(False)
    assert largest_difference(model, expected) == 0
    assert _equal(state, expected_state)


@pytest.mark.parametrize("call", ["begin_load", "load_many", "finish_load"])
def test_an_interrupted_load_state_dict_leaves_the_state_of_before(call, job, daemon, monkeypatch):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    train(model, optimizer, range(2, 4))
    before = _state(optimizer)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Session, call, interrupt)
        with pytest.warns(UserWarning, match="put back"), pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(saved)
    assert _equal(_state(optimizer), before)
    assert daemon.optctl("describe", "job", job)["phase"] == "JOB_PHASE_READY"
    # Groups and parameters may be those of the checkpoint: no step with half of it.
    loss_of(model, 4).backward()
    with pytest.raises(RuntimeError, match="call it again"):
        optimizer.step()
    with pytest.warns(UserWarning, match="put back"):
        optimizer.load_state_dict(saved)
    train(model, optimizer, range(4, 5))
    optimizer.close()


def _interrupted_load(optimizer, saved, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Session, "finish_load", interrupt)
        with pytest.warns(UserWarning, match="put back"), pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["model first", "model last", "attached anew", "edited"])
def test_after_an_interrupted_load_the_job_can_go_on(order, dtype, job, monkeypatch):
    """The job's parameters come back too: the checkpoint's must not train with its moments."""
    model = small_model(dtype=dtype)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    train(model, optimizer, range(4))
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(4, 6))
    newest, state = copy.deepcopy(model), _state(optimizer)
    if order == "attached anew":
        optimizer.close()
        model = small_model(seed=9, dtype=dtype)
        model.load_state_dict(checkpoint[0])
        optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    if order != "model last":
        model.load_state_dict(checkpoint[0])
    if order == "edited":
        optimizer.state[model[0].bias]["exp_avg"].zero_()
    _interrupted_load(optimizer, checkpoint[1], monkeypatch)
    if order == "model last":
        model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(optimizer.state_dict())
    assert largest_difference(model, newest) == 0
    assert _equal(_state(optimizer), state)
    train(model, optimizer, range(6, 8))
    whole = small_model(dtype=dtype)
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(8))
    assert largest_difference(model, whole) == 0


@pytest.mark.parametrize("goes_on_between", [False, True])
def test_after_an_interrupted_load_the_checkpoint_can_be_loaded(goes_on_between, job, monkeypatch):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    train(model, optimizer, range(4))
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(4, 6))
    optimizer.close()
    model = small_model(seed=9)
    model.load_state_dict(checkpoint[0])
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    _interrupted_load(optimizer, checkpoint[1], monkeypatch)
    if goes_on_between:
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="put back"):
        optimizer.load_state_dict(checkpoint[1])
    assert all(torch.equal(model.state_dict()[key], checkpoint[0][key]) for key in checkpoint[0])


def test_a_change_whose_load_was_interrupted_is_sent_with_the_next_step(monkeypatch):
    def run(interrupted):
        model = small_model()
        optimizer = optstate.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, range(2))
        with torch.no_grad():
            model[0].weight.mul_(2)
            model[3].bias.add_(1)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        if interrupted:

            def interrupt(*_, **__):
                raise KeyboardInterrupt

            with monkeypatch.context() as patched:
                patched.setattr(Session, "finish_load", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
        optimizer.step()
        train(model, optimizer, range(3, 5))
        optimizer.close()
        return model

    assert largest_difference(run(True), run(False)) == 0


def _at_step_0(optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["step"] = torch.zeros_like(entry["step"])
    return state


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"amsgrad": True}),
        ("NAdam", {}),
        ("RMSprop", {"momentum": 0.9}),
        ("Adagrad", {}),
        ("Adafactor", {}),
        ("SGD", {"momentum": 0.9}),
        ("Lion", {}),
    ],
)
def test_arrays_whose_step_is_0_are_refused(name, options):
    """torch goes on with them; the daemon begins them anew."""
    model = small_model()
    optimizer = getattr(optstate, name)(model.named_parameters(), lr=0.01, **options)
    train(model, optimizer, range(3))
    before, state = _state(optimizer), _at_step_0(optimizer)
    with pytest.raises(ValueError, match='parameter "0.weight" is not what .* its step is 0'):
        optimizer.load_state_dict(state)
    assert _equal(_state(optimizer), before)
    for key in list(state["state"]):
        if key != 1:
            del state["state"][key]
    with pytest.raises(ValueError, match='parameter "0.bias"'):
        optimizer.load_state_dict(state)
    assert _equal(_state(optimizer), before)
    train(model, optimizer, range(3, 4))


def test_nadams_product_begins_with_1():
    model = small_model()
    optimizer = optstate.NAdam(model.named_parameters(), lr=0.01)
    train(model, optimizer, range(3))
    state = _at_step_0(optimizer)
    for entry in state["state"].values():
        entry["exp_avg"].zero_()
        entry["exp_avg_sq"].zero_()
    with pytest.raises(ValueError, match="its step is 0"):
        optimizer.load_state_dict(state)
    for entry in state["state"].values():
        entry["mu_product"].fill_(1)
    optimizer.load_state_dict(state)


def test_adagrads_sums_begin_with_one_value():
    """The value is torch's initial_accumulator_value, for all parameters."""
    made = []
    for package in (optstate, torch.optim):
        model = small_model()
        optimizer = package.Adagrad(model.named_parameters(), lr=0.01)
        train(model, optimizer, range(3))
        state = _at_step_0(optimizer)
        for entry in state["state"].values():
            entry["sum"].fill_(0.5)
        optimizer.load_state_dict(copy.deepcopy(state))
        train(model, optimizer, range(3, 6))
        made.append((model, optimizer))
    assert largest_difference(made[0][0], made[1][0]) < 1e-6
    state["state"][1]["sum"].fill_(0.25)
    with pytest.raises(ValueError, match='parameter "0.bias"'):
        made[0][1].load_state_dict(state)


def _dies_in_a_load(connection, rank, job, endpoint, call):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=endpoint)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    train(model, optimizer, range(2, 4))
    ranks.say(connection, [parameter.detach().tolist() for parameter in model.parameters()])
    called = getattr(Session, call)

    def die(*arguments):
        if call == "load_many":
            called(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(Session, call, die)
    model.load_state_dict(small_model(seed=7).state_dict())
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
@pytest.mark.parametrize("call", ["load_many", "finish_load"])
def test_a_trainer_that_is_killed_in_a_load_leaves_a_job_to_go_on_with(call, wire, job, daemon):
    endpoint = getattr(daemon, wire)
    with ranks.running(_dies_in_a_load, 1, job, endpoint, call, grouped=False) as running:
        before = running.hear(0)
        running.processes[0].join()
    model = small_model(seed=3)
    with optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=endpoint) as optimizer:
        assert optimizer.committed_step == 4
        assert [parameter.detach().tolist() for parameter in model.parameters()] == before
        whole = small_model()
        with optstate.AdamW(whole.parameters(), lr=0.01) as expected:
            train(whole, expected, range(4))
            assert _equal(_state(optimizer), _state(expected))


def _begin(rank, job, endpoint, **options):
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(), lr=0.01, job=job, endpoint=endpoint, step_timeout=600, **options
    )
    for step in range(2):
        _step(model, optimizer, step)
    return model, optimizer


def _step(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def _one_changes(connection, rank, job, endpoint, changing, options):
    model, optimizer = _begin(rank, job, endpoint, **options)
    before = _state(optimizer)
    if rank == changing:
        with torch.no_grad():
            model[0].weight.fill_(0.125)
    with pytest.raises(optstate.FailedPreconditionError) as refused:
        _step(model, optimizer, 2)
    assert f"rank {changing} has begun a load" in str(refused.value)
    assert f"rank {1 - changing} has committed step 3" in str(refused.value)
    if rank == changing:
        assert f"on this rank, {rank}, parameters " in str(refused.value)
        assert "were changed in place" in str(refused.value)
    assert optimizer.committed_step == 2
    assert _equal(_state(optimizer), before)
    # Made on every rank it is taken, and the step with it.
    with torch.no_grad():
        model[0].weight.fill_(0.125)
    optimizer.step()
    assert optimizer.committed_step == 3
    optimizer.close()
    return [parameter.detach().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
@pytest.mark.parametrize("changing", [0, 1])
@pytest.mark.parametrize("options", [{}, {"reduction": "daemon", "overlap": True}])
def test_a_parameter_that_one_rank_alone_changed(options, changing, wire, job, daemon):
    first, second = ranks.run(_one_changes, 2, job, getattr(daemon, wire), changing, options)
    assert first == second


def _one_loads(connection, rank, job, endpoint):
    model, optimizer = _begin(rank, job, endpoint)
    saved = optimizer.state_dict()
    _step(model, optimizer, 2)
    before = _state(optimizer)
    with pytest.raises(optstate.FailedPreconditionError) as refused:
        if rank == 0:
            with pytest.warns(UserWarning, match="put back"):
                optimizer.load_state_dict(saved)
        else:
            _step(model, optimizer, 3)
    assert "rank 0 has begun a load" in str(refused.value)
    if rank == 0:
        assert "load_state_dict() was called" in str(refused.value)
    assert _equal(_state(optimizer), before)
    with pytest.warns(UserWarning, match="put back"):
        optimizer.load_state_dict(saved)
    _step(model, optimizer, 3)
    assert optimizer.committed_step == 4
    optimizer.close()


def test_a_state_dict_that_one_rank_alone_loads(job, daemon):
    ranks.run(_one_loads, 2, job, daemon.shm)


def test_an_attach_without_the_loss_scaler_is_refused(job):
    parameter = torch.nn.Parameter(torch.ones(3))
    scaler = optstate.LossScaler(init_scale=1024.0)
    optimizer = optstate.SGD([parameter], lr=0.1, job=job, loss_scaler=scaler)
    parameter.grad = torch.full((3,), float("inf"))
    optimizer.step()  # halves it
    optimizer.close()
    with pytest.raises(optstate.FailedPreconditionError, match="loss_scaler=.*optctl delete job"):
        optstate.SGD([parameter], lr=0.1, job=job)
    with optstate.SGD([parameter], lr=0.1, job=job, loss_scaler=scaler) as again:
        assert again.loss_scale == 512


def _ranks_differ(connection, rank, job, endpoint, what):
    model, optimizer = _begin(rank, job, endpoint)
    before, values = _state(optimizer), [each.detach().clone() for each in model.parameters()]
    first, second = model[0].weight, model[2].weight
    whole, saved = optimizer.state_dict(), optimizer.state_dict()
    with pytest.raises(optstate.FailedPreconditionError) as refused, torch.no_grad():
        if what == "values":
            first.fill_(7.0 + rank)
        elif what == "parameters":
            (second if rank == 0 else first).fill_(7.0)
        elif what == "edits":
            optimizer.state[first]["exp_avg"].fill_(1.0 + rank)
        elif what == "state":
            saved["state"][0]["exp_avg"] = torch.full_like(first, 1.0 + rank)
            optimizer.load_state_dict(saved)
        with torch.enable_grad():
            _step(model, optimizer, 2)
    assert "the ranks disagree: what rank 1 has loaded" in str(refused.value)
    assert f"on this rank, {rank}, " in str(refused.value)
    assert optimizer.committed_step == 2
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values):
            parameter.copy_(value)
    optimizer.load_state_dict(whole)
    assert _equal(_state(optimizer), before)
    optimizer.close()


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
@pytest.mark.parametrize("what", ["values", "parameters", "edits", "state"])
def test_ranks_that_change_other_things(what, wire, job, daemon):
    """Each would have its own in what it owns, and lose the rest."""
    ranks.run(_ranks_differ, 2, job, getattr(daemon, wire), what)
