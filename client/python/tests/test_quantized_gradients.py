"""Gradients of one byte an element, with error feedback (communication_dtype="int8")."""

from __future__ import annotations

import math
import struct

import nodes as on_nodes
import numpy as np
import optstate
import pytest
import ranks
import torch
from optstate._torch.collective.averaging import Destination, reduce_gradients
from optstate._torch.collective.error_feedback import ErrorFeedback
from optstate._torch.collective.quantized import BLOCK, quantize, quantize_blocks
from optstate._torch.collective.reducing import reducing
from optstate._torch.ranks import Ranks
from training import bits, loss_of, small_model

nodes = on_nodes.nodes
SHAPES = [(3,), (40, 50), (), (7, 0), (900,), (2, 3, 4)]
INF = float("inf")


def _how(**options):
    names = ("communication_dtype", "bucket_cap_mb", "gradient_predivide_factor", "reduction_op")
    options = {"communication_dtype": "int8", **options}
    return reducing(*map(options.get, names), reduction="collective")


def _by_hand(block):
    """Returns scale and codes of a block of Python floats, by the words of quantized.py alone."""
    if any(not abs(each) < 3.4e38 for each in block):
        return math.nan, [0] * len(block)
    largest = max(map(abs, block))
    if not largest:
        return 0.0, [0] * len(block)
    (number,) = struct.unpack("<I", struct.pack("<f", largest / 127))
    number = (max(number, 1) + 255) // 256 * 256
    (scale,) = struct.unpack("<f", struct.pack("<I", number))
    return scale, [max(-127, min(127, round(each / scale))) for each in block]


