"""A step that failed behind the reduction is taken again with gradients that are reduced once."""

from __future__ import annotations

import nodes as on_nodes
import optstate
import pytest
import ranks
import torch
from optstate._torch.collective.averaging import reduce_gradients
from optstate._torch.collective.error_feedback import ErrorFeedback
from optstate._torch.collective.reduced import forget_reduced
from optstate._torch.collective.reducing import Reducing
from optstate._torch.ranks import Ranks
from optstate.session import Session
from training import bits, loss_of, small_model

nodes = on_nodes.nodes
HOWS = {
    "mean": Reducing(),
    "sum": Reducing(is_sum=True),
    "cut": Reducing(is_sum=True, bucket_bytes=4096),
}


def _tensors(rank):
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.zeros(1500), torch.zeros(70)]
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator)
    return tensors


class _Ends(Ranks):
    """Ranks that do not reach each other from a number of sums on."""

    def __init__(self, sums: int) -> None:
        super().__init__(None)
        self._left = sums

    def add_up(self, tensor):
        self._left -= 1
        if self._left < 0:
            raise optstate.UnavailableError("the ranks do not reach each other")
        super().add_up(tensor)


def _again(connection, rank, name):
    how, everyone = HOWS[name], Ranks(None)

    def reduce(tensors, collective=everyone):
        reduce_gradients(collective, tensors, None, how, ErrorFeedback())
        return [each.grad.clone() for each in tensors]

    tensors = _tensors(rank)
    before = [each.grad.clone() for each in tensors]
    first = reduce(tensors)
    assert any(not torch.equal(one, other) for one, other in zip(before, first))
    for again in (reduce(tensors), reduce(tensors)):
        assert all(map(torch.equal, again, first))
    # They are other gradients once backward() adds to them.
    expected = _tensors(rank)
    for tensor, like, value in zip(tensors, expected, first):
        tensor.grad.add_(1)
        like.grad = value + 1
    assert all(map(torch.equal, reduce(tensors), reduce(expected)))
    # A step that is over has no gradients any more that count as reduced.
    forget_reduced(tensors)
    expected = [torch.zeros_like(each) for each in tensors]
    for like, tensor in zip(expected, tensors):
        like.grad = tensor.grad.clone()
    assert all(map(torch.equal, reduce(tensors), reduce(expected)))
    # One rank alone has computed its gradients anew.
    if rank == 0:
        tensors[1].grad = torch.ones(70)
    with pytest.raises(optstate.FailedPreconditionError, match="zero_grad"):
        reduce(tensors)
    # The ranks part in the middle of it.
    tensors = _tensors(rank)
    with pytest.raises(optstate.UnavailableError):
        reduce(tensors, _Ends(2 if name == "cut" else 1))
    with pytest.raises(optstate.FailedPreconditionError, match="interrupted"):
        reduce(tensors)
    # New gradients are reduced.
    renewed = _tensors(rank)
    for tensor, like in zip(tensors, renewed):
        tensor.grad = like.grad
    for found, value in zip(reduce(tensors), first):
        assert torch.equal(found, value)
    return True


@pytest.mark.parametrize("name", HOWS)
def test_gradients_are_reduced_once(name):
    assert ranks.run(_again, 2, name) == [True, True]


def _train(connection, rank, endpoints, job, across, options, fails):
    endpoint = on_nodes.enter(rank, endpoints, 1) if across else endpoints[0]
    module = small_model()
    optimizer = optstate.SGD(
        module.named_parameters(),
        lr=0.05,
        job=job,
        endpoint=endpoint,
        reduction="collective",
        across_nodes=across,
        **options,
    )
    push, failed = Session.push_gradients, []

    def failing(session, step, *rest):
        if fails and step == 2 and not failed:
            failed.append(step)
            raise optstate.UnavailableError("the daemon drains")
        return push(session, step, *rest)

    Session.push_gradients = failing
    for step in range(3):
        optimizer.zero_grad()
        loss_of(module, 2 * step + rank).backward()
        try:
            optimizer.step()
        except optstate.UnavailableError:
            optimizer.step()
    assert len(failed) == fails
    result = bits(module.parameters()), optimizer.committed_step
    optimizer.close()
    return result


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction_op": "sum"}, {"communication_dtype": "int8"}],
    ids=["mean", "sum", "int8"],
)
@pytest.mark.parametrize("across", [None, "replicated", "sharded"])
def test_a_step_is_taken_again_with_the_same_gradients(across, options, nodes, daemon, job):
    endpoints = [daemon.shm] if across is None else [each.shm for each in nodes]
    smooth = ranks.run(_train, 2, endpoints, f"{job}-smooth", across, options, False)
    assert ranks.run(_train, 2, endpoints, job, across, options, True) == smooth
    assert smooth[0] == smooth[1] and smooth[0][1] == 3


