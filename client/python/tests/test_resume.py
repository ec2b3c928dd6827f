"""A checkpoint that is loaded into a job that has gone further, in the order of frameworks."""

from __future__ import annotations

import copy
import io
import warnings

import optstate
import pytest
import torch
from ranks import RankFailed, run
from test_wrappers import Prepared
from training import largest_difference, small_model, train


def trained_job(job, dtype=torch.float32, **options):
    """A job at step 6, and the checkpoint of step 4: (model state, optimizer state)."""
    model = small_model(dtype=dtype)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, **options)
    train(model, optimizer, range(4))
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(4, 6))
    optimizer.close()
    return model, checkpoint


def follow(checkpoint, steps, dtype=torch.float32):
    """Loads a checkpoint in torch's own order, and trains on."""
    model = small_model(dtype=dtype)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    train(model, optimizer, steps)
    return model


def as_a_framework(job, checkpoint, prepares, dtype=torch.float32, **options):
    """Model first, then our optimizer, then its state."""
    model = small_model(seed=9, dtype=dtype)
    model.load_state_dict(checkpoint[0])
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, **options)
    assert optimizer.committed_step == 6
    used = Prepared(optimizer) if prepares else optimizer
    used.load_state_dict(checkpoint[1])
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prepares", [False, True])
def test_the_checkpoints_parameters_come_back(job, prepares, dtype):
    _, checkpoint = trained_job(job, dtype)
    with pytest.warns(UserWarning, match=r"6 steps .* a state of 4, and with it 6 parameters"):
        model, optimizer = as_a_framework(job, checkpoint, prepares, dtype)
    assert all(torch.equal(model.state_dict()[key], checkpoint[0][key]) for key in checkpoint[0])
    train(model, optimizer, range(4, 8))
    assert largest_difference(model, follow(checkpoint, range(4, 8), dtype)) == 0
    optimizer.close()
    again = small_model(seed=5, dtype=dtype)
    optstate.AdamW(again.parameters(), lr=0.01, job=job)
    assert largest_difference(again, model) == 0


def test_the_warning_points_at_the_script(job):
    _, checkpoint = trained_job(job)
    with pytest.warns(UserWarning) as heard:
        as_a_framework(job, checkpoint, False)
    put_back = [each for each in heard if "is put back" in str(each.message)]
    assert [each.filename for each in put_back] == [__file__]


@pytest.mark.parametrize("prepares", [False, True])
def test_the_job_wins(job, prepares):
    newest, checkpoint = trained_job(job)
    checkpoint[1]["param_groups"][0]["lr"] = 0.5
    with pytest.warns(UserWarning, match="goes on with its own state"):
        model, optimizer = as_a_framework(job, checkpoint, prepares, resume="job")
    assert largest_difference(model, newest) == 0
    assert optimizer.state_dict()["state"][0]["step"] == 6
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.param_groups[0]["lr"] = 0.01
    train(model, optimizer, range(6, 8))
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(8))
    assert largest_difference(model, whole) == 0
    # Only before the first step.
    with pytest.warns(UserWarning, match="8 steps and is put back to a state of 4"):
        optimizer.load_state_dict(checkpoint[1])
    assert optimizer.state_dict()["state"][0]["step"] == 4


@pytest.mark.parametrize("prepares", [False, True])
def test_a_load_is_refused(job, prepares):
    newest, checkpoint = trained_job(job)
    checkpoint[1]["param_groups"][0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"resume=\"error\".*optctl delete job"):
        as_a_framework(job, checkpoint, prepares, resume="error")
    model = small_model(seed=9)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, resume="error")
    with pytest.raises(RuntimeError, match="resume="):
        optimizer.load_state_dict(checkpoint[1])
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert largest_difference(model, newest) == 0
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(6, 8))
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(8))
    assert largest_difference(model, whole) == 0


