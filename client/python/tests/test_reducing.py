"""How step() reduces gradients with reduction="collective": dtype, buckets, a factor, sum."""

from __future__ import annotations

import nodes as on_nodes
import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from optstate._torch.collective.averaging import Destination, reduce_gradients
from optstate._torch.collective.error_feedback import ErrorFeedback
from optstate._torch.collective.reducing import reducing
from optstate._torch.ranks import Ranks
from training import bits, loss_of, small_model, values_of

nodes = on_nodes.nodes
SHAPES = [(3,), (40, 50), (), (7, 0), (900,), (2, 3, 4)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The least bucket has 1024 elements of float32: the matrix is cut.
LEAST = 4096 / (1 << 20)
OPTIONS = {
    "none": {},
    "named": {"communication_dtype": "float32", "reduction_op": "mean"},
    "cut": {"bucket_cap_mb": LEAST},
    "sum": {"reduction_op": "sum", "bucket_cap_mb": 25},
    "predivided": {"gradient_predivide_factor": 3.0},
    "bfloat16": {"communication_dtype": "bfloat16"},
    "all": {
        "communication_dtype": torch.bfloat16,
        "bucket_cap_mb": LEAST,
        "gradient_predivide_factor": 1.7,
        "reduction_op": "sum",
    },
}


def _how(**options):
    names = ("communication_dtype", "bucket_cap_mb", "gradient_predivide_factor", "reduction_op")
    return reducing(*map(options.get, names), reduction="collective")


def _gradients(rank, dtype):
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def _reduced(gradients, **options):
    """Returns what reduce_gradients() makes of this rank's gradients."""
    tensors = [torch.zeros_like(each) for each in gradients]
    for tensor, gradient in zip(tensors, gradients):
        tensor.grad = gradient
    reduce_gradients(Ranks(None), tensors, None, _how(**options), ErrorFeedback())
    return [each.grad for each in tensors]


def _cases(connection, rank):
    found = {}
    for name, options in OPTIONS.items():
        for dtype in DTYPES:
            found[name, dtype] = bits(_reduced(_gradients(rank, dtype), **options))
    return found


def test_all_options_beside_sums_in_float64():
    world = 3
    of_ranks = ranks.run(_cases, world)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]  # the bits are the same on all ranks
    for (name, dtype), found in of_ranks[0].items():
        everyones = [_gradients(rank, dtype) for rank in range(world)]
        divisor = 1 if "sum" in OPTIONS[name].values() else world
        is_coarse = name in ("bfloat16", "all")
        # Each rank's gradient is rounded, then each sum of two, and the result.
        eps = torch.finfo(torch.bfloat16 if is_coarse else torch.float32).eps
        for content, *gradients in zip(found, *everyones):
            if not content:  # of the tensor without elements
                continue
            result = torch.frombuffer(bytearray(content), dtype=dtype)
            exact = sum(each.double() for each in gradients).flatten() / divisor
            sizes = sum(each.double().abs() for each in gradients).flatten() / divisor
            bound = (world + 1) * eps * sizes + torch.finfo(dtype).eps * exact.abs()
            assert ((result.double() - exact).abs() <= bound).all(), (name, dtype)
    for dtype in DTYPES:
        of = {name: of_ranks[0][name, dtype] for name in OPTIONS}
        assert of["none"] == of["named"]
        assert len({repr(of[name]) for name in ("none", "sum", "bfloat16", "all")}) == 4


def _exact(connection, rank):
    """Returns, of two ranks, what can be told to the bit: there is one addition."""
    mine = torch.randn(500, generator=torch.Generator().manual_seed(rank))
    both = [torch.randn(500, generator=torch.Generator().manual_seed(each)) for each in range(2)]

    def check(expected, **options):
        found = _reduced([mine.clone()], **options)[0]
        assert torch.equal(found, expected), options

    one, other = both
    check((one + other) / 2)
    check(one + other, reduction_op="sum")
    halves = (one.bfloat16().float() + other.bfloat16().float()).bfloat16().float()
    assert not torch.equal(halves, one + other)
    check(halves / 2, communication_dtype="bfloat16")
    check(halves, communication_dtype="bfloat16", reduction_op="sum", bucket_cap_mb=LEAST)
    thirds = [(each.double() / 3).float() for each in both]
    sums = thirds[0] + thirds[1]
    check((sums.double() * 3 / 2).float(), gradient_predivide_factor=3)
    # A sum that no float32 holds is Inf, which skips the step. Divided before, it is held.
    large = torch.full((4,), 3e38)
    assert _reduced([large.clone()])[0].isinf().all()
    held = _reduced([large.clone()], gradient_predivide_factor=2.0)[0]
    assert torch.equal(held, large)
    return True


