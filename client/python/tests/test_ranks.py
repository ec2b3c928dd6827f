"""Several ranks train one job: torch.distributed with gloo, one process each."""

from __future__ import annotations

import os

import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from training import assert_values, largest_difference, loss_of, small_model, train, values_of


def _same_batches(connection, rank, endpoint, partition, kwargs):
    """Every rank has the gradients of the same batches, as after an all-reduce."""
    torch.manual_seed(rank)
    model = small_model(seed=rank)  # ranks that disagree: each loads what it owns
    with torch.no_grad():
        for parameter, source in zip(model.parameters(), small_model().parameters()):
            parameter.copy_(source)
    optimizer = optstate.AdamW(
        model.named_parameters(), lr=0.01, endpoint=endpoint, partition=partition, **kwargs
    )
    train(model, optimizer, range(10))
    outcome = optimizer.last_outcome
    state = optimizer.state_dict()["state"]
    moments = [entry["exp_avg"].numpy() for entry in state.values()]
    return values_of(model), moments, outcome, optimizer.job


@pytest.mark.parametrize("partition", ["greedy", "contiguous"])
@pytest.mark.parametrize("wire", ["shm", "grpc_tcp"])
def test_two_ranks_give_the_bits_of_one(wire, partition, daemon):
    kwargs = {"max_norm": 0.1}
    whole = small_model()
    optimizer = optstate.AdamW(whole.parameters(), lr=0.01, **kwargs)
    train(whole, optimizer, range(10))
    results = ranks.run(_same_batches, 2, getattr(daemon, wire), partition, kwargs)
    assert_values([result[0] for result in results], whole)
    state = optimizer.state_dict()["state"]
    for _, moments, outcome, _ in results:
        for found, entry in zip(moments, state.values()):
            assert torch.equal(torch.from_numpy(found), entry["exp_avg"])
        # The norm is summed by rank, so its last bits may differ from one rank's.
        assert outcome.gradient_norm == pytest.approx(optimizer.last_outcome.gradient_norm)
    assert results[0][3] == results[1][3]  # one private job


def _ddp(connection, rank, job, steps):
    model = small_model(seed=7 * rank)  # DDP takes rank 0's
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = optstate.AdamW(parallel.named_parameters(), lr=0.01, job=job)
    first = optimizer.committed_step
    for step in range(first, steps):
        optimizer.zero_grad()
        loss_of(parallel, 2 * step + rank).backward()
        optimizer.step()
    return values_of(model), first


def _ddp_torch(connection, rank, job, steps):
    model = small_model()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(parallel, 2 * step + rank).backward()
        optimizer.step()
    return values_of(model), 0


def test_ddp_trains_as_with_torchs_and_re_attaches(job):
    expected = ranks.run(_ddp_torch, 2, job, 20)
    whole = ranks.run(_ddp, 2, None, 20)
    first = ranks.run(_ddp, 2, job, 12)
    second = ranks.run(_ddp, 2, job, 20)
    assert [result[1] for result in first + second] == [0, 0, 12, 12]
    for mine, other in zip(whole[0][0], whole[1][0]):
        assert (mine == other).all()
    for result in second:
        for found, uninterrupted, theirs in zip(result[0], whole[0][0], expected[0][0]):
            assert (found == uninterrupted).all()
            assert abs(found - theirs).max() < 2e-5


def _grown(connection, rank, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, job=job)
    train(model, optimizer, range(3))
    extra = torch.nn.Parameter(torch.ones(5))
    optimizer.add_param_group({"params": [extra], "lr": 0.1})
    for step in range(3, 6):
        optimizer.zero_grad()
        (loss_of(model, step) + extra.square().sum()).backward()
        optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(6, 8))
    return [*values_of(model), extra.detach().numpy()], optimizer.committed_step


@pytest.mark.parametrize("named", [False, True], ids=["private", "named"])
def test_ranks_grow_and_load_together(named, job):
    alone = ranks.run(_grown, 1, f"{job}-alone" if named else None)
    together = ranks.run(_grown, 2, job if named else None)
    for values, committed in together:
        assert committed == 8
        for found, expected in zip(values, alone[0][0]):
            assert (found == expected).all()


def _embedded(connection, rank, endpoint):
    if endpoint is None:
        del os.environ["OPTSTATE_ENDPOINT"]
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, endpoint=endpoint)
    train(model, optimizer, range(10))
    resolved = optimizer.endpoint
    optimizer.close()
    dist.barrier()  # the daemon lives with rank 0
    return values_of(model), resolved


def test_embedded_ranks_share_rank_0s_daemon():
    whole = small_model()
    train(whole, optstate.AdamW(whole.parameters(), lr=0.01), range(10))
    results = ranks.run(_embedded, 2, "embedded")
    assert_values([result[0] for result in results], whole)
    assert results[0][1] == results[1][1]
    assert results[0][1].startswith("unix:")


