"""Whole parameters that nodes share out (ZeRO-1), each node with a daemon of its own."""

from __future__ import annotations

import collections
import copy

import nodes as on_nodes
import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_on_nodes import STEPS, assert_as_on_one_node, make, train
from optstate._torch.nodes import owners
from optstate._torch.nodes.owners import owners_of, runs_of
from training import bits, loss_of, small_model

nodes = on_nodes.nodes


KWARGS = {"across": "sharded"}
CLIPPED = {**KWARGS, "max_norm": 0.05}
CUT = {**CLIPPED, "partition": "contiguous"}
CASES = {
    "plain": KWARGS,
    "clipped": CLIPPED,
    "inf": CLIPPED,
    "scaler": {**CLIPPED, "fused": True},
    "accumulate": {**CLIPPED, "accumulate": True},
    "missing": CLIPPED,
    "missing on a node": CLIPPED,
    "cut": CUT,
    "cut, accumulate": {**CUT, "accumulate": True},
    "cut, missing": CUT,
    "cut, inf": CUT,
    "cut, SGD": {**CUT, "momentum": 0.9},
    "cut, Adagrad": {**CUT, "initial_accumulator_value": 0.5},
    "cut, RMSprop": {**CUT, "centered": True, "momentum": 0.9},
    "cut, NAdam": CUT,
}


ON_FOUR = ("plain", "clipped", "inf", "accumulate", "missing")


@pytest.mark.parametrize(
    ("case", "nodes"),
    [*((case, 2) for case in CASES), *((case, 4) for case in ON_FOUR), ("cut", 4)],
    indirect=["nodes"],
)
def test_the_bits_of_one_node_with_all_ranks(case, nodes, daemon, job):
    kwargs, world = CASES[case], 2 * len(nodes)
    is_cut, case = case.startswith("cut"), case.removeprefix("cut, ")
    one = ranks.run(train, world, [daemon.shm], world, job, case, kwargs)
    several = on_nodes.run_on(nodes, train, job, case, kwargs)
    assert_as_on_one_node(several, one[0])
    if case in ("inf", "scaler"):
        skipped = [applied for _, applied in several[0][2]].count(False)
        assert skipped == (2 if case == "inf" else 1)
    elements = [
        sum(int(torch.tensor(list(map(int, p["shape"]))).prod()) for p in each.parameters(job)[1:])
        for each in nodes
    ]
    assert min(elements) > 0
    assert sum(elements) == sum(each.numel() for each in small_model().parameters())
    if is_cut:  # at the nearest row, of at most 16 elements
        assert max(elements) - min(elements) <= 16


@pytest.mark.parametrize("nodes", [4], indirect=True)
def test_every_optimizer_has_the_bits_of_one_node(nodes, daemon, job):
    kinds = [name for name in on_nodes.OPTIMIZERS if hasattr(optstate, name)]
    on_nodes.assert_each_has_the_bits_of_one_node(train, kinds, CLIPPED, nodes, daemon, job)


def _strided(connection, rank, endpoints, per_node, job, large, kwargs):
    """Trains columns of a matrix, transposed ones, and others; returns their bits, and those of the
    columns that nobody trains."""
    owners._LARGE_BYTES = 1 if large else 1 << 20
    owners._AT_A_TIME_BYTES = 64  # several runs of broadcasts
    torch.manual_seed(3)
    base = torch.randn(40, 4)
    parameters = [
        torch.nn.Parameter(base[:, 0]),
        torch.nn.Parameter(base[:, 2]),
        torch.nn.Parameter(torch.randn(5, 1).t()),
        torch.nn.Parameter(torch.randn(6, 7).t()),
        torch.nn.Parameter(torch.randn(1)),
        torch.nn.Parameter(torch.randn(8, 3)),
    ]
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    if len(endpoints) > 1:
        kwargs = {"across_nodes": "sharded", **kwargs}
    optimizer = optstate.AdamW(parameters, lr=0.1, job=job, endpoint=endpoint, **kwargs)
    for step in range(3):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, step + index + 1)
        versions = [each._version for each in parameters]
        optimizer.step()
        assert all(each._version > before for each, before in zip(parameters, versions))
    optimizer.close()
    return bits(parameters), bits([base[:, 1], base[:, 3]])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("partition", ["greedy", "contiguous"])
def test_parameters_that_are_not_contiguous(large, partition, nodes, daemon, job):
    kwargs = {"partition": partition}
    one = ranks.run(_strided, 4, [daemon.shm], 4, job, large, kwargs)
    two = ranks.run(_strided, 4, [each.shm for each in nodes], 2, job, large, kwargs)
    assert two == one == [one[0]] * 4


