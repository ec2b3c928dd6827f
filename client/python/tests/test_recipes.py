"""Does what client/python/README.md says a script can do."""

from __future__ import annotations

import warnings

import optstate
import pytest
import torch
from daemon import Daemon
from ranks import running, say
from torch.optim import lr_scheduler
from training import bits, largest_difference, small_model, train

STEPS = 30
SAVED_AT, CRASHED_AT = 5, 13

SCHEDULERS = {
    "cosine": lambda optimizer, **kwargs: lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=STEPS, **kwargs
    ),
    "lambda": lambda optimizer, **kwargs: lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * 0.99**step, **kwargs
    ),
    "one_cycle": lambda optimizer, **kwargs: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.02, total_steps=STEPS + 1, **kwargs
    ),
}


def scheduled(model, job, resume, end, rates, save=None):
    """One run of a script, to `end`."""
    with optstate.AdamW(model.parameters(), lr=0.01, job=job, model=model) as optimizer:
        scheduler = resume(optimizer)
        for step in range(optimizer.committed_step, end):
            rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
            train(model, optimizer, [step], scheduler)
            if save is not None and step + 1 == SAVED_AT:
                save.update(scheduler.state_dict())


def crashed_and_resumed(name, resume, job, save=None):
    """Rates and parameters of a run that was cut in two, and of a whole one."""
    whole, rates = small_model(), []
    scheduled(whole, None, SCHEDULERS[name], STEPS, rates)
    found: list = []
    scheduled(small_model(), job, SCHEDULERS[name], CRASHED_AT, found, save)
    model = small_model(seed=5)
    scheduled(model, job, resume, STEPS, found)
    return found == rates and bits(model.parameters()) == bits(whole.parameters())


def advanced(scheduler, steps):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        for _ in range(steps):
            scheduler.step()
    return scheduler


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_a_scheduler_is_counted_to_where_the_job_is(name, job):
    def resume(optimizer):
        return advanced(SCHEDULERS[name](optimizer), optimizer.committed_step)

    assert crashed_and_resumed(name, resume, job)


@pytest.mark.parametrize("name, is_right", [("lambda", True), ("cosine", False)])
def test_a_scheduler_is_constructed_where_the_job_is(name, is_right, job):
    def resume(optimizer):
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return SCHEDULERS[name](optimizer, last_epoch=optimizer.committed_step - 1)

    assert crashed_and_resumed(name, resume, job) == is_right


@pytest.mark.parametrize("name", ["cosine", "lambda"])
def test_a_scheduler_is_loaded_and_counted_to_where_the_job_is(name, job):
    saved: dict = {}

    def resume(optimizer):
        scheduler = SCHEDULERS[name](optimizer)
        scheduler.load_state_dict(saved)
        for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr()):
            group["lr"] = lr
        return advanced(scheduler, optimizer.committed_step - scheduler.last_epoch)

    assert crashed_and_resumed(name, resume, job, saved)


def test_buffers_and_others_parameters_are_not_kept(job):
    def make():
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))

    model = make()
    with optstate.SGD(model[0].parameters(), lr=0.1, job=job) as optimizer:
        with torch.no_grad():
            model[1].weight.fill_(3)
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    again = make()
    optstate.SGD(again[0].parameters(), lr=0.1, job=job).close()
    assert bits(again[0].parameters()) == bits(model[0].parameters())
    assert (again[1].weight == 1).all()
    assert (again[1].running_mean == 0).all() and (model[1].running_mean != 0).any()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_a_job_beside_a_checkpoint(name, job, tmp_path):
    """A first job until the node's memory is lost; then one from its checkpoint, twice."""
    checkpoint = tmp_path / "checkpoint.pt"

    def chosen(model):
        return [each for each in model.named_parameters() if each[1].ndim == 2 or name != "Muon"]

    def script(job, end):
        model = small_model()
        with getattr(optstate, name)(chosen(model), lr=0.01, job=job) as optimizer:
            if optimizer.committed_step == 0 and checkpoint.exists():
                saved = torch.load(checkpoint)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                assert optimizer.committed_step == 0
            parameter = next(iter(model.parameters()))
            first = int(optimizer.fetch_state(parameter).get("step", 0))
            for group in optimizer.param_groups:
                group["lr"] = group.get("initial_lr", group["lr"])
            scheduler = advanced(SCHEDULERS["cosine"](optimizer), first)
            for step in range(first, end):
                train(model, optimizer, [step], scheduler)
                if step + 1 == SAVED_AT:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, checkpoint)
            return model, first, optimizer.committed_step

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert script(f"{job}-lost", CRASHED_AT)[1:] == (0, CRASHED_AT)
        assert script(job, CRASHED_AT)[1:] == (SAVED_AT, CRASHED_AT - SAVED_AT)
        model, first, committed = script(job, STEPS)
    assert (first, committed) == (CRASHED_AT, STEPS - SAVED_AT)
    whole = small_model()
    optimizer = getattr(optstate, name)(chosen(whole), lr=0.01)
    train(whole, optimizer, range(STEPS), SCHEDULERS["cosine"](optimizer))
    assert largest_difference(model, whole) == 0


