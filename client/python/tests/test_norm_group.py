"""Jobs of their own that clip by one norm (norm_group=), as the stages of a pipeline do."""

from __future__ import annotations

import copy
import math

import nodes as on_nodes
import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from optstate._torch.nodes import copied_state, copy_note
from optstate.session_spec import SessionSpec
from training import bits, loss_of, small_model

STEPS = 5
MAX_NORM = {"max_norm": 0.05}
# The layers of small_model() that each stage has.
STAGES = ((0,), (2, 3))
# The ranks of each stage's job.
PLAIN = ((0,), (1,))
nodes = on_nodes.nodes


def _of_stage(model, stage):
    return [
        (name, each)
        for name, each in model.named_parameters()
        if int(name.split(".")[0]) in STAGES[stage]
    ]


def _stage_of(rank, jobs):
    return next(stage for stage, of_job in enumerate(jobs) if rank in of_job)


def _open(rank, endpoint, job, jobs, kwargs):
    """Returns a model, and the optimizer of the stage that this rank trains."""
    groups = [dist.new_group(list(of_job)) for of_job in jobs]
    stage = _stage_of(rank, jobs)
    model = small_model()
    optimizer = optstate.AdamW(
        _of_stage(model, stage),
        lr=0.01,
        job=f"{job}-{stage}",
        endpoint=endpoint,
        process_group=groups[stage],
        norm_group=dist.group.WORLD,
        **kwargs,
    )
    return model, optimizer


def _backward(model, step, case):
    model.zero_grad()
    loss_of(model, step).backward()
    if case == "inf" and step in (1, 3):  # in the second stage alone
        model[3].weight.grad[0, 0] = math.inf


def _exchange(model, rank, jobs):
    """Gives each rank the other stages' parameters."""
    for stage, of_job in enumerate(jobs):
        for _, parameter in _of_stage(model, stage):
            values = parameter.detach().clone()
            dist.broadcast(values, of_job[0])
            if stage != _stage_of(rank, jobs):
                parameter.data.copy_(values)


def _outcome(optimizer):
    last = optimizer.last_outcome
    return last.gradient_norm, last.clip_coefficient, last.applied


