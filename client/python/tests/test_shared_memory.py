"""Parameters that share memory: refused, by one optimizer, several, and several processes."""

from __future__ import annotations

import gc
import multiprocessing

import optstate
import pytest
import torch
from optstate._torch.parameters.memory import overlap, place_of
from ranks import running, say


def parameter(values: torch.Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(values)
    assert made.data_ptr() == values.data_ptr()
    return made


def overlapping(kind: str) -> list[torch.nn.Parameter]:
    base = torch.arange(24.0).reshape(4, 6)
    return [
        parameter(each)
        for each in {
            "transposed": (base, base.t()),
            "column": (base, base[:, 2]),
            "crossing": (base[1], base[:, 3]),
            "columns": (base[:, 0:3], base[:, 2:5]),
            "steps": (base[:, ::2], base[:, ::4]),
            "types": (base, base.view(torch.bfloat16)[:, 3]),
            "reshaped": (base.view(-1)[3:9], base[1]),
        }[kind]
    ]


def interleaved(kind: str) -> list[torch.nn.Parameter]:
    base = torch.arange(24.0).reshape(4, 6)
    return [
        parameter(each)
        for each in {
            "columns": (base[:, 0], base[:, 1]),
            "even and odd": (base[:, ::2], base[:, 1::2]),
            "halves": (base[:, :3], base[:, 3:]),
            "rows": (base[0], base[1:]),
            "blocks": (base[:2, :3], base[2:, 3:]),
            "empty": (base, base[2:2]),
            "one between": (base[:, 1:2], base[:, 3]),
        }[kind]
    ]


OVERLAPPING = ["transposed", "column", "crossing", "columns", "steps", "types", "reshaped"]
INTERLEAVED = ["columns", "even and odd", "halves", "rows", "blocks", "empty", "one between"]


@pytest.mark.parametrize("kind", OVERLAPPING)
@pytest.mark.parametrize("order", [1, -1])
def test_views_that_overlap_are_refused(kind, order):
    with pytest.raises(ValueError, match=r'"0.0" and "0.1"|"0.1" and "0.0"') as raised:
        optstate.SGD(overlapping(kind)[::order], lr=0.1)
    assert "use the same Parameter" in str(raised.value)


@pytest.mark.parametrize("kind", INTERLEAVED)
def test_views_without_an_element_in_common_train_as_torchs(kind):
    mine, theirs = interleaved(kind), interleaved(kind)
    for optimizer, parameters in (
        (optstate.SGD(mine, lr=0.5), mine),
        (torch.optim.SGD(theirs, lr=0.5), theirs),
    ):
        for _ in range(3):
            optimizer.zero_grad()
            sum(each.square().sum() for each in parameters).backward()
            optimizer.step()
    assert all(map(torch.equal, mine, theirs))


def test_whether_random_views_overlap(seed):
    """Beside a look at every element."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    memory = torch.zeros(400)
    found = {True: 0, False: 0}
    for _ in range(2000):
        views = []
        for _ in range(2):
            counts = [draw(1, 5) for _ in range(draw(0, 4))]
            strides = [draw(0, 12) for _ in counts]
            views.append(memory.as_strided(counts, strides, draw(0, 200)))
        elements = []
        for view in views:
            memory.zero_()
            view.fill_(1)
            elements.append(memory.clone())
        expected = bool((elements[0] * elements[1]).any())
        one, other = (place_of(view, "") for view in views)
        if not (one.begin < other.end and other.begin < one.end):
            assert not expected
            continue
        assert overlap(one, other) == expected, [(v.shape, v.stride()) for v in views]
        found[expected] += 1
    assert min(found.values()) > 100


@pytest.mark.parametrize("model", [True, False])
def test_memory_that_is_tied_later_is_refused(model):
    """torch would make both updates there."""
    one, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = optstate.SGD([one, other], lr=0.1)
    one.grad, other.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    before = other.detach().clone()
    one.data = other.data
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()
    assert torch.equal(one, before) and optimizer.committed_step == 1
    one.data = other.data.clone()
    optimizer.step()
    assert optimizer.committed_step == 2


@pytest.mark.parametrize("view", [lambda base: base[1], lambda base: base.t()])
def test_views_of_another_optimizers_parameters_are_refused(view):
    base = torch.ones(3, 4)
    first = optstate.SGD([("base", parameter(base))], lr=0.1)
    with pytest.raises(ValueError, match=f'"base" of job "{first.job}"') as raised:
        optstate.SGD([("view", parameter(view(base)))], lr=0.1)
    assert '"view"' in str(raised.value)
    first.close()
    second = optstate.SGD([("view", parameter(view(base)))], lr=0.1)
    del second
    gc.collect()
    optstate.SGD([("base", parameter(base))], lr=0.1)


def test_a_parameter_may_be_in_two_optimizers():
    """Each optimizer sees what the other has written, as in torch."""
    mine, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    for parameter_, optimizers in (
        (mine, [optstate.SGD([mine], lr=0.25), optstate.SGD([mine], lr=0.5)]),
        (theirs, [torch.optim.SGD([theirs], lr=0.25), torch.optim.SGD([theirs], lr=0.5)]),
    ):
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
                parameter_.square().sum().backward()
                optimizer.step()
    assert torch.equal(mine, theirs)


def _train_shared(connection, rank, shared, endpoint):
    connection.recv()
    try:
        optimizer = optstate.SGD([("w", shared)], lr=1.0, endpoint=endpoint)
    except RuntimeError as error:
        say(connection, str(error))
        connection.recv()
        optimizer = optstate.SGD([("w", shared)], lr=1.0, endpoint=endpoint)
    else:
        say(connection, "")
        connection.recv()
    shared.grad = torch.ones_like(shared)
    optimizer.step()
    optimizer.close()
    return shared.tolist()


def test_processes_that_train_shared_parameters_are_refused(daemon):
    """Hogwild: torch's optimizers add up there; each of ours would write its own values."""
    shared = torch.nn.Parameter(torch.zeros(2))
    shared.share_memory_()
    with running(_train_shared, 2, shared, daemon.shm, grouped=False) as ranks:
        ranks.connections[0].send("begin")
        assert ranks.hear(0) == ""
        ranks.connections[1].send("begin")
        refusal = ranks.hear(1)
        assert '"w" is in shared memory' in refusal and 'reduction="daemon"' in refusal
        ranks.connections[0].send("train")
        assert ranks._receive(0, "result") == [-1.0, -1.0]
        # The first has closed: now it is the second's, which begins with what is there.
        ranks.connections[1].send("train")
        assert ranks._receive(1, "result") == [-2.0, -2.0]
    assert shared.tolist() == [-2.0, -2.0]


def _in_a_fork(function):
    """Returns the function's result in a child that has all of this process's memory."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(function()), daemon=True)
    child.start()
    assert ours.poll(60)
    found = ours.recv()
    child.join(60)
    return found


def _construct_and_step(shared, endpoint):
    try:
        with optstate.SGD([("w", shared)], lr=1.0, endpoint=endpoint) as optimizer:
            shared.grad = torch.ones_like(shared)
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return shared.tolist()


@pytest.mark.parametrize("shares", ["before", "after", "after, and uploads"])
def test_a_forked_process_is_refused(shares, daemon):
    """A forked process inherits what this one knows of its locks, and not the locks."""
    shared = torch.nn.Parameter(torch.zeros(2))
    if shares == "before":
        shared.share_memory_()
    optimizer = optstate.SGD([("w", shared)], lr=1.0, endpoint=daemon.shm)
    if shares != "before":
        shared.share_memory_()
    if shares == "after, and uploads":
        optimizer.upload_parameters()
    else:
        shared.grad = torch.ones_like(shared)
        optimizer.step()
    before = shared.tolist()
    said = _in_a_fork(lambda: _construct_and_step(shared, daemon.shm))
    assert '"w" is in shared memory' in said
    assert shared.tolist() == before
    optimizer.close()
    said = _in_a_fork(lambda: _construct_and_step(shared, daemon.shm))
    assert said == shared.tolist() == [each - 1 for each in before]


def test_who_shares_its_parameters_later_may_be_the_second_process(daemon):
    shared = torch.nn.Parameter(torch.zeros(2))
    optimizer = optstate.SGD([("w", shared)], lr=1.0, endpoint=daemon.shm)
    with running(_train_shared, 1, shared, daemon.shm, grouped=False) as ranks:
        ranks.connections[0].send("begin")
        assert ranks.hear(0) == ""
        shared.grad = torch.ones_like(shared)
        with pytest.raises(RuntimeError, match='"w" is in shared memory'):
            optimizer.step()
        ranks.connections[0].send("train")
        assert ranks._receive(0, "result") == [-1.0, -1.0]
    optimizer.step()
    assert optimizer.committed_step == 1


def test_one_process_may_train_shared_parameters():
    shared = torch.nn.Parameter(torch.zeros(2))
    shared.share_memory_()
    for _ in range(2):
        with optstate.SGD([shared], lr=1.0) as optimizer, optstate.SGD([shared], lr=1.0):
            shared.grad = torch.ones_like(shared)
            optimizer.step()
    assert shared.tolist() == [-2.0, -2.0]