def _until_a_rank_is_lost(connection, rank, job, endpoint):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=endpoint)
    first = optimizer.committed_step
    train(model, optimizer, range(first, 4))
    say(connection, optimizer.committed_step)
    if rank == 1 and first == 0:
        connection.recv()  # the test kills it here
    try:
        train(model, optimizer, range(4, 6))
    except optstate.AbortedError as error:
        return str(error)
    return [each.detach().numpy() for each in model.parameters()]


def test_survivors_of_a_lost_rank_hear_of_it_and_all_start_again(job, tmp_path):
    config = tmp_path / "optstated.yaml"
    config.write_text("engine:\n  on_rank_loss: abort\n")
    daemon = Daemon("--config", str(config))
    try:
        with running(_until_a_rank_is_lost, 2, job, daemon.shm) as trained:
            assert [trained.hear(rank) for rank in (0, 1)] == [4, 4]
            trained.kill(1)
            assert "rank 1 lost" in trained._receive(0, "result")
        with running(_until_a_rank_is_lost, 2, job, daemon.shm) as trained:
            assert [trained.hear(rank) for rank in (0, 1)] == [4, 4]
            results = trained.results()
    finally:
        daemon.stop()
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(6))
    for result in results:
        for found, expected in zip(result, whole.parameters()):
            assert torch.equal(torch.from_numpy(found), expected)


def test_what_is_refused():
    def parameter():
        return torch.nn.Parameter(torch.ones(2))

    with pytest.raises(optstate.InvalidArgumentError, match="no parameters"):
        optstate.AdamW([{"params": []}])
    with pytest.raises(TypeError, match="run the lazy module once before"):
        optstate.AdamW(torch.nn.LazyLinear(3).parameters())
    groups = [
        {"params": [parameter()], "decoupled_weight_decay": True},
        {"params": [parameter()]},
    ]
    with pytest.raises(ValueError, match="decoupled_weight_decay must be the same"):
        optstate.Adam(groups)


def test_frozen_parameters_take_no_room(job, daemon):
    def elements(name, chosen):
        with optstate.AdamW(chosen, job=name):
            return int(daemon.optctl("describe", "job", name)["element_count"])

    model = small_model()
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert elements(f"{job}-all", model.parameters()) == sum(p.numel() for p in trained)
    assert elements(job, trained) == sum(p.numel() for p in trained)
    optimizer = optstate.AdamW(trained, lr=0.01)
    train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    before = bits(model[0].parameters())
    train(model, optimizer, range(2, 4))
    assert bits(model[0].parameters()) != before


@pytest.mark.parametrize("detect_changes", ["exact", "off"])
def test_changes_through_data_of_copies(detect_changes, job):
    model = small_model()
    optimizer = optstate.SGD(
        model.parameters(),
        lr=0.1,
        job=job,
        parameters_as_views=False,
        detect_changes=detect_changes,
    )
    values = torch.full_like(model[0].bias, 7)
    model[0].bias.data.copy_(values)
    if detect_changes == "off":
        optimizer.step()
        assert not torch.equal(model[0].bias, values)
        model[0].bias.data.copy_(values)
        optimizer.upload_parameters()
        optimizer.step()
    else:
        with pytest.warns(UserWarning, match="was changed without a trace"):
            optimizer.step()
    assert torch.equal(model[0].bias, values)