@pytest.mark.parametrize("resume", ["checkpoint", "job", "error"])
def test_the_job_itself_is_no_checkpoint(job, resume):
    """Nothing is put back, refused or warned about with a checkpoint of the job's own step."""
    newest, _ = trained_job(job)
    model = small_model(seed=9)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, resume=resume)
    saved = copy.deepcopy(optimizer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Prepared(optimizer).load_state_dict(saved)
    assert largest_difference(model, newest) == 0


def test_a_model_that_is_loaded_later_wins(job):
    """Nothing that attaching replaced comes back, as the README says."""
    _, checkpoint = trained_job(job)
    model = small_model(seed=9)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    with torch.no_grad():
        model[3].bias.copy_(model[3].bias)  # frozen, say: equal to the job's
    kept = {**checkpoint[0], "3.bias": model[3].bias.detach().clone()}
    model.load_state_dict(kept)
    with pytest.warns(UserWarning, match="a state of 4, but none of the 6 parameters"):
        optimizer.load_state_dict(checkpoint[1])
    assert all(torch.equal(model.state_dict()[key], kept[key]) for key in kept)


def attached_anew(job, checkpoint, **options):
    """Returns what a framework has made in its order, up to the optimizer's construction."""
    model = small_model(seed=9)
    model.load_state_dict(checkpoint[0])
    optimizer = optstate.AdamW(model.named_parameters(), lr=0.01, job=job, **options)
    return model, optimizer


def named_job(job):
    """Does what trained_job() does, with names."""
    model = small_model()
    with optstate.AdamW(model.named_parameters(), lr=0.01, job=job) as optimizer:
        train(model, optimizer, range(4))
        checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, range(4, 6))
    return model, checkpoint


@pytest.mark.parametrize("written", [1, 6])
@pytest.mark.parametrize("extends", [False, True])
def test_writes_that_change_nothing_keep_nothing_from_coming_back(extends, written, job):
    _, checkpoint = named_job(job)
    model, optimizer = attached_anew(job, checkpoint)
    with torch.no_grad():
        for each in list(model.parameters())[:written]:
            each.clamp_(-100, 100)
    state = checkpoint[1]
    if extends:
        more = torch.nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [("more", more)]})
        state = {**state, "param_groups": optimizer.state_dict()["param_groups"]}
    with pytest.warns(UserWarning, match="with it 6 parameters that attaching to the job had repl"):
        optimizer.load_state_dict(state)
    assert all(torch.equal(model.state_dict()[key], checkpoint[0][key]) for key in checkpoint[0])


@pytest.mark.parametrize("extends", [False, True])
def test_a_parameter_that_was_changed_stays(extends, job):
    _, checkpoint = named_job(job)
    model, optimizer = attached_anew(job, checkpoint)
    with torch.no_grad():
        model[3].bias.fill_(0.5)
    state = checkpoint[1]
    if extends:
        more = torch.nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [("more", more)]})
        state = {**state, "param_groups": optimizer.state_dict()["param_groups"]}
    kept = {**checkpoint[0], "3.bias": torch.full((4,), 0.5)}
    but = "" if extends else ", but not 1 more, which were changed since"
    with pytest.warns(UserWarning, match=f"with it 5 parameters that .* had replaced{but}"):
        optimizer.load_state_dict(state)
    assert all(torch.equal(model.state_dict()[key], kept[key]) for key in kept)


@pytest.mark.parametrize("goes_on", ["uploads", "job", "extended"])
def test_what_nobody_can_tell_is_refused(goes_on, job):
    """Some parameters changed, some written with the values that they had."""
    newest, checkpoint = named_job(job)
    model, optimizer = attached_anew(job, checkpoint)
    state = checkpoint[1]

    def write(model):
        with torch.no_grad():
            model[0].weight.clamp_(-100, 100)
            model[3].bias.fill_(0.5)

    write(model)
    if goes_on == "extended":
        more = torch.nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [("more", more)]})
        state = {**state, "param_groups": optimizer.state_dict()["param_groups"]}
    before = copy.deepcopy(model)
    with pytest.raises(
        RuntimeError, match=r'parameters "0.weight" were written.*upload_parameters'
    ):
        optimizer.load_state_dict(state)
    assert largest_difference(model, before) == 0
    assert optimizer.state_dict()["state"][0]["step"] == 6
    if goes_on == "job":
        optimizer.close()
        model, optimizer = attached_anew(job, checkpoint, resume="job")
        write(model)
        with pytest.warns(UserWarning, match="goes on with its own state"):
            optimizer.load_state_dict(state)
        assert largest_difference(model, newest) == 0
        return
    optimizer.upload_parameters()
    with pytest.warns(UserWarning, match="a state of 4: a script"):
        optimizer.load_state_dict(state)
    assert largest_difference(model, before) == 0
    assert optimizer.state_dict()["state"][0]["step"] == 4


def test_nothing_comes_back_after_a_step(job):
    _, checkpoint = trained_job(job)
    model = small_model(seed=9)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    train(model, optimizer, range(6, 7))
    assert optimizer._served.replaced is None
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="a state of 4: a script"):
        optimizer.load_state_dict(checkpoint[1])
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)


