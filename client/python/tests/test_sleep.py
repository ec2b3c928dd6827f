"""offload_states() and reload_states(): a job's memory is given back while it is not needed."""

from __future__ import annotations

import contextlib
import gc
import pathlib

import optstate
import pytest
import ranks
import torch
from ranks import say
from sleeping import phase
from training import (
    assert_values,
    bits,
    gradients,
    largest_difference,
    loss_of,
    parameters_of,
    set_gradients,
    small_model,
    train,
    values_of,
)

KINDS = {
    "adamw": (optstate.AdamW, torch.float32, {"lr": 0.01}),
    "adamw-bf16": (optstate.AdamW, torch.bfloat16, {"lr": 0.01}),
    "adamw-split": (optstate.AdamW, torch.bfloat16, {"lr": 0.01, "master": "split"}),
    "sgd": (optstate.SGD, torch.float32, {"lr": 0.05, "momentum": 0.9}),
}


def _state_bits(optimizer):
    entries = optimizer.state_dict()["state"].values()
    return [bits([torch.as_tensor(value) for value in entry.values()]) for entry in entries]


def _allocated(directory):
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def _maps(directory):
    return [line for line in open("/proc/self/maps") if f"{directory}/" in line]


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_bit_for_bit(kind, wire, sleep_daemon, job):
    make, dtype, options = KINDS[kind]
    whole = small_model(dtype=dtype)
    expected = make(whole.parameters(), **options)
    train(whole, expected, range(8))
    model = small_model(dtype=dtype)
    endpoint = getattr(sleep_daemon, wire)
    optimizer = make(model.parameters(), **options, job=job, endpoint=endpoint)
    for steps in (range(3), range(3, 6), range(6, 8)):
        train(model, optimizer, steps)
        before = bits(list(model.parameters()))
        offloaded = optimizer.offload_states()
        assert offloaded.directory.endswith(f"/asleep/jobs/{job}")
        assert phase(sleep_daemon, job) == "JOB_PHASE_ASLEEP"
        assert bits(list(model.parameters())) == before
        assert optimizer.committed_step == steps.stop and optimizer.job == job
        optimizer.reload_states()
        assert phase(sleep_daemon, job) == "JOB_PHASE_READY"
        assert bits(list(model.parameters())) == before
        assert optimizer.committed_step == steps.stop
    assert bits(list(model.parameters())) == bits(list(whole.parameters()))
    assert _state_bits(optimizer) == _state_bits(expected)


def test_the_memory_is_given_back(sleep_daemon, job):
    model = torch.nn.Linear(1024, 1024)
    optimizer = optstate.AdamW(model.parameters(), job=job, endpoint=sleep_daemon.shm)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    state = sleep_daemon.directory / "state"
    folder = state / "jobs" / job
    before = _allocated(folder)
    assert before > 3 * 4 * (1 << 20)  # parameters and two moments
    assert _maps(state)  # the parameters are views
    address = model.weight.data_ptr()
    held = model.weight.detach()  # what else has the memory keeps it
    offloaded = optimizer.offload_states()
    assert _allocated(folder) <= 0.05 * before
    # A mapping would keep the memory of a file that is removed.
    assert not _maps(state)
    assert offloaded.memory_bytes >= 0.95 * before
    sleep = sleep_daemon.optctl("describe", "job", job)["sleep"]
    assert int(sleep["memory_bytes"]) == offloaded.memory_bytes
    assert sleep["directory"] == offloaded.directory
    assert model.weight.data_ptr() == address == held.data_ptr()
    with torch.no_grad():
        model.weight[0, 0] = 7
    assert held[0, 0] == 7
    del held
    optimizer.reload_states()
    assert _maps(state)
    optimizer.close()