def test_blocks_beside_plain_arithmetic():
    generator = np.random.default_rng(5)
    blocks = generator.standard_normal((40, BLOCK)) * 10.0 ** generator.uniform(-44, 38, (40, 1))
    blocks[3, 7], blocks[4, 0], blocks[5, 255] = np.nan, np.inf, -np.inf
    blocks[6], blocks[7, 1:] = 0.0, 0.0
    blocks[8] = np.repeat([1.5, -2.5, 127.0, 0.5], BLOCK // 4)  # halves, to nearest even
    blocks[9, 0] = 3.4e38
    scales, codes = quantize_blocks(torch.from_numpy(blocks))
    for block, scale, of_block in zip(blocks.tolist(), scales.tolist(), codes.tolist()):
        expected, expected_codes = _by_hand(block)
        assert scale == expected or math.isnan(scale) and math.isnan(expected)
        assert of_block == expected_codes
    assert scales.isnan().sum() == 4


@pytest.mark.parametrize("numel", [0, 1, 256, 257, 5000])
def test_what_is_left_out(numel):
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    before = torch.randn(numel, generator=torch.Generator().manual_seed(1)) / 100
    after = torch.empty(numel)
    scales, codes = quantize(gradient, before, after, 1.0)
    assert codes.shape == (-(-numel // BLOCK), BLOCK) and scales.numel() == codes.shape[0]
    sent = (codes.double() * scales.double()[:, None]).view(-1)
    assert not sent[numel:].any()
    left_out = gradient.double() + before.double() - sent[:numel]
    assert torch.equal(after, left_out.float())
    # Half a code at most.
    assert (after.abs() <= scales.repeat_interleave(BLOCK)[:numel] * 0.5000001).all()
    # A block that is not sent leaves its feedback as it was.
    if numel > 256:
        gradient[3] = INF
        quantize(gradient, before, after, 1.0)
        assert torch.equal(after[:256], before[:256])
        assert not torch.equal(after[256:], before[256:])


def _gradients(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def _sums(connection, rank, world):
    """Adds up what 30 steps give, and what is left out of them: it is the gradients."""
    everyone = Ranks(None)
    tensors = [torch.zeros(shape) for shape in SHAPES]
    feedback, how = ErrorFeedback(), _how(reduction_op="sum")
    given = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    expected = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    furthest = 0.0
    for step in range(30):
        for tensor, gradient in zip(tensors, _gradients(rank, step)):
            tensor.grad = gradient
        # A step that is skipped, or given up, has no part in it.
        if step % 5 == 4:
            reduce_gradients(everyone, tensors, None, how, feedback)
            if step % 2:
                feedback.end_step(applied=False)
            continue
        reduce_gradients(everyone, tensors, None, how, feedback)
        feedback.end_step(applied=True)
        for total, tensor in zip(given, tensors):
            total += tensor.grad.double()
        for total, *of_ranks in zip(expected, *(_gradients(each, step) for each in range(world))):
            total += sum(each.double() for each in of_ranks)
        furthest = max(furthest, (given[1] - expected[1]).abs().max().item())
    left_out = [feedback.begin(tensor)[0] for tensor in tensors]
    everyones = everyone.gather(
        [each.double().view(tensor.shape) for each, tensor in zip(left_out, tensors)]
    )
    for total, exact, *of_ranks in zip(given, expected, *everyones):
        torch.testing.assert_close(total + sum(of_ranks), exact, rtol=1e-5, atol=1e-5)
    return furthest, bits(given)


def test_nothing_is_lost():
    found = ranks.run(_sums, 3, 3)
    assert len({repr(each) for each in found}) == 1
    # A step leaves out up to half a code of each rank, and so do 24 steps: it does not add up.
    assert 0.001 < found[0][0] < 3 * 5 / 127


def _sizes(connection, rank):
    """The result does not depend on buckets, nor on which ranks get which rows."""
    everyone = Ranks(None)
    found = {}
    for name, options, is_cut in (
        ("whole", {}, False),
        ("least", {"bucket_cap_mb": 4096 / (1 << 20)}, False),
        ("cut", {}, True),
        ("least and cut", {"bucket_cap_mb": 4096 / (1 << 20)}, True),
    ):
        tensors = [torch.zeros(shape) for shape in SHAPES if shape]
        where = None
        if is_cut:
            where = {
                each: [
                    Destination(0, 0, each.shape[0] // 3),
                    Destination(1, each.shape[0] // 3, each.shape[0]),
                ]
                for each in tensors
            }
        feedback, results = ErrorFeedback(), []
        for step in range(2):
            own = [each for each in _gradients(rank, step) if each.dim()]
            for tensor, gradient in zip(tensors, own):
                tensor.grad = gradient.clone()
            # This one has other strides.
            tensors[1].grad = tensors[1].grad.T.contiguous().T
            reduce_gradients(everyone, tensors, where, _how(**options), feedback)
            feedback.end_step(applied=True)
            for tensor, gradient in zip(tensors, own):
                third = tensor.shape[0] // 3
                mine = slice(0, third) if rank == 0 else slice(third, None)
                results.append(tensor.grad[mine].clone())
                if is_cut:
                    others = slice(third, None) if rank == 0 else slice(0, third)
                    assert torch.equal(tensor.grad[others], gradient[others])
        found[name] = bits(results)
    assert len({repr(each) for each in found.values()}) == 1
    return True


def test_results_are_the_same_however_they_are_sent():
    assert ranks.run(_sizes, 2) == [True, True]


class _Ends(Ranks):
    """Ranks that do not reach each other when they send gradients."""

    def tensors_of_all(self, tensor, destination):
        raise optstate.UnavailableError("the ranks do not reach each other")


def _edges(connection, rank):
    everyone = Ranks(None)
    tensors = [torch.zeros(300), torch.zeros(300), torch.zeros(300)]
    feedback = ErrorFeedback()

    def reduce(*gradients, continues=False, ranks=everyone, **options):
        for tensor, gradient in zip(tensors, gradients):
            tensor.grad = gradient
        reduce_gradients(ranks, tensors, None, _how(**options), feedback, continues=continues)
        return [each.grad for each in tensors]

    mine = torch.full((300,), 1.0 + rank)
    # One rank has no gradient, and no rank has one of the last.
    first, second, third = reduce(mine.clone(), mine.clone() if rank else None, None)
    torch.testing.assert_close(first, torch.full((300,), 1.5), rtol=1e-2, atol=0)
    torch.testing.assert_close(second, torch.full((300,), 1.0), rtol=1e-2, atol=0)
    assert third is None
    feedback.end_step(applied=True)
    # NaN and Inf are found by the daemon, and values at the end of the range are held.
    broken = mine.clone()
    broken[5] = (INF, 1.0)[rank]
    first, *_ = reduce(broken, None, None)
    assert first[:256].isnan().all() and not first[256:].isnan().any()
    feedback.end_step(applied=False)
    large = torch.full((300,), 2e38)
    assert reduce(large.clone(), None, None, reduction_op="sum")[0].isinf().all()
    held = reduce(large.clone(), None, None, gradient_predivide_factor=4.0)[0]
    torch.testing.assert_close(held, large, rtol=1e-2, atol=0)
    # Micro-steps of one step go on with what the one before left out; a step begun anew does not.
    tensor = tensors[0]
    feedback.end_step(applied=False)
    values = torch.randn(300, generator=torch.Generator().manual_seed(rank))
    reduce(values.clone(), None, None)
    once = feedback.begin(tensor)[0].clone()
    # A reduction that fails leaves what the micro-step before has left out.
    with pytest.raises(optstate.UnavailableError):
        reduce(values.clone(), None, None, continues=True, ranks=_Ends(None))
    assert torch.equal(feedback.begin(tensor)[0], once)
    # A loss scale that changes changes what was left out before.
    feedback.loss_scale = 0.25
    assert torch.equal(feedback.begin(tensor)[0], once / 4)
    feedback.loss_scale = 1.0
    feedback.give_up(tensor)
    reduce(values.clone(), None, None)
    reduce(values.clone(), None, None, continues=True)
    twice = feedback.begin(tensor)[0].clone()
    feedback.give_up(tensor)
    reduce(values.clone(), None, None)
    assert torch.equal(feedback.begin(tensor)[0], once) and not torch.equal(once, twice)
    return True


def test_missing_and_unusual_gradients():
    assert ranks.run(_edges, 2) == [True, True]


def _without_gather(connection, rank):
    """A process group whose backend has no gather."""
    import torch.distributed as dist

    def refusing(*_, **__):
        raise RuntimeError("Backend fake does not support gather")

    gather, dist.gather = dist.gather, refusing
    everyone = Ranks(None)
    found = [everyone.tensors_of_all(torch.tensor([rank]), destination=1) for _ in range(2)]
    dist.gather = gather
    return [[each.tolist() for each in of_all] for of_all in found]


def test_a_process_group_without_gather():
    assert ranks.run(_without_gather, 2) == [[[], []], [[[0], [1]]] * 2]


def _interrupted(connection, rank, endpoint, job, skips, interrupts):
    """Steps of which the script does not see the end, with micro-steps and a loss scale that
    changes; returns bits. skips: that step has a gradient that is infinite."""
    module = small_model()
    optimizer = optstate.SGD(
        module.named_parameters(),
        lr=0.05,
        job=job,
        endpoint=endpoint,
        reduction="collective",
        communication_dtype="int8",
        accumulate=True,
        loss_scaler=optstate.LossScaler(init_scale=64.0, growth_interval=2),
    )
    session = optimizer._served.attachment.session
    commit = session.commit

    def committing(*how, **more):
        outcome = commit(*how, **more)
        if interrupts and outcome.step == 3:
            raise KeyboardInterrupt
        return outcome

    session.commit = committing
    for step in range(6):
        assert optimizer.committed_step == step  # this reads what an interrupted step has made
        for micro_step in range(2):
            optimizer.zero_grad()
            loss = loss_of(module, 4 * step + 2 * micro_step + rank)
            optimizer.scale(loss).backward()
            if not micro_step:
                optimizer.accumulate_step()
        if skips and step == 2 and rank == 0:
            module[0].weight.grad[0, 0] = INF
        try:
            optimizer.step()
        except KeyboardInterrupt:
            assert interrupts and step == 2
    assert optimizer.committed_step == 6
    result = bits(module.parameters())
    optimizer.close()
    return result


@pytest.mark.parametrize("skips", [False, True])
def test_feedback_of_a_step_whose_end_was_not_seen(skips, daemon, job):
    smooth = ranks.run(_interrupted, 2, daemon.shm, f"{job}-smooth", skips, False)
    assert smooth[0] == smooth[1]
    assert ranks.run(_interrupted, 2, daemon.shm, job, skips, True) == smooth


def _train(connection, rank, endpoints, job, options, skips=None):
    module = small_model()
    per_node = 2 // len(endpoints)
    endpoint = on_nodes.enter(rank, endpoints, per_node)
    optimizer = optstate.AdamW(
        module.named_parameters(),
        lr=0.01,
        job=job,
        endpoint=endpoint,
        reduction="collective",
        **options,
    )
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = loss_of(module, 2 * step + rank)
        losses.append(loss.item())
        loss.backward()
        if step == skips and rank == 0:
            module[0].weight.grad[0, 0] = INF
        optimizer.step()
        if optimizer.last_outcome.applied == (step == skips):
            raise AssertionError(step)
    result = bits(module.parameters()), losses
    optimizer.close()
    return result


def test_steps_on_one_node_and_on_several(nodes, daemon, job):
    int8, places = {"communication_dtype": "int8"}, [each.shm for each in nodes]
    found = ranks.run(_train, 2, [daemon.shm], job, int8, 7)
    for name, across in (
        ("replicated", {"across_nodes": "replicated"}),
        ("sharded", {"across_nodes": "sharded"}),
        ("cut", {"across_nodes": "sharded", "partition": "contiguous"}),
    ):
        found += ranks.run(_train, 2, places, f"{job}-{name}", {**int8, **across}, 7)
    assert len({repr(each) for each, _ in found}) == 1
    # It learns as with float32.
    exact = ranks.run(_train, 2, [daemon.shm], f"{job}-exact", {}, 7)
    assert exact[0][0] != found[0][0]
    for (_, ours), (_, theirs) in zip(found, exact):
        assert sum(ours[-5:]) < 0.5 * sum(ours[:5])
        assert sum(ours[-5:]) == pytest.approx(sum(theirs[-5:]), rel=0.02)