def test_roundings_and_factors():
    assert ranks.run(_exact, 2) == [True, True]


class _Twins:
    """Two ranks with the same gradients, without a process group; notes what is sent."""

    rank, world_size = 0, 2

    def __init__(self):
        self.sent = []

    def add_up(self, tensor):
        self.sent.append((tensor.dtype, tensor.numel()))
        tensor.mul_(2)

    def add_up_at(self, tensor, destination):
        self.sent.append((destination, tensor.numel()))
        if destination == self.rank:
            tensor.mul_(2)


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, [(torch.float32, 3510)]),
        ({"bucket_cap_mb": LEAST}, [(torch.float32, n) for n in (1024, 1024, 1024, 438)]),
        (
            {"bucket_cap_mb": LEAST, "communication_dtype": "bfloat16"},
            [(torch.bfloat16, n) for n in (2048, 1462)],
        ),
        ({"bucket_cap_mb": 25, "reduction_op": "sum"}, [(torch.float32, 3510)]),
    ],
    ids=str,
)
def test_buckets_cut_large_gradients(options, sent):
    twins = _Twins()
    sizes = [(3000,), (10,), (0,), (25, 20), (6,)]
    tensors = [torch.zeros(size) for size in sizes]
    for tensor in tensors[:4]:  # no rank has a gradient of the last one
        tensor.grad = torch.randn(tensor.shape).bfloat16().float()
    tensors[3].grad = tensors[3].grad.T.contiguous().T  # of other strides
    before = [each.grad.clone() for each in tensors[:4]]
    reduce_gradients(twins, tensors, None, _how(**options), ErrorFeedback())
    # Which gradients there are, and which were reduced before.
    assert twins.sent[0] == (torch.int32, 10)
    assert twins.sent[1:] == sent
    factor = 2 if "reduction_op" in options else 1
    for tensor, expected in zip(tensors, before):
        assert torch.equal(tensor.grad, factor * expected)
    assert tensors[3].grad.stride() == (1, 25) and tensors[4].grad is None


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": LEAST}], ids=str)
def test_gradients_go_where_they_are_needed(options):
    twins = _Twins()
    tensors = [torch.zeros(1500), torch.zeros(1500)]
    for tensor in tensors:
        tensor.grad = torch.ones(1500)
    where = {tensors[0]: [Destination(1, 0, 1500)], tensors[1]: [Destination(0, 0, 1500)]}
    reduce_gradients(twins, tensors, where, _how(reduction_op="sum", **options), ErrorFeedback())
    # Gradients of the other rank's parameter stay this rank's own.
    assert torch.equal(tensors[0].grad, torch.ones(1500))
    assert torch.equal(tensors[1].grad, torch.full((1500,), 2.0))
    parts = [1024, 476] if options else [1500]
    assert twins.sent[1:] == [(rank, size) for rank in (0, 1) for size in parts]


def test_rows_go_where_they_are_needed():
    twins = _Twins()
    tensor = torch.zeros(5, 3)
    tensor.grad = torch.ones(5, 3)
    where = {tensor: [Destination(0, 0, 2), Destination(1, 2, 5)]}
    reduce_gradients(twins, [tensor], where, _how(reduction_op="sum"), ErrorFeedback())
    assert tensor.grad.tolist() == [[2.0] * 3] * 2 + [[1.0] * 3] * 3
    assert twins.sent[1:] == [(0, 6), (1, 9)]


