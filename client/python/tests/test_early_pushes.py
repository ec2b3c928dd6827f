"""overlap=True: what happens to gradients between backward() and step() is in the step."""

from __future__ import annotations

import gc
import os

import optstate
import pytest
import ranks
import torch
from training import largest_difference, loss_of, small_model


def _run(optimizer_class, between, **options):
    """SGD, which does not forgive gradients that are too large."""
    model = small_model()
    optimizer = optimizer_class(model.parameters(), lr=0.05, momentum=0.9, **options)
    for step in range(6):
        optimizer.zero_grad()
        between(model, optimizer, step)
        optimizer.step()
    return model


def assert_as_torchs(between):
    ours = _run(optstate.SGD, between, overlap=True)
    assert largest_difference(ours, _run(torch.optim.SGD, between)) < 1e-6


@pytest.mark.parametrize("clips", [False, True])
def test_unscale_leaves_no_trace(clips):
    """The gradients that were pushed scaled are pushed again although unscale_ leaves no trace."""

    def run(optimizer_class, **options):
        model = small_model()
        optimizer = optimizer_class(model.parameters(), lr=0.05, momentum=0.9, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(optimizer)
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return model

    ours = run(optstate.SGD, overlap=True)
    assert largest_difference(ours, run(torch.optim.SGD)) < 1e-6


def test_gradients_that_were_dropped_are_not_those_at_their_address():
    """Gradients with an equal address and version may be others: memory is used again."""
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = optstate.SGD([parameter], lr=1.0, overlap=True)
    (parameter * torch.ones(1000)).sum().backward()
    dropped = parameter.grad.numpy()
    address = parameter.grad.data_ptr(), parameter.grad._version
    optimizer.zero_grad()
    dropped[:] = 100
    parameter.grad = torch.from_numpy(dropped)
    assert address == (parameter.grad.data_ptr(), parameter.grad._version)
    optimizer.step()
    assert parameter.tolist() == [-100.0] * 1000


def test_what_is_changed_in_place_or_replaced_is_noticed():
    def between(model, _, step):
        loss_of(model, step).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        if step % 3 == 0:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        elif step % 3 == 1:
            torch._foreach_mul_(gradients, 0.1)
        else:
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data * 0.3

    assert_as_torchs(between)


def test_a_step_that_the_daemon_refused_is_taken_again_whole(monkeypatch):
    def between(model, optimizer, step):
        loss_of(model, step).backward()
        if step != 3 or not isinstance(optimizer, optstate.SGD):
            return
        with monkeypatch.context() as patch:

            def refuse(*_, **__):
                raise optstate.InvalidArgumentError("not now")

            patch.setattr(optimizer._served.attachment.session, "commit", refuse)
            with pytest.raises(optstate.InvalidArgumentError):
                optimizer.step()

    assert_as_torchs(between)


def test_a_gradient_that_cannot_be_pushed_costs_the_others_nothing():
    """A sparse one ends backward(); made dense, all go with the step."""

    def run(optimizer_class, **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(10, 8, sparse=True), torch.nn.Linear(8, 4))
        # In this order the embedding's comes last.
        optimizer = optimizer_class([*model[1].parameters(), model[0].weight], lr=0.1, **options)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.tensor([1, 2, step + 3])).square().sum()
            if options:
                with pytest.raises(optstate.UnimplementedError, match="sparse"):
                    loss.backward()
            else:
                loss.backward()
            model[0].weight.grad = model[0].weight.grad.to_dense()
            optimizer.step()
        return model

    ours = run(optstate.SGD, overlap=True)
    assert largest_difference(ours, run(torch.optim.SGD)) < 1e-6


def test_a_dropped_optimizer_leaves_no_hooks():
    model = small_model()
    for _ in range(3):
        optimizer = optstate.SGD(model.parameters(), lr=0.1, overlap=True)
        del optimizer
        gc.collect()
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks


def test_a_forked_child_computes_gradients_of_its_own():
    model = small_model()
    optimizer = optstate.SGD(model.parameters(), lr=0.1, overlap=True)
    child = os.fork()
    if child == 0:
        try:
            loss_of(model, 0).backward()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    loss_of(model, 0).backward()
    optimizer.step()
    assert optimizer.committed_step == 1


