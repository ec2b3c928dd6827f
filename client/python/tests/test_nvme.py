"""State on disk: the same training as in memory, and steps that survive a loss of power."""

from __future__ import annotations

import os
import shutil
import signal

import optstate
import pytest
import torch
from daemon import start_daemon_with_disks
from optstate.optimizers import ServedOptimizer

# Few frames of small sub-groups, so that most records are swapped in each step.
SWAPPED = {"placement": "nvme", "sub_group_size": 4096}


@pytest.fixture
def disk_daemon(tmp_path):
    running = start_daemon_with_disks(tmp_path, "disk")
    yield running
    running.stop()


def model_of(dtype=torch.float32, width=256, further_layers=0):
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width),
        torch.nn.Tanh(),
        *(torch.nn.Linear(width, width) for _ in range(further_layers)),
        torch.nn.Linear(width, 100),
        torch.nn.LayerNorm(100),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.to(dtype)


def train(model, optimizer, steps):
    dtype = next(model.parameters()).dtype
    for step in steps:
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()


def same(ours, others):
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), others.parameters()))


def lose_power(daemon, job):
    """Kills the job's engine and the daemon, and removes all that they had in memory."""
    engine = int(daemon.optctl("describe", "job", job)["engine_pid"])
    daemon.kill()
    os.kill(engine, signal.SIGKILL)
    shutil.rmtree(daemon.directory / "state")
    daemon.start()


# Every optimizer, and each format of state and masters.
TRAINED = [
    ("AdamW", {}, torch.float32),
    ("AdamW", {"max_norm": 0.1}, torch.bfloat16),
    ("AdamW", {"master": "split", "state_dtype": "dynamic8"}, torch.bfloat16),
    ("Adam", {"amsgrad": True, "state_dtype": torch.bfloat16}, torch.float16),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.float32),
    ("SGD", {"lr": 0.1}, torch.float32),
    ("Adafactor", {}, torch.float32),
    ("LAMB", {}, torch.float32),
    ("NAdam", {}, torch.float32),
    ("RAdam", {"state_dtype": torch.bfloat16}, torch.float32),
    ("Adagrad", {}, torch.bfloat16),
    ("RMSprop", {"momentum": 0.9, "centered": True}, torch.float32),
    ("Lion", {"state_dtype": "dynamic8"}, torch.bfloat16),
    ("Muon", {}, torch.float32),
]


def test_every_optimizer_is_trained_on_disk():
    served = {each.__name__ for each in ServedOptimizer.__subclasses__()}
    assert {kind for kind, _, _ in TRAINED} == served


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
@pytest.mark.parametrize("kind, options, dtype", TRAINED)
def test_records_on_disk_change_no_bit(kind, options, dtype, wire, disk_daemon, job):
    # Muon takes matrices alone, and updates each whole: three more make records to swap.
    further_layers = 3 if kind == "Muon" else 0
    models = [model_of(dtype, further_layers=further_layers) for _ in range(2)]
    make = getattr(optstate, kind)
    for number, (model, where) in enumerate(zip(models, ({}, SWAPPED))):
        endpoint = getattr(disk_daemon, wire)
        name = f"{job}-{number}"
        trained = [each for each in model.parameters() if kind != "Muon" or each.ndim == 2]
        with make(trained, job=name, endpoint=endpoint, **options, **where) as optimizer:
            train(model, optimizer, range(5))
    assert same(*models)
    disk = disk_daemon.optctl("describe", "job", name)["disk"]
    assert int(disk["records"]) > int(disk["frames"])
    assert int(disk["bytes_read"]) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("durability, kept", [("step", 0), ("every 2", 1)])
