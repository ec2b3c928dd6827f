"""torch's Join, for inputs that run out on some ranks before others."""

from __future__ import annotations

import inspect

import nodes as on_nodes
import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from sharded import assert_close, fsdp, loss_of, make_model
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from training import bits

# How many inputs each rank has; the last to join is not the last rank.
INPUTS = (2, 6, 4)
nodes = on_nodes.nodes
SETTINGS = {
    "trainer": {},
    "contiguous": {"partition": "contiguous"},
    "daemon": {"reduction": "daemon"},
    "overlap": {"reduction": "daemon", "overlap": True},
    "collective": {"reduction": "collective"},
}


def _train(joinables, model, optimizer, scheduler=None, **how):
    with Join(joinables, **how):
        for step in range(INPUTS[dist.get_rank()]):
            optimizer.zero_grad()
            loss_of(model, 3 * step + dist.get_rank()).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()


def _reference():
    """Returns torch's result: DDP's own join, with an optimizer on each rank."""
    module = make_model()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    _train([model], model, optimizer, scheduler)
    return [each.detach() for each in module.parameters()]  # of the last to join, on each rank


def _uneven(connection, rank, endpoint, kinds):
    expected = _reference()
    for kind in kinds:
        module = make_model()
        optimizer = optstate.AdamW(
            module.parameters(), lr=0.01, model=module, endpoint=endpoint, **SETTINGS[kind]
        )
        assert isinstance(optimizer, Joinable)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        hooked: list[int] = []
        optimizer.register_step_post_hook(lambda *_, hooked=hooked: hooked.append(1))
        if kind == "collective":
            _train([optimizer], module, optimizer, scheduler)
        else:
            model = DistributedDataParallel(module)
            if kind in ("daemon", "overlap"):
                model.register_comm_hook(None, optstate.ddp_hook)
            _train([model, optimizer], model, optimizer, scheduler)
        assert optimizer.committed_step == len(hooked) == max(INPUTS)
        assert_close(list(module.parameters()), expected)
        optimizer.param_groups[0]["lr"] = 0.01  # the ranks' schedulers have parted
        if kind == "collective":
            _train([optimizer], module, optimizer)
            assert optimizer.committed_step == 2 * max(INPUTS)
        # Afterwards steps are as before.
        optimizer.zero_grad()
        loss_of(module, 0).backward()
        optimizer.step()
        assert not optimizer._is_inside_join
        steps = [entry["step"] for entry in optimizer.state_dict()["state"].values()]
        assert {int(step) for step in steps} == {optimizer.committed_step}
    return True


@pytest.mark.parametrize("kinds", [("trainer", "contiguous"), ("daemon", "overlap", "collective")])
def test_ranks_without_inputs_take_the_steps_of_the_others(kinds, daemon):
    assert ranks.run(_uneven, 3, daemon.shm, kinds) == [True] * 3


def _refused(connection, rank, endpoint):
    said = {}
    for what, error, make in (
        ("divide", ValueError, lambda: optstate.AdamW(make_model().parameters())),
        (
            "accumulate",
            RuntimeError,
            lambda: optstate.AdamW(make_model().parameters(), accumulate=True),
        ),
        ("sharded", RuntimeError, lambda: optstate.AdamW(fsdp(make_model()).parameters())),
    ):
        with make() as optimizer, pytest.raises(error) as raised:
            Join([optimizer], divide_by_initial_world_size=what != "divide")
        said[what] = str(raised.value)
    # A GradScaler would skip steps on ranks with inputs alone: all ranks are told, and none waits.
    module = make_model()
    optimizer = optstate.AdamW(module.parameters(), endpoint=endpoint)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError) as raised:
        with Join([optimizer]):
            for step in range(INPUTS[rank]):
                scaler.scale(loss_of(module, step)).backward()
                scaler.step(optimizer)
                scaler.update()
    said["scaler"] = str(raised.value)
    # One rank has inputs left, and says so.
    with pytest.raises(RuntimeError, match="exhausted") as raised:
        _train([optimizer], module, optimizer, throw_on_early_termination=True)
    assert optimizer.committed_step == min(INPUTS[:2])
    return said


def test_what_join_cannot_be_had_with(daemon):
    for said in ranks.run(_refused, 2, daemon.shm):
        assert "averaged over all ranks" in said["divide"]
        assert "accumulate=True" in said["accumulate"]
        assert "sharded parameters" in said["sharded"]
        assert "GradScaler" in said["scaler"] and "LossScaler" in said["scaler"]