def _refused(**options):
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises((ValueError, TypeError)) as raised:
        optstate.SGD([parameter], lr=0.1, **options)
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize("reduction", ["trainer", "daemon"])
@pytest.mark.parametrize(
    "option",
    [
        {"communication_dtype": "float32"},
        {"bucket_cap_mb": 25},
        {"gradient_predivide_factor": 1.0},
        {"reduction_op": "mean"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_where_step_reduces_nothing_they_are_refused(reduction, option):
    kind, said = _refused(reduction=reduction, **option)
    assert kind is ValueError and said.startswith(f"{next(iter(option))}= ")
    assert f'With reduction="{reduction}" it reduces none' in said


@pytest.mark.parametrize(
    ("option", "kind", "text"),
    [
        ({"communication_dtype": "float16"}, ValueError, "'float16' (float32, bfloat16 or int8)"),
        ({"communication_dtype": torch.float64}, ValueError, "(float32, bfloat16 or int8)"),
        ({"reduction_op": "max"}, ValueError, "'max' (mean or sum)"),
        ({"bucket_cap_mb": 0.001}, ValueError, "1048 bytes (at least 4096)"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb: 0 (finite, above 0)"),
        ({"bucket_cap_mb": True}, TypeError, "bucket_cap_mb is True, not a number"),
        ({"bucket_cap_mb": "25MiB"}, TypeError, "not a number"),
        ({"gradient_predivide_factor": -1.0}, ValueError, "predivide_factor: -1.0"),
        ({"gradient_predivide_factor": float("inf")}, ValueError, "finite"),
        ({"gradient_predivide_factor": float("nan")}, ValueError, "finite"),
    ],
    ids=str,
)
def test_values_that_cannot_be(option, kind, text):
    found, said = _refused(reduction="collective", **option)
    assert found is kind and text in said and next(iter(option)) in said


def _differ(connection, rank):
    option = {"bucket_cap_mb": 1 + rank} if rank == 2 else {"bucket_cap_mb": 1}
    return _refused(reduction="collective", communication_dtype="bfloat16", **option)


def test_ranks_give_the_same(daemon):
    for kind, said in ranks.run(_differ, 3):
        assert kind is ValueError and "give all ranks the same" in said
        assert (
            'rank 2 reduces gradients with communication_dtype="bfloat16", bucket_cap_mb=3' in said
        )
        assert 'rank 0 with communication_dtype="bfloat16", bucket_cap_mb=1,' in said


def _lacks_bfloat16(connection, rank):
    """The process group's backend refuses the dtype, as gloo did in older torch."""
    all_reduce = dist.all_reduce

    def refusing(tensor, *rest, **options):
        if tensor.dtype is torch.bfloat16:
            raise RuntimeError("Invalid scalar type")
        return all_reduce(tensor, *rest, **options)

    dist.all_reduce = refusing
    module = small_model()
    with optstate.AdamW(
        module.parameters(), reduction="collective", communication_dtype="bfloat16"
    ) as optimizer:
        loss_of(module, rank).backward()
        with pytest.raises(optstate.UnimplementedError, match="communication_dtype") as raised:
            optimizer.step()
    return str(raised.value)


def test_a_process_group_without_the_dtype(daemon):
    for said in ranks.run(_lacks_bfloat16, 2):
        assert "Invalid scalar type" in said and "another backend" in said


def _train(connection, rank, endpoints, job, across, options):
    module = small_model()
    endpoint = on_nodes.enter(rank, endpoints, 1) if across else endpoints[0]
    optimizer = optstate.SGD(
        module.named_parameters(),
        lr=0.05,
        momentum=0.9,
        job=job,
        endpoint=endpoint,
        reduction="collective",
        across_nodes=across,
        **options,
    )
    for step in range(4):
        optimizer.zero_grad()
        loss_of(module, 2 * step + rank).backward()
        optimizer.step()
    result = bits(module.parameters()), values_of(module)
    optimizer.close()
    return result


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS["all"],
        {"gradient_predivide_factor": 2, "communication_dtype": "float32"},
    ],
    ids=["all", "float32"],
)
def test_steps_on_several_nodes(options, nodes, daemon, job):
    places = [each.shm for each in nodes]
    found = ranks.run(_train, 2, [daemon.shm], job, None, options)
    found += ranks.run(_train, 2, places, job, "replicated", options)
    found += ranks.run(_train, 2, places, f"{job}-sharded", "sharded", options)
    assert len({repr(each) for each, _ in found}) == 1
    module = small_model()
    reference = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        reference.zero_grad()
        for rank in range(2):  # backward() adds up
            loss_of(module, 2 * step + rank).backward()
        if "reduction_op" not in options:
            for each in module.parameters():
                each.grad /= 2
        reference.step()
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if "reduction_op" in options else {}
    for values, expected in zip(found[0][1], module.parameters()):
        torch.testing.assert_close(torch.from_numpy(values), expected.detach(), **tolerance)