@pytest.mark.parametrize("where", [SWAPPED, {"placement": "host"}, {}])
def test_a_loss_of_power_leaves_a_durable_step(durability, kept, where, dtype, disk_daemon, job):
    expected = model_of(dtype)
    with optstate.AdamW(expected.parameters(), endpoint=disk_daemon.shm) as optimizer:
        train(expected, optimizer, range(12))
    options = {**where, "durability": durability, "job": job, "endpoint": disk_daemon.shm}
    for end in (5, 9):
        model = model_of(dtype)
        optimizer = optstate.AdamW(model.parameters(), **options)
        train(model, optimizer, range(optimizer.committed_step, end))
        outcome = optimizer.last_outcome
        if kept == 0:
            assert outcome.durable_step == outcome.step
        lose_power(disk_daemon, job)
        # The optimizer's own process would attach again: it loses power too.
        optimizer._served.attachment.session.close()
        again = model_of(dtype)
        with optstate.AdamW(again.parameters(), job=job, endpoint=disk_daemon.shm) as attached:
            assert end - 1 - kept <= attached.committed_step <= end
            if kept == 0:
                assert attached.committed_step == end
            assert attached.committed_step >= outcome.durable_step
    model = model_of(dtype)
    with optstate.AdamW(model.parameters(), **options) as optimizer:
        train(model, optimizer, range(optimizer.committed_step, 12))
    assert same(model, expected)


def test_an_engine_killed_while_it_swaps_is_a_delay(disk_daemon, job):
    expected, model = model_of(), model_of()
    with optstate.AdamW(expected.parameters(), endpoint=disk_daemon.shm) as optimizer:
        train(expected, optimizer, range(20))
    options = {**SWAPPED, "durability": "every 3", "job": job, "endpoint": disk_daemon.shm}
    with optstate.AdamW(model.parameters(), **options) as optimizer:
        for step in range(20):
            train(model, optimizer, [step])
            if step % 4 == 1:
                os.kill(int(disk_daemon.optctl("describe", "job", job)["engine_pid"]), 9)
    assert same(model, expected)


@pytest.mark.parametrize("durability", [None, "step"])
@pytest.mark.parametrize("where", [SWAPPED, {"placement": "host"}])
@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_a_param_group_is_added_on_disk(where, durability, wire, disk_daemon, job):
    models = [model_of(), model_of()]
    for number, (model, storage) in enumerate(
        zip(models, ({}, {**where, "durability": durability}))
    ):
        # The head is added later; its records, of another dtype, are of another size.
        head = torch.nn.Parameter(torch.full((300, 20), 0.5, dtype=torch.bfloat16))
        options = {"job": f"{job}-{number}", "endpoint": getattr(disk_daemon, wire), **storage}
        with optstate.AdamW(model.parameters(), **options) as optimizer:
            train(model, optimizer, range(3))
            optimizer.add_param_group({"params": [head], "lr": 0.01})
            for step in range(3, 6):
                head.grad = torch.full_like(head, 0.25 * step)
                train(model, optimizer, [step])
        model.head = head
    assert same(*models)
    if durability is None:
        return
    # All of it is durable, the group that was added too.
    lose_power(disk_daemon, f"{job}-1")
    again = model_of()
    again.head = torch.nn.Parameter(torch.zeros_like(models[1].head))
    groups = [{"params": list(again.parameters())[1:]}, {"params": [again.head], "lr": 0.01}]
    with optstate.AdamW(groups, job=f"{job}-1", endpoint=disk_daemon.shm) as optimizer:
        assert optimizer.committed_step == 6
        assert same(again, models[0])


def test_directories_get_other_weights_while_a_job_trains(tmp_path, job):
    daemon = start_daemon_with_disks(tmp_path, "one", "two")
    try:
        expected, model = model_of(), model_of()
        with optstate.AdamW(expected.parameters(), endpoint=daemon.shm) as optimizer:
            train(expected, optimizer, range(8))
        options = {**SWAPPED, "durability": "step", "job": job, "endpoint": daemon.shm}
        with optstate.AdamW(model.parameters(), **options) as optimizer:
            for number, weights in enumerate(("3,1", "0,1", "1,0", "1,1")):
                train(model, optimizer, range(2 * number, 2 * number + 1))
                reply = daemon.optctl("set", "job", job, f"directory_weights={weights}")
                assert int(reply["moved_bytes"]) > 0
                assert (tmp_path / "two" / "jobs" / job).exists() == (weights != "1,0")
                train(model, optimizer, range(2 * number + 1, 2 * number + 2))
        assert same(model, expected)
        lose_power(daemon, job)
        again = model_of()
        with optstate.AdamW(again.parameters(), job=job, endpoint=daemon.shm) as optimizer:
            assert optimizer.committed_step == 8
            assert same(again, expected)
    finally:
        daemon.stop()