def _by_group(connection, rank):
    """Each rank trains a job of its own, through a process group of one."""
    groups = [dist.new_group([index]) for index in range(2)]
    model = small_model(seed=rank)
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, process_group=groups[rank])
    train(model, optimizer, range(5 + rank))
    return values_of(model), optimizer.job


def test_process_group_says_who_trains_together():
    results = ranks.run(_by_group, 2)
    assert results[0][1] != results[1][1]
    for seed, (values, _) in enumerate(results):
        model = small_model(seed=seed)
        train(model, optstate.AdamW(model.parameters(), lr=0.01), range(5 + seed))
        assert_values([values], model)


def _disagree(connection, rank, job, what):
    """The text of the error that each rank gets."""
    model = small_model(dtype=torch.bfloat16 if what == "dtype" and rank == 1 else torch.float32)
    parameters = list(model.parameters())
    try:
        if what == "bad tensor" and rank == 1:
            parameters.append(torch.zeros(3, dtype=torch.float64, requires_grad=True))
        optimizer = optstate.AdamW(parameters, lr=0.01, job=job)
        if what == "lr":
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank)
        train(model, optimizer, range(1))
    except Exception as error:
        if what != "lr":
            return type(error).__name__, str(error)
        optimizer.param_groups[0]["lr"] = 0.01
        dist.barrier()
        train(model, optimizer, range(1))
        return type(error).__name__, str(error), optimizer.committed_step
    return None


@pytest.mark.parametrize("what", ["dtype", "bad tensor"])
def test_when_one_rank_cannot_attach_none_waits(what, job):
    first, second = ranks.run(_disagree, 2, job, what)
    if what == "dtype":
        assert first[0] == second[0] == "FailedPreconditionError"
        assert "bfloat16" in first[1] and "rank 1" in first[1]
    else:
        assert second == ("TypeError", second[1]) and "float64" in second[1]
        assert "rank 1" in first[1] and "float64" in first[1]


def test_ranks_that_disagree_on_a_step_lose_nothing(job):
    for result in ranks.run(_disagree, 2, job, "lr"):
        assert result[0] == "FailedPreconditionError"
        assert result[2] == 1


def _nan_on_one(connection, rank):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01)
    loss_of(model, 0).backward()
    if rank == 1:
        for parameter in model.parameters():
            parameter.grad[...] = float("nan")
    optimizer.step()
    outcome = optimizer.last_outcome
    return outcome.applied, outcome.found_inf, largest_difference(model, small_model())


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    for applied, found_inf, difference in ranks.run(_nan_on_one, 2):
        assert not applied and found_inf and difference == 0


def _unlike(connection, rank, what):
    torch.manual_seed(rank if what == "seeds" else 0)
    parameter = torch.nn.Parameter(torch.randn(10))
    if what == "flat":
        parameter._is_flat_param = True
    error = TypeError if what == "flat" else ValueError
    text = "give the wrapped module" if what == "flat" else "other values on other ranks"
    with pytest.raises(error, match=text):
        optstate.SGD([parameter], lr=0.1)
    return True


@pytest.mark.parametrize("what", ["seeds", "flat"])
def test_a_job_begins_with_the_same_on_all_ranks(what):
    assert ranks.run(_unlike, 2, what) == [True, True]


def _changed_in_place(connection, rank, endpoint, job):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, endpoint=endpoint, job=job)
    session = optstate.session.Session
    load_many, finish_load = session.load_many, session.finish_load

    def late(*arguments):
        session.load_many = load_many
        dist.barrier()
        ranks.say(connection, "rank 0 has loaded, and finishes")
        connection.recv()
        return load_many(*arguments)

    def early(*arguments):
        session.finish_load = finish_load
        dist.barrier()
        return finish_load(*arguments)

    for step in range(4):
        if step == 2:
            with torch.no_grad():
                model[0].weight.mul_(2)
            if job and rank == 1:
                session.load_many = late
            elif job:
                session.finish_load = early
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return values_of(model)


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_an_engine_killed_while_ranks_load_is_a_delay(wire, own_daemon, job):
    endpoint = getattr(own_daemon, wire)
    with ranks.running(_changed_in_place, 2, endpoint, job) as both:
        both.hear(1)
        os.kill(int(own_daemon.optctl("describe", "job", job)["engine_pid"]), 9)
        while len(own_daemon.optctl("get", "sessions")["sessions"]) < 1:
            pass  # rank 0 comes back by itself
        both.connections[1].send("go")
        undisturbed = ranks.run(_changed_in_place, 2, endpoint, None)[0]
        for result in both.results():
            for found, expected in zip(result, undisturbed):
                assert (found == expected).all()