def test_owners():
    assert owners_of([4, 4, 4, 4], 2) == [0, 1, 0, 1]
    assert owners_of([8, 1, 1, 1, 9], 2) == [0, 1, 1, 1, 1]
    numels = [7, 3, 5, 1, 9, 2]
    assert owners_of(numels[:4], 3) == owners_of(numels, 3)[:4]


def test_runs():
    assert runs_of([(4,), (4,)], 2) == [[(0, 0, 4)], [(1, 0, 4)]]
    assert runs_of([(10, 3)], 3) == [[(0, 0, 3), (1, 3, 7), (2, 7, 10)]]
    assert runs_of([(2, 5), (3,), (0, 4), (7,)], 2) == [
        [(0, 0, 2)],
        [(1, 0, 3)],
        [(0, 0, 0)],
        [(1, 0, 7)],
    ]
    # Every element has one node, whatever the shapes.
    generator = torch.Generator().manual_seed(7)
    for _ in range(200):
        nodes = int(torch.randint(1, 6, (), generator=generator))
        shapes = [
            tuple(torch.randint(0, 9, (dims,), generator=generator).tolist())
            for dims in torch.randint(1, 4, (6,), generator=generator).tolist()
        ]
        loads = [0] * nodes
        for shape, shares in zip(shapes, runs_of(shapes, nodes)):
            assert [begin for _, begin, _ in shares] == [0, *(end for *_, end in shares[:-1])]
            assert shares[-1].end == shape[0]
            assert [share.node for share in shares] == sorted({share.node for share in shares})
            row = torch.Size(shape[1:]).numel()
            for node, begin, end in shares:
                loads[node] += (end - begin) * row
        largest_row = max(torch.Size(shape[1:]).numel() for shape in shapes)
        assert max(loads) - min(loads) <= 2 * largest_row + 1