def _train(
    connection,
    rank,
    endpoints,
    per_node,
    job,
    jobs,
    case="",
    kwargs=MAX_NORM,
    pause=None,
    until=STEPS,
):
    """Trains to a step; returns bits of all stages' parameters, and outcomes."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    model, optimizer = _open(rank, endpoint, job, jobs, kwargs)
    _exchange(model, rank, jobs)
    if pause is not None:
        pause(connection, rank, optimizer)
    outcomes = []
    for step in range(optimizer.committed_step, until):
        _backward(model, step, case)
        optimizer.step()
        outcomes.append(_outcome(optimizer))
        _exchange(model, rank, jobs)
    result = bits(model.parameters()), outcomes, optimizer.committed_step
    optimizer.close()
    return result


def _one_job(daemon, job, case="", kwargs=MAX_NORM):
    model = small_model()
    optimizer = optstate.AdamW(
        model.named_parameters(), lr=0.01, job=job, endpoint=daemon.shm, **kwargs
    )
    outcomes = []
    for step in range(STEPS):
        _backward(model, step, case)
        optimizer.step()
        outcomes.append(_outcome(optimizer))
    optimizer.close()
    return bits(model.parameters()), outcomes, STEPS


def _assert_same(results, expected):
    """The bits are those of one job with all parameters, and so is each norm."""
    for values, outcomes, step in results:
        assert values == expected[0] and step == STEPS
        assert repr(outcomes) == repr(expected[1][STEPS - len(outcomes) :])


@pytest.mark.parametrize("case", ["", "inf"])
@pytest.mark.parametrize("jobs", [PLAIN, ((1,), (0,)), ((0, 1), (2, 3)), ((3, 0), (1, 2))])
def test_the_bits_of_one_job_with_all_parameters(jobs, case, daemon, job):
    """In whichever order the ranks are; and a step that one job skips is skipped by all."""
    expected = _one_job(daemon, job, case)
    assert min(coefficient for _, coefficient, _ in expected[1]) < 1
    assert [applied for _, _, applied in expected[1]].count(False) == (2 if case else 0)
    world = sum(map(len, jobs))
    found = ranks.run(_train, world, [daemon.shm], world, job, jobs, case)
    if case:  # of a step that is skipped there is no norm to speak of
        for _, outcomes, _ in found:
            assert [each[2] for each in outcomes] == [each[2] for each in expected[1]]
            for one, other in zip(outcomes, expected[1]):
                assert not one[2] or repr(one) == repr(other)
            assert [each[0] for each in found] == [expected[0]] * world
    else:
        _assert_same(found, expected)


@pytest.mark.parametrize("wire", ["grpc_unix", "grpc_tcp"])
def test_over_grpc(wire, daemon, job):
    expected = _one_job(daemon, job)
    _assert_same(ranks.run(_train, 2, [getattr(daemon, wire)], 2, job, PLAIN), expected)


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_other_norms(norm_type, daemon, job):
    """Their last bits may depend on the number of jobs."""
    kwargs = {"max_norm": 0.05, "norm_type": norm_type}
    expected = _one_job(daemon, job, kwargs=kwargs)
    found = ranks.run(_train, 2, [daemon.shm], 2, job, PLAIN, "", kwargs)
    assert repr(found[0]) == repr(found[1])
    for one, other in zip(found[0][1], expected[1]):
        assert one == pytest.approx(other, rel=1e-6) and one[1] < 1


def test_without_max_norm_the_norm_is_of_all_jobs(daemon, job):
    expected = _one_job(daemon, job, kwargs={})
    found = ranks.run(_train, 2, [daemon.shm], 2, job, PLAIN, "", {})
    for values, outcomes, _ in found:
        assert values == expected[0]
        for one, other in zip(outcomes, expected[1]):
            assert one == pytest.approx(other, rel=1e-12)


def test_jobs_on_several_nodes(nodes, daemon, job):
    """Each node has a part of each job, which all take their steps together."""
    kwargs = {"across_nodes": "replicated", **MAX_NORM}
    expected = _one_job(daemon, job)
    endpoints = [each.shm for each in nodes]
    jobs = ((0, 2), (1, 3))
    _assert_same(ranks.run(_train, 4, endpoints, 2, job, jobs, "", kwargs), expected)
    assert [sorted(each.jobs()) for each in nodes] == [[f"{job}-0", f"{job}-1"]] * 2


def _lose(node, job):
    for stage in range(len(STAGES)):
        name = f"{job}-{stage}"
        copy_note.delete_job(
            SessionSpec(job=name, optimizer=0, group_options=[], parameters=[], endpoint=node.shm),
            name,
        )


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "dynamic8"}])
def test_a_node_that_lost_its_part_of_each_job(options, lost, nodes, daemon, job):
    """Each job is copied by its own ranks; then all go on together."""
    kwargs = {**MAX_NORM, **options}
    expected = _one_job(daemon, job, kwargs=kwargs)
    endpoints, jobs = [each.shm for each in nodes], ((0, 2), (1, 3))
    kwargs["across_nodes"] = "replicated"
    ranks.run(_train, 4, endpoints, 2, job, jobs, "", kwargs, None, 3)
    _lose(nodes[lost], job)
    found = ranks.run(_train, 4, endpoints, 2, job, jobs, "", kwargs)
    _assert_same(found, expected)
    assert [len(outcomes) for _, outcomes, _ in found] == [STEPS - 3] * 4
    assert [sorted(each.jobs()) for each in nodes] == [[f"{job}-0", f"{job}-1"]] * 2


def test_one_of_the_jobs_is_lost_on_a_node(nodes, daemon, job):
    """The ranks of the other job have nothing to copy, and wait. A step that was prepared when the
    ranks were killed is taken, or not, by all."""
    expected = _one_job(daemon, job)
    endpoints, jobs = [each.shm for each in nodes], ((0, 2), (1, 3))
    kwargs = {"across_nodes": "replicated", **MAX_NORM}
    args = (endpoints, 2, job, jobs, "", kwargs)
    with ranks.running(_train, 4, *args, on_nodes.stops_when_noted) as running:
        for rank in range(4):
            assert running.hear(rank) == "stopped"
        running.kill(0, 1, 2, 3)
    copy_note.delete_job(
        SessionSpec(
            job=f"{job}-1", optimizer=0, group_options=[], parameters=[], endpoint=endpoints[1]
        ),
        f"{job}-1",
    )
    found = ranks.run(_train, 4, *args)
    _assert_same(found, expected)
    assert [len(outcomes) for _, outcomes, _ in found] == [STEPS - 3] * 4


def _fails_to_copy(connection, rank, endpoints, job, jobs):
    """The copy of the second job is found to have other bits."""
    if rank == 3:
        checked = copied_state.sums_of
        copied_state.sums_of = lambda values: [each + 1 for each in checked(values)]
    kwargs = {"across_nodes": "replicated", **MAX_NORM}
    try:
        _train(connection, rank, endpoints, 2, job, jobs, "", kwargs)
    except optstate.DataLossError as error:
        return str(error)
    return ""


def test_a_copy_that_fails_is_an_error_in_all_jobs(nodes, daemon, job):
    """The next start copies what is lacking."""
    endpoints, jobs = [each.shm for each in nodes], ((0, 2), (1, 3))
    kwargs = {"across_nodes": "replicated", **MAX_NORM}
    ranks.run(_train, 4, endpoints, 2, job, jobs, "", kwargs, None, 3)
    _lose(nodes[1], job)
    for said in ranks.run(_fails_to_copy, 4, endpoints, job, jobs):
        assert "other bits than the job" in said
    assert f"{job}-1" not in nodes[1].jobs()
    _assert_same(ranks.run(_train, 4, endpoints, 2, job, jobs, "", kwargs), _one_job(daemon, job))


def _duplicated(connection, rank, endpoint, job, lists):
    """Both jobs have the first stage, of which one counts the bias."""
    groups = [dist.new_group([each]) for each in range(2)]
    model = small_model()
    parameters = [model[0].bias, model[0].weight] if rank == 0 else [model[0].bias, model[3].weight]
    optimizer = optstate.AdamW(
        parameters,
        lr=0.01,
        job=f"{job}-{rank}",
        endpoint=endpoint,
        process_group=groups[rank],
        norm_group=dist.group.WORLD,
        norm_duplicates=[model[0].bias] if rank == 1 and lists else [],
        **MAX_NORM,
    )
    loss_of(model, 0).backward()
    counted = [model[0].bias, model[0].weight, model[3].weight]
    squares = [each.grad.double().square().sum().item() for each in counted]
    optimizer.step()
    # The copies stay the same.
    biases = [torch.empty_like(model[0].bias) for _ in range(2)]
    dist.all_gather(biases, model[0].bias.detach().clone())
    assert torch.equal(*biases)
    norm = optimizer.last_outcome.gradient_norm
    optimizer.close()
    return norm, math.sqrt(sum(squares)), math.sqrt(sum(squares) + squares[0])


@pytest.mark.parametrize("lists", [True, False])
def test_duplicates_are_counted_once(lists, daemon, job):
    for norm, once, twice in ranks.run(_duplicated, 2, daemon.shm, job, lists):
        assert norm == pytest.approx(once if lists else twice, rel=1e-6)
        assert once < 0.9999 * twice


@pytest.mark.parametrize(
    "where",
    [
        on_nodes.stops_when_prepared,
        on_nodes.stops_before_deciding,
        on_nodes.stops_when_noted,
        on_nodes.stops_before_committing,
        on_nodes.stops_before_preparing,
    ],
)
def test_ranks_that_are_killed_within_a_step(where, daemon, job):
    """One job has perhaps taken the step, and the other has not: both end at the same step."""
    expected = _one_job(daemon, job)
    args = ([daemon.shm], 2, job, PLAIN, "", MAX_NORM)
    with ranks.running(_train, 2, *args, where) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        running.kill(0, 1)
    again = ranks.run(_train, 2, *args)
    _assert_same(again, expected)
    assert len({len(outcomes) for _, outcomes, _ in again}) == 1


def _alone(connection, rank, endpoints, per_node, job, across):
    """The first job, which is started without the group; returns its step, or an error."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    kwargs = {"lr": 0.01, "across_nodes": across, **MAX_NORM}
    try:
        optimizer = optstate.AdamW(
            _of_stage(small_model(), 0), job=f"{job}-0", endpoint=endpoint, **kwargs
        )
    except optstate.FailedPreconditionError as error:
        return str(error)
    step = optimizer.committed_step
    optimizer.close()
    return step