def test_what_needs_the_job_says_what_to_do(sleep_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(), lr=0.01, job=job, endpoint=sleep_daemon.shm, accumulate=True
    )
    train(model, optimizer, range(2))
    kept = optimizer.state_dict()
    optimizer.reload_states()  # it is awake
    entries = optimizer.state
    offloaded = optimizer.offload_states(include=["optim_states", "hp_params"], to="nvme")
    assert optimizer.offload_states() == offloaded
    weight = model[0].weight

    def assigns_state():
        optimizer.state = {}

    for use in (
        optimizer.step,
        optimizer.accumulate_step,
        optimizer.abort_step,
        optimizer.state_dict,
        optimizer.upload_parameters,
        optimizer.gradient_norms,
        optimizer.memory,
        optimizer.attach,
        optimizer.__getstate__,
        assigns_state,
        lambda: optimizer.load_state_dict(kept),
        lambda: optimizer.fetch_state(weight),
        lambda: optimizer.scale(torch.ones(())),
        lambda: optimizer.state[weight],
        lambda: list(entries),
        lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]}),
    ):
        with pytest.raises(optstate.FailedPreconditionError, match=r"asleep.*reload_states\(\)"):
            use()
    assert len(optimizer.param_groups) == 1
    assert "reload_states()" in repr(optimizer)
    loss_of(model, 2).backward()
    optimizer.zero_grad()
    assert weight.grad is None
    optimizer.param_groups[0]["lr"] = 0.02
    optimizer.reload_states()
    optimizer.reload_states()
    train(model, optimizer, range(2, 4))
    whole = small_model()
    expected = optstate.AdamW(whole.parameters(), lr=0.01)
    train(whole, expected, range(2))
    expected.param_groups[0]["lr"] = 0.02
    train(whole, expected, range(2, 4))
    assert largest_difference(model, whole) == 0


def test_what_cannot_be_offloaded_is_refused_and_nothing_happens(sleep_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job, endpoint=sleep_daemon.shm)
    for include, said in (
        (["lp_params"], "stay in this process"),
        (["optim_states", "lp_grads"], "zero_grad"),
        (["weights"], "Invalid include: 'weights'"),
        ([], "include is empty"),
    ):
        with pytest.raises(optstate.InvalidArgumentError, match=said):
            optimizer.offload_states(include=include)
    with pytest.raises(optstate.InvalidArgumentError, match="in host memory already"):
        optimizer.offload_states(to="cpu")
    with pytest.raises(optstate.InvalidArgumentError, match="sleep_directory"):
        optimizer.offload_states(to="/tmp")
    with pytest.raises(ValueError, match="Invalid timeout"):
        optimizer.offload_states(timeout=0)
    train(model, optimizer, range(1))
    assert optimizer.committed_step == 1
    with pytest.raises(optstate.FailedPreconditionError, match="Say job=NAME"):
        optstate.AdamW(small_model().parameters(), endpoint=sleep_daemon.shm).offload_states()
    own = optstate.AdamW(small_model().parameters(), job=job, endpoint="embedded")
    with pytest.raises(optstate.FailedPreconditionError, match="private daemon"):
        own.offload_states()
    own.close()


def test_a_step_that_is_open_is_finished_or_aborted_before(sleep_daemon, job):
    model, whole = small_model(), small_model()
    expected = optstate.AdamW(whole.parameters(), lr=0.01)
    train(whole, expected, range(2))
    optimizer = optstate.AdamW(
        model.parameters(), lr=0.01, job=f"{job}-early", endpoint=sleep_daemon.shm, overlap=True
    )
    train(model, optimizer, range(1))
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    with pytest.raises(optstate.FailedPreconditionError, match="gradients of step 2"):
        optimizer.offload_states()
    optimizer.abort_step()
    optimizer.offload_states()
    optimizer.reload_states()
    optimizer.step()  # with what is in .grad
    assert largest_difference(model, whole) == 0

    model = small_model()
    optimizer = optstate.AdamW(
        model.parameters(), job=f"{job}-sums", endpoint=sleep_daemon.shm, accumulate=True
    )
    loss_of(model, 0).backward()
    optimizer.accumulate_step()
    with pytest.raises(optstate.FailedPreconditionError, match="gradients of step 1"):
        optimizer.offload_states()
    optimizer.step()
    assert optimizer.committed_step == 1
    optimizer.offload_states()
    optimizer.reload_states()