def _apart(connection, rank, endpoints, job, across, ends):
    """Rank 1 leaves a micro-step out: then it is in another one than rank 0, or in step()."""
    module = small_model()
    optimizer = optstate.SGD(
        module.named_parameters(),
        lr=0.05,
        job=job,
        endpoint=on_nodes.enter(rank, endpoints, 1) if across else endpoints[0],
        reduction="collective",
        accumulate=True,
        across_nodes=across,
    )

    def backward(step, micro_step):
        optimizer.zero_grad()
        loss_of(module, 8 * step + 2 * micro_step + rank).backward()

    def take(step):
        backward(step, 0)
        optimizer.accumulate_step()
        backward(step, 1)
        optimizer.step()

    take(0)
    backward(1, 0)
    optimizer.accumulate_step()
    if rank == 1 and not ends:
        optimizer.abort_step()
    backward(1, 1)
    call = optimizer.step if rank == 1 and ends else optimizer.accumulate_step
    with pytest.raises(optstate.FailedPreconditionError, match="different micro-steps") as raised:
        call()
    optimizer.abort_step()
    for step in (1, 2):
        take(step)
    assert optimizer.committed_step == 3
    result = str(raised.value), bits(module.parameters())
    optimizer.close()
    return result


@pytest.mark.parametrize("ends", [False, True], ids=["begins anew", "ends"])
@pytest.mark.parametrize("across", [None, "sharded"])
def test_ranks_at_other_micro_steps_do_not_reduce_together(across, ends, nodes, daemon, job):
    endpoints = [daemon.shm] if across is None else [each.shm for each in nodes]
    (said, values), other = ranks.run(_apart, 2, endpoints, job, across, ends)
    assert other == (said, values)
    assert "rank 0 in accumulate_step(), micro-step 1 of step 2" in said
    call, number = ("step()", 1) if ends else ("accumulate_step()", 0)
    assert f"rank 1 in {call}, micro-step {number} of step 2" in said


def _wrong_gradient(connection, rank, endpoints, job, **kwargs):
    """A rank has a gradient that cannot be pushed, and takes the step again; alone on one node."""
    module = small_model()
    optimizer = optstate.SGD(
        module.named_parameters(),
        lr=0.05,
        job=job,
        endpoint=on_nodes.enter(rank, endpoints, 2 // len(endpoints)),
        **kwargs,
    )
    for step in range(2):
        optimizer.zero_grad()
        loss_of(module, 2 * step + rank).backward()
        if rank == 1 and step == 1:
            bias = module[0].bias
            gradient, bias.grad_dtype = bias.grad, None
            bias.grad = gradient.double()
            with pytest.raises(TypeError, match="float64"):
                optimizer.step()
            bias.grad = gradient
        elif step == 1 and len(endpoints) > 1:
            with pytest.raises(optstate.OptstateError, match="rank 1"):
                optimizer.step()
        optimizer.step()
    assert optimizer.committed_step == 2
    optimizer.close()
    return bits(module.parameters())


def test_a_rank_with_a_wrong_gradient_takes_the_step_again_alone(daemon, job):
    one, other = ranks.run(_wrong_with, 2, [daemon.shm], job, {"reduction": "collective"})
    assert one == other


def _wrong_with(connection, rank, endpoints, job, kwargs):
    return _wrong_gradient(connection, rank, endpoints, job, **kwargs)


@pytest.mark.parametrize("reduction", ["collective", "trainer"])
def test_nodes_that_share_parameters_out_take_it_again_together(reduction, nodes, job):
    kwargs = {"reduction": reduction, "across_nodes": "sharded"}
    endpoints = [each.shm for each in nodes]
    one, other = ranks.run(_wrong_with, 2, endpoints, job, kwargs)
    assert one == other