def test_a_job_without_steps(job):
    """One that was killed before its first step: there is nothing to lose."""
    model = small_model(seed=1)
    optstate.AdamW(model.parameters(), lr=0.01, job=job).close()
    source = small_model()
    reference = torch.optim.AdamW(source.parameters(), lr=0.01)
    train(source, reference, range(4))
    checkpoint = copy.deepcopy((source.state_dict(), reference.state_dict()))
    again = small_model(seed=2)
    again.load_state_dict(checkpoint[0])
    optimizer = optstate.AdamW(again.parameters(), lr=0.01, job=job)
    with pytest.warns(UserWarning, match="put back .* with it 6 parameters"):
        optimizer.load_state_dict(checkpoint[1])
    assert largest_difference(again, source) == 0
    for each, net in ((optimizer, again), (reference, source)):
        train(net, each, range(4, 7))
    assert largest_difference(again, source) < 1e-5


def test_a_group_that_is_added_before_the_load(job):
    _, checkpoint = trained_job(job)
    model = small_model(seed=9)
    model.load_state_dict(checkpoint[0])
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    state = copy.deepcopy(optimizer.state_dict())
    state["state"] = checkpoint[1]["state"]
    with pytest.warns(UserWarning, match="with it 6 parameters"):
        optimizer.load_state_dict(state)
    assert all(torch.equal(model.state_dict()[key], checkpoint[0][key]) for key in checkpoint[0])


CLASSES = {
    "AdamW": (optstate.AdamW, {"lr": 0.01}),
    "NAdam": (optstate.NAdam, {"lr": 0.01}),
    "Adagrad": (optstate.Adagrad, {"lr": 0.01}),
    "SGD": (optstate.SGD, {"lr": 0.01, "momentum": 0.9}),
    "Lion": (optstate.Lion, {"lr": 0.001}),
    "bfloat16": (optstate.AdamW, {"lr": 0.01}),
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    "state", ["empty", "begins anew", "moments of 0", "of some", "rounded", "of another step"]
)
def test_parameters_come_back_only_with_another_step(state, name, job):
    """State that a script makes of the job's own is for the job's parameters."""
    cls, options = CLASSES[name]
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    model = small_model(dtype=dtype)
    with cls(model.named_parameters(), job=job, **options) as optimizer:
        train(model, optimizer, range(6))
    again = small_model(seed=9, dtype=dtype)
    optimizer = cls(again.named_parameters(), job=job, **options)
    saved = copy.deepcopy(optimizer.state_dict())
    entries = saved["state"]
    if state == "empty":
        entries.clear()
    elif state == "of some":
        del entries[0], entries[3]
    for index, entry in entries.items():
        for key, value in entry.items():
            if key == "step":
                if state == "begins anew":
                    value.zero_()
                elif state == "of another step":
                    value.sub_(1)
            elif key == "mu_product":
                if state == "begins anew":
                    value.fill_(1)
            elif key != "master_param":
                if state in ("begins anew", "moments of 0"):
                    value.zero_()
                elif state == "rounded" and index == 1:
                    value.mul_(0.5)
    came_back = state == "of another step"
    match = "with it 6 parameters" if came_back else "the 6 parameters .* are not put back"
    with pytest.warns(UserWarning, match=match):
        optimizer.load_state_dict(saved)
    expected = small_model(seed=9, dtype=dtype) if came_back else model
    assert largest_difference(again, expected) == 0
    if state != "of another step":
        shown = optimizer.state_dict()["state"]
        keys = ["exp_avg", "momentum_buffer", "sum"]
        for index, entry in entries.items():
            for key in [key for key in keys if key in entry and state != "begins anew"]:
                assert torch.equal(shown[index][key], entry[key])


def test_state_that_counts_no_steps_is_of_another_unless_it_is_empty(job):
    """Torch's SGD saves such state without counts."""
    model = small_model()
    make = {"lr": 0.01, "momentum": 0.9}
    with optstate.SGD(model.named_parameters(), job=job, **make) as optimizer:
        train(model, optimizer, range(6))
    source = small_model(seed=3)
    reference = torch.optim.SGD(source.named_parameters(), **make)
    fresh = copy.deepcopy(reference.state_dict())
    train(source, reference, range(4))
    for saved, match in ((fresh, "are not put back"), (reference.state_dict(), "with it 6")):
        again = small_model()
        again.load_state_dict(source.state_dict())
        optimizer = optstate.SGD(again.named_parameters(), job=job, **make)
        with pytest.warns(UserWarning, match=match):
            optimizer.load_state_dict(saved)
        assert largest_difference(again, model if saved is fresh else source) == 0
        optimizer.close()