def test_a_daemon_without_a_directory_leaves_the_job_awake(daemon, job):
    model, whole = small_model(), small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(4))
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    train(model, optimizer, range(2))
    with pytest.raises(optstate.FailedPreconditionError, match="sleep_directory"):
        optimizer.offload_states()
    train(model, optimizer, range(2, 4))  # it has attached again
    assert largest_difference(model, whole) == 0
    assert phase(daemon, job) == "JOB_PHASE_READY"


def _changed(model):
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        model[3].bias.data.add_(1)


def test_changes_are_sent_before_and_afterwards(sleep_daemon, job):
    shapes = [[7, 9], [5], []]
    given = list(gradients(shapes, seed=4, steps=3))
    found = []
    for sleeps in (False, True):
        model = small_model()
        tensors = [*model.parameters(), *parameters_of(shapes, 3, torch.float32)]
        options = {"job": job, "endpoint": sleep_daemon.shm} if sleeps else {}
        optimizer = optstate.AdamW(tensors, lr=0.01, **options)
        for gradient in given:
            optimizer.zero_grad()
            set_gradients(tensors[-3:], gradient)
            if sleeps:
                _changed(model)
                optimizer.offload_states()
                _changed(model)
                loss_of(model, 1).backward()  # gradients of a sleeping job count
                optimizer.reload_states()
            else:
                _changed(model)
                _changed(model)
                loss_of(model, 1).backward()
            optimizer.step()
        found.append((bits(tensors), _state_bits(optimizer)))
        optimizer.close()
    assert found[0] == found[1]


def test_state_that_was_written_before(sleep_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=sleep_daemon.shm)
    train(model, optimizer, range(2))
    weight = model[0].weight
    optimizer.state[weight]["exp_avg"] = torch.full_like(weight, 0.25)
    optimizer.state[weight]["mine"] = "kept"
    optimizer.offload_states()
    optimizer.reload_states()
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.full_like(weight, 0.25))
    assert optimizer.state[weight]["mine"] == "kept"


@pytest.mark.parametrize("how", ["kill", "stop_gently"])
def test_a_job_sleeps_over_a_restart_of_the_daemon(how, sleep_daemon, job):
    model, whole = small_model(), small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(4))
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=sleep_daemon.shm)
    train(model, optimizer, range(2))
    optimizer.offload_states()
    getattr(sleep_daemon, how)()
    sleep_daemon.start()
    assert phase(sleep_daemon, job) == "JOB_PHASE_ASLEEP"
    optimizer.reload_states()
    assert optimizer.committed_step == 2
    train(model, optimizer, range(2, 4))
    assert largest_difference(model, whole) == 0


def _sleeps_until_killed(connection, _, job, endpoint):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=endpoint)
    train(model, optimizer, range(3))
    optimizer.offload_states()
    say(connection, values_of(model))
    connection.recv()


def test_another_trainer_goes_on_when_the_job_is_woken(sleep_daemon, job):
    with ranks.running(_sleeps_until_killed, 1, job, sleep_daemon.shm, grouped=False) as killed:
        before = killed.hear(0)
        killed.kill(0)
    model = small_model(seed=9)
    with pytest.raises(optstate.FailedPreconditionError, match=f"optctl wake {job}"):
        optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=sleep_daemon.shm)
    sleep_daemon.run_optctl("wake", job)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=sleep_daemon.shm)
    assert optimizer.committed_step == 3
    assert_values([before], model)
    train(model, optimizer, range(3, 5))
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(5))
    assert largest_difference(model, whole) == 0


@pytest.mark.parametrize("leaves", ["close", "with", "del"])
def test_an_optimizer_that_ends_leaves_the_job_asleep(leaves, sleep_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job, endpoint=sleep_daemon.shm)
    train(model, optimizer, range(1))
    if leaves == "with":
        with optimizer:
            optimizer.offload_states()
    else:
        optimizer.offload_states()
    if leaves == "del":
        del optimizer
        gc.collect()
    else:
        optimizer.close()
        with pytest.raises(RuntimeError, match="closed"):
            optimizer.reload_states()
    assert phase(sleep_daemon, job) == "JOB_PHASE_ASLEEP"