@pytest.mark.parametrize("across", [None, "replicated"])
@pytest.mark.parametrize(
    ("where", "resumed_at"), [(on_nodes.stops_when_prepared, 2), (on_nodes.stops_when_noted, 3)]
)
def test_a_job_that_is_started_without_the_others(where, resumed_at, across, daemon, job):
    """It takes no step by a norm of its own; then all go on together."""
    expected = _one_job(daemon, job)
    args = ([daemon.shm], 2, job, PLAIN, "", MAX_NORM)
    with ranks.running(_train, 2, *args, where) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        running.kill(0, 1)
    [found] = ranks.run(_alone, 1, [daemon.shm], 1, job, across)
    if across is None:
        assert "step 3" in found and "is prepared" in found and "across_nodes" in found
    else:
        assert found == resumed_at
    again = ranks.run(_train, 2, *args)
    _assert_same(again, expected)
    assert [len(outcomes) for _, outcomes, _ in again] == [STEPS - resumed_at] * 2


def test_a_job_on_two_nodes_that_is_started_without_the_others(nodes, daemon, job):
    """One of its nodes has noted the norm, by which the other one takes the step too."""
    expected = _one_job(daemon, job)
    endpoints, jobs = [each.shm for each in nodes], ((0, 2), (1, 3))
    kwargs = {"across_nodes": "replicated", **MAX_NORM}
    args = (endpoints, 2, job, jobs, "", kwargs)
    with ranks.running(_train, 4, *args, on_nodes.stops_before_deciding) as running:
        for rank in range(4):
            assert running.hear(rank) == "stopped"
        running.kill(0, 1, 2, 3)
    assert ranks.run(_alone, 2, endpoints, 1, job, "replicated") == [3, 3]
    again = ranks.run(_train, 4, *args)
    _assert_same(again, expected)
    assert [len(outcomes) for _, outcomes, _ in again] == [STEPS - 3] * 4