def test_an_orderly_end_makes_the_last_step_durable(disk_daemon, job):
    model = model_of()
    options = {**SWAPPED, "durability": "every 1000", "job": job, "endpoint": disk_daemon.shm}
    with optstate.AdamW(model.parameters(), **options) as optimizer:
        train(model, optimizer, range(3))
    disk_daemon.stop_gently()
    shutil.rmtree(disk_daemon.directory / "state")
    disk_daemon.start()
    again = model_of()
    with optstate.AdamW(again.parameters(), job=job, endpoint=disk_daemon.shm) as optimizer:
        assert optimizer.committed_step == 3
    assert same(again, model)


def test_a_deleted_job_leaves_nothing_on_disk(disk_daemon, job, tmp_path):
    model = model_of()
    options = {**SWAPPED, "durability": "step", "endpoint": disk_daemon.shm}
    with optstate.AdamW(model.parameters(), job=job, **options) as optimizer:
        train(model, optimizer, range(2))
    assert (tmp_path / "disk/jobs" / job / "records").stat().st_size > 0
    disk_daemon.run_optctl("delete", "job", job, "--force")
    assert not (tmp_path / "disk/jobs" / job).exists()
    with optstate.AdamW(model_of().parameters(), job=job, **options) as optimizer:
        assert optimizer.committed_step == 0


def test_optctl_says_what_is_on_disk(disk_daemon, job, tmp_path):
    options = {**SWAPPED, "durability": "step", "job": job, "endpoint": disk_daemon.shm}
    model = model_of()
    with optstate.AdamW(model.parameters(), **options) as optimizer:
        train(model, optimizer, range(4))
    described = disk_daemon.optctl("describe", "job", job)
    disk = described["disk"]
    assert int(disk["durable_step"]) == 4
    assert disk["directories"] == [str(tmp_path / "disk/jobs" / job)]
    assert int(disk["records"]) > int(disk["frames"]) == 3
    assert int(disk["bytes_read"]) > 0 and int(disk["bytes_written"]) > 0
    text = disk_daemon.run_optctl("describe", "job", job)
    assert "durability" in text and "each step" in text


def test_a_daemon_without_a_disk_says_what_to_do(job):
    with pytest.raises(optstate.FailedPreconditionError, match="--nvme-dir DIR"):
        optstate.AdamW(model_of().parameters(), job=job, placement="nvme")


def test_a_job_stays_where_it_is(disk_daemon, job):
    options = {"job": job, "endpoint": disk_daemon.shm}
    model = model_of()
    with optstate.AdamW(model.parameters(), **options, **SWAPPED) as optimizer:
        train(model, optimizer, range(1))
    for wrong in ({"placement": "host"}, {"durability": "step"}, {"sub_group_size": 8192}):
        with pytest.raises(optstate.FailedPreconditionError, match="leave it out"):
            optstate.AdamW(model_of().parameters(), **options, **wrong)
    with optstate.AdamW(model_of().parameters(), **options) as optimizer:
        assert optimizer.committed_step == 1


def placement_of(daemon, job):
    return daemon.optctl("describe", "job", job)["storage"]["placement"]


@pytest.mark.parametrize("durability", [None, "step"])
def test_auto_takes_memory_or_the_disk_and_keeps_the_durability(tmp_path, durability, job):
    options = {"placement": "auto", "durability": durability, "sub_group_size": 4096}
    models = []
    for limit, placement in ((0, "PLACEMENT_HOST"), (480_000, "PLACEMENT_NVME")):
        folder = tmp_path / placement
        folder.mkdir()
        daemon = start_daemon_with_disks(folder, "disk", job_state_bytes_max=limit)
        try:
            model = model_of()
            with optstate.AdamW(
                model.parameters(), job=job, endpoint=daemon.shm, **options
            ) as optimizer:
                train(model, optimizer, range(3))
                assert placement_of(daemon, job) == placement
                if durability:
                    assert optimizer.last_outcome.durable_step == 3
            reason = daemon.optctl("describe", "job", job)["storage"]["placement_reason"]
            assert reason.startswith("auto: "), reason
            models.append(model)
        finally:
            daemon.stop()
    assert same(*models)