def test_a_job_that_went_on_is_not_taken_back(sleep_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=sleep_daemon.shm)
    train(model, optimizer, range(2))
    before = bits(list(model.parameters()))
    optimizer.offload_states()
    sleep_daemon.run_optctl("wake", job)
    other = small_model()
    with optstate.AdamW(other.parameters(), lr=0.01, job=job, endpoint=sleep_daemon.shm) as theirs:
        train(other, theirs, range(2, 3))
    for _ in range(2):
        with pytest.raises(optstate.FailedPreconditionError, match="at step 2 and is at step 3"):
            optimizer.reload_states()
    assert bits(list(model.parameters())) == before
    assert optimizer.committed_step == 2
    again = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=sleep_daemon.shm)
    assert again.committed_step == 3 and largest_difference(model, other) == 0


def test_other_values_at_the_same_step_are_not_taken_back(sleep_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job, endpoint=sleep_daemon.shm)
    train(model, optimizer, range(2))
    before = bits(list(model.parameters()))
    optimizer.offload_states()
    sleep_daemon.run_optctl("wake", job)
    other = small_model()
    with optstate.AdamW(other.parameters(), lr=0.01, job=job, endpoint=sleep_daemon.shm) as theirs:
        with torch.no_grad():
            other[0].weight.add_(1)
        theirs.upload_parameters()
    with pytest.raises(optstate.FailedPreconditionError, match="other values of parameters"):
        optimizer.reload_states()
    assert bits(list(model.parameters())) == before


def test_a_job_that_was_deleted_is_not_found(sleep_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job, endpoint=sleep_daemon.shm)
    train(model, optimizer, range(1))
    before = bits(list(model.parameters()))
    optimizer.offload_states()
    sleep_daemon.run_optctl("delete", "job", job)
    with pytest.raises(optstate.NotFoundError):
        optimizer.reload_states()
    # Another one of its name is not taken for it.
    fresh = optstate.AdamW(small_model().parameters(), job=job, endpoint=sleep_daemon.shm)
    fresh.close()
    with pytest.raises(optstate.FailedPreconditionError, match="another one"):
        optimizer.reload_states()
    assert bits(list(model.parameters())) == before


def test_damage_on_the_disk_leaves_the_job_asleep(sleep_daemon, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), job=job, endpoint=sleep_daemon.shm)
    train(model, optimizer, range(1))
    offloaded = optimizer.offload_states()
    file = pathlib.Path(offloaded.directory) / "files" / "state" / "job.binpb"
    whole = file.read_bytes()
    file.write_bytes(b"damage" + whole[6:])
    with pytest.raises(optstate.DataLossError, match="job.binpb"):
        optimizer.reload_states()
    assert phase(sleep_daemon, job) == "JOB_PHASE_ASLEEP"
    file.write_bytes(whole)
    optimizer.reload_states()
    train(model, optimizer, range(1, 2))
    assert optimizer.committed_step == 2


def test_speculative_jobs_and_gradients_that_are_views(sleep_daemon, job):
    for name, options in {
        "speculative": {"overlap": True, "speculative": True},
        "views": {"gradients_as_views": True},
        "disk": {"placement": "nvme", "sub_group_size": 4096},
    }.items():
        model, whole = small_model(), small_model()
        with contextlib.closing(optstate.AdamW(whole.parameters(), lr=0.01)) as expected:
            train(whole, expected, range(6))
        optimizer = optstate.AdamW(
            model.parameters(), lr=0.01, job=f"{job}-{name}", endpoint=sleep_daemon.shm, **options
        )
        train(model, optimizer, range(3))
        optimizer.offload_states()
        optimizer.reload_states()
        train(model, optimizer, range(3, 6))
        assert largest_difference(model, whole) == 0, name
        optimizer.close()
