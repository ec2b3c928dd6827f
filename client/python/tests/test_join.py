"""torch's Join, for inputs that run out on some ranks before others."""

from __future__ import annotations

import optstate
import pytest
import ranks
import torch
import torch.distributed as dist
from sharded import assert_close, fsdp, loss_of, make_model
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

# How many inputs each rank has; the last to join is not the last rank.
INPUTS = (2, 6, 4)
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