def _survives(connection, rank, endpoint, job):
    model, optimizer = _open(rank, endpoint, job, PLAIN, MAX_NORM)
    on_nodes.stops_when_prepared(connection, rank, optimizer)
    for step in range(2):
        _backward(model, step, "")
        optimizer.step()
    _backward(model, 2, "")
    with pytest.raises(optstate.UnavailableError, match="step 3 is prepared"):
        optimizer.step()
    ranks.say(connection, optimizer.committed_step)


def test_a_rank_that_dies_is_an_error_for_the_others(daemon, job):
    with ranks.running(_survives, 2, daemon.shm, job) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        running.kill(1)
        running.connections[0].send(None)
        assert running.hear(0) == 2
        for stage in range(2):
            described = daemon.optctl("describe", "job", f"{job}-{stage}")
            assert int(described["committed_step"]) == 2


def _scales(connection, rank, endpoint, job):
    """Returns whether each step was taken, and the loss scale after it."""
    kwargs = {"loss_scaler": optstate.LossScaler(init_scale=1024.0), **MAX_NORM}
    model, optimizer = _open(rank, endpoint, job, PLAIN, kwargs)
    found = []
    for step in range(4):
        model.zero_grad()
        optimizer.scale(loss_of(model, step)).backward()
        if step == 1 and rank == 1:
            model[3].weight.grad[0, 0] = math.inf
        optimizer.step()
        found.append((optimizer.last_outcome.applied, optimizer.loss_scale))
    optimizer.close()
    return found