def test_what_puts_nothing_back_is_not_refused_for_its_parameters(job):
    optstate.AdamW(small_model(seed=1).named_parameters(), lr=0.01, job=job).close()
    model = small_model(seed=2)
    optimizer = optstate.AdamW(model.named_parameters(), lr=0.01, job=job, resume="error")
    states = {
        index: {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(each),
            "exp_avg_sq": torch.zeros_like(each),
        }
        for index, each in enumerate(model.parameters())
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    assert largest_difference(model, small_model(seed=1)) == 0
    for entry in states.values():
        entry["step"].fill_(2)
    with pytest.raises(RuntimeError, match="replaced 6 parameters"):
        optimizer.load_state_dict({"state": states, "param_groups": groups})
    assert largest_difference(model, small_model(seed=1)) == 0


def test_an_unknown_choice():
    with pytest.raises(ValueError, match="Invalid resume: 'never'"):
        optstate.AdamW(small_model().parameters(), resume="never")


def _resume(connection, rank, endpoint, job, checkpoint, order, lone_load):
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    checkpoint = torch.load(io.BytesIO(checkpoint))
    model = small_model(seed=9 if not lone_load else rank)
    if not lone_load or rank == 0:
        model.load_state_dict(checkpoint[0])
    if order == "wrapped first":
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=endpoint)
    if order == "wrapped later":
        model = torch.nn.parallel.DistributedDataParallel(model)
    Prepared(optimizer).load_state_dict(checkpoint[1])
    train(model, optimizer, range(4, 8))
    dist.barrier()
    return [parameter.detach().tolist() for parameter in model.parameters()]


def _resume_edited(connection, rank, endpoint, job, checkpoint, writes_alike):
    checkpoint = torch.load(io.BytesIO(checkpoint))
    model = small_model(seed=9)
    model.load_state_dict(checkpoint[0])
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=endpoint)
    with torch.no_grad():
        model[3].bias.fill_(0.5)
        if writes_alike:
            torch.nn.parallel.DistributedDataParallel(model)
        elif rank == 1:
            model[0].weight.clamp_(-100, 100)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            optimizer.load_state_dict(checkpoint[1])
        except RuntimeError as error:
            return str(error)
    return " ".join(str(each.message) for each in heard)


@pytest.mark.parametrize("writes_alike", [True, False])
def test_parameters_that_were_changed_on_ranks(daemon, job, writes_alike):
    """Beside a wrapper that writes all, a change cannot be told from a load of the model."""
    checkpoint = run(rank_job, 2, daemon.shm, job)[0]
    said = run(_resume_edited, 2, daemon.shm, job, checkpoint, writes_alike)
    if writes_alike:
        assert "but none of the 6 parameters" in said[0]
    else:
        assert all("nobody can tell" in each for each in said)


def rank_job(connection, rank, endpoint, job):
    _, checkpoint = trained_job(job, endpoint=endpoint)
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.getvalue()


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
@pytest.mark.parametrize("order", ["wrapped first", "wrapped later"])
def test_on_ranks(daemon, job, wire, order):
    endpoint = getattr(daemon, wire)
    checkpoint = run(rank_job, 2, endpoint, job)[0]
    expected = [
        each.tolist()
        for each in follow(torch.load(io.BytesIO(checkpoint)), range(4, 8)).parameters()
    ]
    for values in run(_resume, 2, endpoint, job, checkpoint, order, False):
        for value, other in zip(values, expected):
            assert torch.allclose(torch.tensor(value), torch.tensor(other), atol=1e-6)


def test_ranks_that_had_other_parameters_are_refused(daemon, job):
    checkpoint = run(rank_job, 2, daemon.shm, job)[0]
    with pytest.raises(RankFailed, match="but ranks had other ones"):
        run(_resume, 2, daemon.shm, job, checkpoint, "unwrapped", True)


def _one_loads_after_attaching(connection, rank, job, endpoint):
    model = small_model()
    optimizer = optstate.AdamW(model.named_parameters(), lr=0.01, job=job, endpoint=endpoint)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    present = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    model = small_model(seed=3)
    optimizer = optstate.AdamW(
        model.named_parameters(), lr=0.01, job=job, endpoint=endpoint, step_timeout=600
    )
    try:
        optimizer.load_state_dict(saved if rank == 0 else present)
        train(model, optimizer, range(4, 5))
    except Exception as error:  # rank 0's is torch.distributed's, when the other has gone
        return type(error).__name__, str(error)
    return None


def test_a_rank_whose_checkpoint_is_the_job_is_told_of_the_other_ones_load(job, daemon):
    first, second = run(_one_loads_after_attaching, 2, job, daemon.shm)
    assert first is not None
    assert second[0] == "FailedPreconditionError"
    assert "rank 0 has begun a load" in second[1]