def _edits_before_each_step(connection, rank, endpoint):
    """Rank 0 is ahead: its load reaches the daemon while rank 1's pushes are under way."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(500, 500)) for _ in range(4)]
    optimizer = optstate.SGD(
        parameters, lr=0.01, endpoint=endpoint, reduction="daemon", overlap=True
    )
    for step in range(25):
        optimizer.zero_grad()
        sum((each * each).sum() for each in parameters).backward()
        with torch.no_grad():
            parameters[0].clamp_(-1 / (step + 1), 1 / (step + 1))
        optimizer.step()
    return parameters[0].sum().item()


@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_ranks_that_edit_parameters_after_backward(wire, daemon):
    first, second = ranks.run(_edits_before_each_step, 2, getattr(daemon, wire))
    assert first == second


def _changes_under_ddp(connection, rank, endpoint, ours, as_views, what):
    from torch.nn.parallel import DistributedDataParallel

    module = small_model()
    model = DistributedDataParallel(module, gradient_as_bucket_view=as_views)
    if ours:
        model.register_comm_hook(None, optstate.ddp_hook)
        optimizer = optstate.SGD(
            module.parameters(), lr=0.1, endpoint=endpoint, reduction="daemon", overlap=True
        )
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def halve(parameter):
        parameter.grad = parameter.grad * 0.5

    if what == "hook":
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
    for step in range(4):
        optimizer.zero_grad()
        if what == "dropped":
            loss_of(model, 100 + step).backward()
            optimizer.zero_grad()
        elif what in ("dropped no_sync", "replaced"):
            with model.no_sync():
                loss_of(model, 100 + 2 * step + rank).backward()
            if what == "replaced":
                for parameter in module.parameters():
                    halve(parameter)
            else:
                optimizer.zero_grad()
        loss_of(model, 2 * step + rank).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in module.parameters()]


@pytest.mark.parametrize("what", ["dropped", "dropped no_sync", "replaced", "hook"])
@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
def test_under_ddp_no_change_is_taken_for_its_copy(as_views, what, daemon):
    ours = ranks.run(_changes_under_ddp, 2, daemon.shm, True, as_views, what)
    torchs = ranks.run(_changes_under_ddp, 2, daemon.shm, False, as_views, what)
    for mine, other in zip(ours, torchs):
        for found, expected in zip(mine, other):
            assert abs(found - expected).max() < 1e-6


def _under_ddp(connection, rank, endpoint, as_views, clear, accumulate):
    from torch.nn.parallel import DistributedDataParallel

    module = small_model()
    model = DistributedDataParallel(module, gradient_as_bucket_view=as_views)
    model.register_comm_hook(None, optstate.ddp_hook)
    optimizer = optstate.AdamW(
        module.parameters(),
        lr=0.01,
        endpoint=endpoint,
        reduction="daemon",
        overlap=True,
        accumulate=accumulate,
    )
    session = optimizer._served.attachment.session
    push, counts = session.push_gradients, []

    def counted(step, micro_step, parameters, pointers):
        counts.append(len(parameters))
        push(step, micro_step, parameters, pointers)

    session.push_gradients = counted
    pushed = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=clear)
        for micro_step in range(2 if accumulate else 1):
            counts.clear()
            loss_of(model, 4 * step + 2 * micro_step + rank).backward()
            in_backward = sum(counts)
            if micro_step == 0 and accumulate:
                optimizer.accumulate_step()
            else:
                optimizer.step()
            pushed.append((in_backward, sum(counts) - in_backward))
    if not accumulate:  # what is changed after DDP's copies is noticed still
        loss_of(model, rank).backward()
        torch._foreach_mul_([parameter.grad for parameter in module.parameters()], 0.5)
        counts.clear()
        optimizer.step()
        assert sum(counts) == 6
    return pushed, [parameter.detach().numpy() for parameter in module.parameters()]


# accumulate_step() drops gradients, so that there are none to set to zero.
@pytest.mark.parametrize(
    ("clear", "accumulate"),
    [(True, False), (False, False), (True, True)],
    ids=["none", "zeros", "accumulate"],
)
@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
def test_under_ddp_each_gradient_is_pushed_once(as_views, clear, accumulate, daemon):
    results = ranks.run(_under_ddp, 2, daemon.shm, as_views, clear, accumulate)
    # Views that are kept share one version: each gradient seems to change the others.
    again = 6 if as_views and not clear else 0
    for pushed, values in results:
        assert pushed[-1] == (6, again)
        assert set(pushed[1:]) == {(6, again)}
        for mine, other in zip(values, results[0][1]):
            assert (mine == other).all()


@pytest.mark.parametrize("accumulate", [False, True])
def test_overlap_gives_equal_bits(accumulate, seed):
    """Pushed during backward() or at step(): the same, also when gradients change in
    between, add up, or are dropped."""

    def train(overlap):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 10)
        )
        optimizer = optstate.AdamW(
            model.parameters(), lr=1e-2, overlap=overlap, accumulate=accumulate, max_norm=1.0
        )
        for step in range(12):
            optimizer.zero_grad()
            if accumulate:
                model(torch.randn(8, 30)).square().mean().backward()
                optimizer.accumulate_step()
            model(torch.randn(8, 30)).square().mean().backward()
            if step % 4 == 1 and not accumulate:
                model(torch.randn(8, 30)).square().mean().backward()  # adds up
            if step % 4 == 2 and not accumulate:
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
            if step % 4 == 3 and not accumulate:
                model[0].bias.grad = None  # pushed already
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    for mine, theirs in zip(train(True), train(False)):
        assert torch.equal(mine, theirs)


def test_overlap_cannot_take_back_a_micro_step():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optstate.SGD([parameter], lr=0.1, overlap=True, accumulate=True)
    parameter.square().sum().backward()
    optimizer.accumulate_step()
    parameter.square().sum().backward()
    parameter.grad.mul_(2)
    with pytest.raises(RuntimeError, match="abort_step"):
        optimizer.step()
    optimizer.abort_step()
    optimizer.zero_grad()
    parameter.square().sum().backward()
    optimizer.step()
    assert torch.equal(parameter, torch.full((3,), 1 - 0.1 * 2.0))