def test_loss_scales_stay_together(daemon, job):
    one, other = ranks.run(_scales, 2, daemon.shm, job)
    assert one == other
    assert [applied for applied, _ in one] == [True, False, True, True]
    assert one[1][1] < one[0][1]


def _differs(connection, rank, endpoint, job):
    """Jobs that clip by other norms take the step on none, and then go on."""
    model, optimizer = _open(rank, endpoint, job, PLAIN, MAX_NORM)
    before = bits(model.parameters())
    _backward(model, 0, "")
    optimizer.max_norm = 0.05 + rank
    with pytest.raises(optstate.FailedPreconditionError, match="prepared different steps"):
        optimizer.step()
    assert optimizer.committed_step == 0 and bits(model.parameters()) == before
    optimizer.max_norm = 0.05
    optimizer.step()
    assert optimizer.committed_step == 1
    with pytest.raises(optstate.UnimplementedError, match="add_param_group"):
        optimizer.add_param_group({"params": [("added", torch.nn.Parameter(torch.zeros(2)))]})
    # A copy has no group, and would clip alone.
    copied = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="norm_group"):
        copied.attach()
    dist.barrier()
    optimizer.param_groups[0]["max_norm"] = 0.1
    with pytest.raises(optstate.UnimplementedError, match="norm_group"):
        optimizer.step()
    del optimizer.param_groups[0]["max_norm"]
    with pytest.raises(RuntimeError, match="GradScaler"):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        optimizer.step()
    _backward(model, 1, "")
    optimizer.step()
    optimizer.close()


def test_what_cannot_be_together_is_refused(daemon, job):
    ranks.run(_differs, 2, daemon.shm, job)


def _refused(connection, rank, endpoint, job):
    model = small_model()
    alone = [dist.new_group([each]) for each in range(2)]
    world = dist.group.WORLD

    def make(**kwargs):
        kwargs = {
            "job": f"{job}-{rank}",
            "process_group": alone[rank],
            "norm_group": world,
            **kwargs,
        }
        parameters = _of_stage(model, rank)
        return optstate.AdamW(parameters, lr=0.01, endpoint=endpoint, **kwargs)

    with pytest.raises(ValueError, match="lacks others"):
        make(process_group=world, norm_group=alone[rank], job=job)
    with pytest.raises(ValueError, match="a name of its own"):
        make(job=job)
    with pytest.raises(ValueError, match="have a name or none"):
        make(job=None if rank else job)
    with pytest.raises((ValueError, optstate.UnknownError), match="overlap"):
        make(overlap=rank == 1)
    with pytest.raises(ValueError, match="give norm_group too"):
        make(norm_group=None, norm_duplicates=[model[0].bias])
    with pytest.raises(ValueError, match="no parameters of this optimizer"):
        make(norm_duplicates=[torch.zeros(3)])
    with pytest.raises(ValueError, match="counted once"):
        make(norm_duplicates=[each for _, each in _of_stage(model, rank)])
    # With the ranks of one job it changes nothing.
    optimizer = make(process_group=alone[rank], norm_group=alone[rank])
    assert optimizer._served.attachment.nodes is None
    loss_of(model, 0).backward()
    optimizer.step()
    if rank == 0:
        optimizer.step()  # this job alone
    optimizer.close()
    with pytest.raises(optstate.FailedPreconditionError, match="step 2.*step 1"):
        make()


def test_refusals(daemon, job):
    ranks.run(_refused, 2, daemon.shm, job)