def _alone(connection, rank, endpoint):
    """The optimizer's own join(), without DistributedDataParallel."""
    expected = _reference()
    for kind in ("daemon", "overlap", "collective"):
        module = make_model()
        optimizer = optstate.AdamW(
            module.parameters(), lr=0.01, model=module, endpoint=endpoint, **SETTINGS[kind]
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        with optimizer.join() as entered:
            assert entered is None and optimizer._is_inside_join
            for step in range(INPUTS[rank]):
                optimizer.zero_grad()
                loss_of(module, 3 * step + rank).backward()
                optimizer.step()
                scheduler.step()
        assert optimizer.committed_step == max(INPUTS) and not optimizer._is_inside_join
        assert_close(list(module.parameters()), expected)
        # Equally many inputs: nothing is asked, and the steps are those of all ranks.
        with optimizer.join(enable=False):
            assert not optimizer._is_inside_join
            optimizer.param_groups[0]["lr"] = 0.01  # the ranks' schedulers have parted
            optimizer.zero_grad()
            loss_of(module, rank).backward()
            optimizer.step()
        assert optimizer.committed_step == max(INPUTS) + 1
        # An error in the block comes out of it, and nobody waits.
        with pytest.raises(KeyError, match="of the script"), optimizer.join():
            raise KeyError("of the script")
        assert not optimizer._is_inside_join
    # One rank has inputs left, and says so; the ranks without are told.
    with pytest.raises(RuntimeError, match="exhausted"):
        with optimizer.join(throw_on_early_termination=True):
            for step in range(INPUTS[rank]):
                optimizer.zero_grad()
                loss_of(module, step).backward()
                optimizer.step()
    assert not optimizer._is_inside_join
    return optimizer.committed_step - max(INPUTS) - 1


def test_join_of_the_optimizer(daemon):
    assert ranks.run(_alone, 3, daemon.shm) == [min(INPUTS)] * 3


def test_join_has_the_arguments_of_ddp():
    ours, theirs = map(inspect.signature, (optstate.AdamW.join, DistributedDataParallel.join))
    assert list(ours.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert ours.parameters[name].default == parameter.default


def _both_refuse(optimizer, error, **how):
    """Returns what Join and join() say, which is the same."""
    said = []
    for make in (lambda: Join([optimizer], **how), lambda: optimizer.join(**how)):
        with pytest.raises(error) as raised:
            make()
        said.append(str(raised.value))
    assert said[0] == said[1]
    return said[0]


def _joins_refused(connection, rank, endpoint):
    with optstate.AdamW(make_model().parameters(), endpoint=endpoint) as plain:
        said = [_both_refuse(plain, ValueError, divide_by_initial_world_size=False)]
    with optstate.AdamW(make_model().parameters(), accumulate=True, endpoint=endpoint) as sums:
        said.append(_both_refuse(sums, RuntimeError))
        said.append(_both_refuse(sums, RuntimeError, enable=False))
    with optstate.AdamW(fsdp(make_model()).parameters(), endpoint=endpoint) as shards:
        said.append(_both_refuse(shards, RuntimeError))
    stages = [dist.new_group([each]) for each in range(2)]
    with optstate.AdamW(
        make_model().parameters(),
        endpoint=endpoint,
        process_group=stages[rank],
        norm_group=dist.group.WORLD,
    ) as stage:
        said.append(_both_refuse(stage, RuntimeError))
    return said


def test_join_refuses_what_join_of_torch_does(daemon):
    for said in ranks.run(_joins_refused, 2, daemon.shm):
        assert "divide_by_initial_world_size=False" in said[0]
        assert "accumulate=True" in said[1] and said[2] == said[1]
        assert "sharded parameters" in said[3]
        assert "with norm_group" in said[4]


def _on_nodes(connection, rank, endpoints, settings):
    """Three nodes of a rank train as torch does on one; ranks run out one after the other."""
    endpoint = on_nodes.enter(rank, endpoints, 1)
    expected = _reference()
    module = make_model()
    optimizer = optstate.AdamW(
        module.parameters(), lr=0.01, model=module, endpoint=endpoint, max_norm=1e6, **settings
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    if "reduction" in settings:
        _train([optimizer], module, optimizer, scheduler)
    else:
        model = DistributedDataParallel(module)
        _train([model, optimizer], model, optimizer, scheduler)
    assert optimizer.committed_step == max(INPUTS)
    assert_close(list(module.parameters()), expected)
    return bits(module.parameters())


@pytest.mark.parametrize("nodes", [3], indirect=True)
@pytest.mark.parametrize("reduction", ["trainer", "collective"])
@pytest.mark.parametrize("across_nodes", ["replicated", "sharded", "contiguous"])
def test_join_on_several_nodes(across_nodes, reduction, nodes):
    settings = {"across_nodes": across_nodes}
    if across_nodes == "contiguous":
        settings = {"across_nodes": "sharded", "partition": "contiguous"}
    if reduction == "collective":
        settings["reduction"] = reduction
    found = ranks.run(_on_nodes, 3, [each.shm for each in nodes], settings)
    assert found[0] == found[1] == found[2]


def _never_entered(connection, rank, endpoint):
    module = make_model()
    optimizer = optstate.AdamW(
        module.parameters(), lr=0.01, endpoint=endpoint, reduction="collective"
    )
    made = optimizer.join()
    assert not optimizer._is_inside_join
    loss_of(module, rank).backward()
    optimizer.step()
    with made:
        assert optimizer._is_inside_join
        for step in range(INPUTS[rank]):
            optimizer.zero_grad()
            loss_of(module, step).backward()
            optimizer.step()
    return optimizer.committed_step


def test_join_begins_when_it_is_entered(daemon):
    assert ranks.run(_never_entered, 2, daemon.shm) == [1 + max(INPUTS[:2])] * 2