def test_a_budget_for_less_than_three_records_names_the_least(disk_daemon, job):
    options = {**SWAPPED, "host_budget": 1, "job": job, "endpoint": disk_daemon.shm}
    with pytest.raises(ValueError, match="set at least 98304"):
        optstate.AdamW(model_of().parameters(), **options)
    options["host_budget"] = 98304
    optstate.AdamW(model_of().parameters(), **options).close()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"placement": "disk"}, "placement"),
        ({"host_budget": "64 MB"}, "host_budget"),
        ({"host_budget": 0}, "host_budget"),
        ({"durability": "every"}, "durability"),
        ({"durability": "every 0"}, "durability"),
        ({"durability": "sometimes"}, "durability"),
        ({"sub_group_size": 5000}, "sub_group_size"),
    ],
)
def test_wrong_values(options, text, job):
    with pytest.raises(ValueError, match=text):
        optstate.AdamW(model_of().parameters(), job=job, **options)


def test_durability_needs_a_disk(job):
    with pytest.raises(optstate.FailedPreconditionError, match="--nvme-dir DIR"):
        optstate.AdamW(model_of().parameters(), job=job, durability="step")


def test_a_disk_that_is_not_mounted_makes_no_new_job(tmp_path, job):
    first = tmp_path / "first"
    daemon = start_daemon_with_disks(tmp_path, "first", "second")
    try:
        options = {**SWAPPED, "durability": "step", "job": job, "endpoint": daemon.shm}
        model = model_of()
        with optstate.AdamW(model.parameters(), **options) as optimizer:
            train(model, optimizer, range(2))
        daemon.stop_gently()
        shutil.rmtree(daemon.directory / "state")
        first.rename(tmp_path / "elsewhere")
        first.mkdir(mode=0o700)  # the mount point
        daemon.start()
        with pytest.raises(optstate.OptstateError, match="is its disk mounted"):
            optstate.AdamW(model_of().parameters(), connect_timeout=30, **options)
        daemon.stop_gently()
        shutil.rmtree(first)
        shutil.rmtree(daemon.directory / "state")
        (tmp_path / "elsewhere").rename(first)
        daemon.start()
        again = model_of()
        with optstate.AdamW(again.parameters(), **options) as optimizer:
            assert optimizer.committed_step == 2
        assert same(again, model)
    finally:
        daemon.stop()


def test_a_state_of_eight_budgets_trains_as_in_memory(disk_daemon, job):
    """Over 200 steps, and as torch's own AdamW does."""
    steps, sub_group_elements = 200, 4096
    models = [model_of(torch.float32, width=4096) for _ in range(3)]
    state_bytes = 8 * sum(parameter.numel() for parameter in models[0].parameters())
    assert state_bytes > 8 * 3 * 8 * sub_group_elements
    budget = state_bytes // 8
    where = {"placement": "nvme", "host_budget": budget, "sub_group_size": sub_group_elements}
    endpoint = disk_daemon.shm
    with (
        optstate.AdamW(models[0].parameters(), endpoint=endpoint) as in_memory,
        optstate.AdamW(models[1].parameters(), job=job, endpoint=endpoint, **where) as swapped,
    ):
        theirs = torch.optim.AdamW(models[2].parameters())
        for model, optimizer in zip(models, (in_memory, swapped, theirs)):
            train(model, optimizer, range(steps))
        disk = disk_daemon.optctl("describe", "job", job)["disk"]
        assert int(disk["frames"]) * int(disk["frame_bytes"]) <= budget
        assert int(disk["bytes_read"]) > steps * state_bytes // 2
    assert same(models[0], models[1])
    for ours, others in zip(models[1].parameters(), models[2].parameters()):
        torch.testing.assert_close(ours, others, rtol=2e-4, atol=2e-6)