def _beside_torch(connection, rank, endpoints, per_node, job, kwargs):
    """Beside torch's ZeroRedundancyOptimizer, with checkpoints to and from it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    module, model, optimizer = make(rank, endpoints, per_node, job, **kwargs)
    other = DistributedDataParallel(small_model())
    reference = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, lr=0.01)

    def train(steps):
        for step in steps:
            for each, of in ((model, optimizer), (other, reference)):
                of.zero_grad()
                loss_of(each, 100 * step + rank).backward()
                of.step()

    train(range(3))
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        copy.deepcopy(optimizer)
    for each in (optimizer, reference):
        each.consolidate_state_dict(to=0)
    saved = [None]
    if rank == 0:
        saved = [optimizer.state_dict()]
        expected = reference.state_dict()["state"]
        assert saved[0]["state"].keys() == expected.keys()
        for index, entry in expected.items():
            for key, value in entry.items():
                torch.testing.assert_close(
                    saved[0]["state"][index][key], value, rtol=1e-5, atol=2e-6
                )
        torch.optim.AdamW(small_model().parameters()).load_state_dict(saved[0])
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    dist.broadcast_object_list(saved)
    values = [each.detach().clone() for each in module.parameters()]
    train(range(3, 5))
    then = bits(module.parameters())
    for one, expected in zip(module.parameters(), other.parameters()):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=2e-6)
    # A checkpoint, written on every rank alike, puts the job back.
    with torch.no_grad():
        for each, value in zip(module.parameters(), values):
            each.copy_(value)
    optimizer.load_state_dict(saved[0])
    for step in (3, 4):
        optimizer.zero_grad()
        loss_of(model, 100 * step + rank).backward()
        optimizer.step()
    assert bits(module.parameters()) == then
    optimizer.close()
    # Another script attaches, and gets all parameters.
    module, model, optimizer = make(rank, endpoints, per_node, job, seed=9, **kwargs)
    assert optimizer.committed_step == 7 and bits(module.parameters()) == then
    return then


@pytest.mark.parametrize("partition", ["greedy", "contiguous"])
def test_it_trains_as_zero_redundancy_optimizer_does(partition, nodes, job):
    kwargs = {**KWARGS, "partition": partition}
    one, other = ranks.run(_beside_torch, 2, [each.shm for each in nodes], 1, job, kwargs)
    assert one == other


@pytest.mark.parametrize("how", [CLIPPED, CUT], ids=["greedy", "contiguous"])
@pytest.mark.parametrize("where", [on_nodes.stops_when_noted, on_nodes.stops_before_committing])
def test_ranks_that_are_killed_within_a_step(where, how, nodes, daemon, job):
    """The next script gets all parameters, also those that nobody had sent."""
    endpoints = [each.shm for each in nodes]
    expected = ranks.run(train, 2, [daemon.shm], 2, job, "clipped", how)[0]
    with ranks.running(train, 2, endpoints, 1, job, "clipped", how, where) as running:
        for rank in range(2):
            assert running.hear(rank) == "stopped"
        running.kill(0, 1)
    again = ranks.run(train, 2, endpoints, 1, job, "clipped", how)
    assert len(assert_as_on_one_node(again, expected)[2]) == STEPS - 3


def _cut(connection, rank, endpoints, job):
    """State of parameters that are cut: writes, checkpoints of 16 bits, and what is refused."""
    endpoint = on_nodes.enter(rank, endpoints, 1)
    how = {"lr": 0.01, "across_nodes": "sharded", "partition": "contiguous", "endpoint": endpoint}
    module = small_model(dtype=torch.bfloat16)
    optimizer = optstate.AdamW(module.named_parameters(), job=job, **how)
    reference_module = small_model(dtype=torch.bfloat16)
    alone = [dist.new_group([each]) for each in range(2)]
    reference = optstate.AdamW(
        reference_module.named_parameters(), lr=0.01, endpoint=endpoint, process_group=alone[rank]
    )
    weight, like = module[0].weight, reference_module[0].weight
    pairs = ((module, optimizer), (reference_module, reference))

    def steps(numbers):
        for step in numbers:
            for each, of in pairs:
                of.zero_grad()
                loss_of(each, step).backward()
                of.step()

    def wholes():
        optimizer.consolidate_state_dict(to=None)
        return optimizer.state_dict()["state"], reference.state_dict()["state"]

    def same():
        found, expected = wholes()
        assert found.keys() == expected.keys()
        for index, entry in expected.items():
            assert found[index].keys() == entry.keys()
            for key, value in entry.items():
                assert torch.equal(found[index][key], value), (index, key)
        assert bits(module.parameters()) == bits(reference_module.parameters())

    steps(range(2))
    same()
    # In place, and by assignment of the whole.
    for parameter, of in ((weight, optimizer), (like, reference)):
        of.state[parameter]["exp_avg"].mul_(3)
        of.state[parameter]["exp_avg_sq"] = torch.full(parameter.shape, 0.25)
        of.state[parameter]["note"] = torch.arange(3)
    steps([2])
    same()
    # The parameter itself, whose master follows.
    with torch.no_grad():
        for parameter in (weight, like):
            parameter.mul_(0.5)
    same()
    steps([3])
    same()
    # One that has moved is found to be the same, and one that has grown is refused.
    module[3].bias.data = module[3].bias.data.clone()
    reference_module[3].bias.data = reference_module[3].bias.data.clone()
    steps([4])
    same()
    kept, module[0].weight.data = module[0].weight.data, torch.zeros(20, 8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"is now \[20, 8\], but the job has \[16, 8\]"):
        optimizer.step()
    module[0].weight.data = kept
    # A second optimizer that fails leaves the parameters to the first; so does one that has ended.
    with pytest.raises(optstate.FailedPreconditionError):
        optstate.SGD(module.named_parameters(), job=job, **how)
    steps([5])
    same()
    optstate.SGD(module.named_parameters(), **how).close()
    steps([6])
    same()
    for parameter, of in ((weight, optimizer), (like, reference)):
        del of.state[parameter]["note"]
    # A notebook's cell that is run again takes the rank over.
    again = optstate.AdamW(module.named_parameters(), job=job, **how)
    with pytest.raises(RuntimeError, match="taken over"):
        optimizer.step()
    pairs = ((module, again), (reference_module, reference))
    optimizer = again
    steps([7])
    same()
    # A gradient on one node alone, of a parameter that both have.
    optimizer.zero_grad()
    loss_of(module, 8).backward()
    if rank == 0:
        weight.grad = None
    with pytest.raises(optstate.FailedPreconditionError, match="parameters without a gradient"):
        optimizer.step()
    steps([8])
    same()
    return bits(module.parameters())


def test_state_of_parameters_that_are_cut(nodes, job):
    one, other = ranks.run(_cut, 2, [each.shm for each in nodes], job)
    assert one == other


def _collective(connection, rank, endpoints, job, partition):
    """Without DistributedDataParallel, in two groups of which one is added later; and what is
    refused."""
    endpoint = on_nodes.enter(rank, endpoints, 1)
    module, other = small_model(), small_model()
    scalar = torch.nn.Parameter(torch.tensor(1.0))
    kwargs = {"lr": 0.01, "endpoint": endpoint, "across_nodes": "sharded"}
    with pytest.raises(optstate.UnimplementedError, match="no dimensions"):
        optstate.AdamW([*module.parameters(), scalar], **kwargs)
    with pytest.raises(ValueError, match="other values on other ranks"):
        optstate.AdamW(small_model(rank).parameters(), **kwargs)
    kwargs |= {"reduction": "collective", "partition": partition}
    if partition == "contiguous":
        with pytest.raises(optstate.UnimplementedError, match='needs it whole.*"greedy"'):
            optstate.LAMB(module.parameters(), **kwargs)
        with pytest.raises(ValueError, match="rank 1 has partition='greedy', and rank 0"):
            optstate.AdamW(module.parameters(), **{**kwargs, "partition": (partition, None)[rank]})
    optimizer = optstate.AdamW(module[0].parameters(), job=job, model=module, **kwargs)
    reference = torch.optim.AdamW(other[0].parameters(), lr=0.01)
    for step in range(6):
        if step == 2:
            for of, each in ((optimizer, module), (reference, other)):
                added = [*each[2].parameters(), *each[3].parameters()]
                of.add_param_group({"params": added, "lr": 0.02})
        for each, of in ((module, optimizer), (other, reference)):
            each.zero_grad()
            loss_of(each, 100 * step + rank).backward()
            if step == 4 and rank == 0:
                each[0].weight.grad[0, 0] = float("inf")
            if of is reference:
                for parameter in each.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= 2
                if step != 4:
                    of.step()
            else:
                of.step()
        assert optimizer.last_outcome.applied == (step != 4)
    for one, expected in zip(module.parameters(), other.parameters()):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=2e-6)
    values = bits(module.parameters())
    optimizer.close()
    # The parameters are whole ones again, for a job of one node.
    alone = dist.new_group([0]), dist.new_group([1])
    single = optstate.AdamW(
        module.parameters(), lr=0.01, endpoint=endpoint, process_group=alone[rank]
    )
    loss_of(module, 7).backward()
    single.step()
    state = single.state_dict()["state"]
    assert [entry["exp_avg"].shape for entry in state.values()] == [
        parameter.shape for parameter in module.parameters()
    ]
    return values


@pytest.mark.parametrize("partition", ["greedy", "contiguous"])
def test_without_ddp(partition, nodes, job):
    one, other = ranks.run(_collective, 2, [each.shm for each in nodes], job, partition)
    assert one == other


def _reduced(connection, rank, endpoints, per_node, job, can_reduce=True):
    """Trains with reduction="collective" and no DistributedDataParallel. Returns bits of the
    parameters and, by collective, how many elements were sent."""
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    module = small_model()
    sent = collections.Counter()
    reduce, all_reduce = dist.reduce, dist.all_reduce

    def counting_all_reduce(tensor, *args, **kwargs):
        sent["all_reduce"] += tensor.numel()
        return all_reduce(tensor, *args, **kwargs)

    def counting_reduce(tensor, *args, **kwargs):
        if not can_reduce:
            raise RuntimeError("Backend fake does not support reduce")
        sent["reduce"] += tensor.numel()
        return reduce(tensor, *args, **kwargs)

    dist.reduce, dist.all_reduce = counting_reduce, counting_all_reduce
    kwargs = {"across_nodes": "sharded"} if len(endpoints) > 1 else {}
    optimizer = optstate.AdamW(
        module.named_parameters(),
        lr=0.01,
        job=job,
        endpoint=endpoint,
        reduction="collective",
        **kwargs,
    )
    shared_out = optimizer._served.attachment.shared_out
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(module, 100 * step + rank).backward()
        if rank == 0:
            module[0].bias.grad = None  # the other rank has one
        own = [None if each.grad is None else each.grad.clone() for each in module.parameters()]
        optimizer.step()
        for index, (gradient, parameter) in enumerate(zip(own, module.parameters())):
            is_own = gradient is not None and torch.equal(gradient, parameter.grad)
            is_elsewhere = shared_out is not None and shared_out.shares[index][0].node != rank
            assert is_own == (is_elsewhere and gradient is not None)
    values = bits(module.parameters())
    optimizer.close()
    return values, sent


@pytest.mark.parametrize("can_reduce", [True, False])
def test_gradients_are_reduced_to_the_node_that_needs_them(can_reduce, nodes, daemon, job):
    """By an all-reduce where the backend has nothing else; of two ranks the bits are the same."""
    [one, _] = ranks.run(_reduced, 2, [daemon.shm], 2, job)
    two = ranks.run(_reduced, 2, [each.shm for each in nodes], 1, job, can_reduce)
    elements = sum(each.numel() for each in small_model().parameters())
    assert one[1]["all_reduce"] >= STEPS * elements and "reduce" not in one[1]
    for values, sent in two:
        assert values == one[0]
        assert sent["reduce"] == (STEPS * elements if can_reduce else 0)
        assert (sent["all_reduce"] >= STEPS * elements) != can_reduce
