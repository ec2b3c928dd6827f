"""torch.distributed.checkpoint: every documented way in and out, of new and of live jobs."""

from __future__ import annotations

import copy

import optstate
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run
from torch.distributed.checkpoint import state_dict as distributed
from training import bits, largest_difference, loss_of, small_model, train

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

STEPS = 4
CLASSES = {"ours": optstate.AdamW, "torch": torch.optim.AdamW}
FLATTENED = distributed.StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = distributed.StateDictOptions()
OPTIONS = {"flattened": FLATTENED, "nested": NESTED}


def trained(kind: str, steps: int = STEPS, **options):
    model = small_model()
    optimizer = CLASSES[kind](model.parameters(), lr=0.01, **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def go_on_alike(one, other) -> None:
    for model, optimizer in (one, other):
        train(model, optimizer, range(STEPS, STEPS + 4))
    assert largest_difference(one[0], other[0]) < 1e-5


@pytest.mark.parametrize("how", list(OPTIONS))
@pytest.mark.parametrize("into", list(CLASSES))
@pytest.mark.parametrize("out_of", list(CLASSES))
def test_set_what_was_got(out_of, into, how):
    """Into an optimizer that has taken no step, whose state torch makes by a step."""
    model, optimizer = trained(out_of)
    saved = copy.deepcopy(distributed.get_state_dict(model, optimizer, options=OPTIONS[how]))
    other = small_model(seed=3)
    loaded = CLASSES[into](other.parameters(), lr=0.5)
    distributed.set_state_dict(
        other,
        loaded,
        model_state_dict=saved[0],
        optim_state_dict=saved[1],
        options=OPTIONS[how],
    )
    assert loaded.param_groups[0]["lr"] == 0.01
    assert getattr(loaded, "committed_step", 0) == 0
    entry = loaded.state_dict()["state"][0]
    assert entry["step"] == STEPS and entry["exp_avg"].any() and entry["exp_avg_sq"].any()
    go_on_alike((model, optimizer), (other, loaded))


@pytest.mark.parametrize("how", list(OPTIONS))
@pytest.mark.parametrize("into", ["ours", "ours re-attached", "torch"])
@pytest.mark.parametrize("out_of", list(CLASSES))
def test_save_and_load(out_of, into, how, job, tmp_path):
    """torch's recipe: get_state_dict() of a new optimizer is what dcp.load() fills."""
    model, optimizer = trained(out_of)
    state = dict(
        zip(("model", "optim"), distributed.get_state_dict(model, optimizer, options=OPTIONS[how]))
    )
    dcp.save(state, checkpoint_id=tmp_path)
    other = small_model(seed=3)
    named = {"job": job} if into.startswith("ours") else {}
    if into == "ours re-attached":
        live = optstate.AdamW(other.parameters(), lr=0.5, **named)
        train(other, live, range(STEPS + 3))
        live.close()
    loaded = CLASSES[into.split()[0]](other.parameters(), lr=0.5, **named)
    steps_before = getattr(loaded, "committed_step", 0)
    assert steps_before == (STEPS + 3 if into == "ours re-attached" else 0)
    template = dict(
        zip(("model", "optim"), distributed.get_state_dict(other, loaded, options=OPTIONS[how]))
    )
    dcp.load(template, checkpoint_id=tmp_path)
    distributed.set_state_dict(
        other,
        loaded,
        model_state_dict=template["model"],
        optim_state_dict=template["optim"],
        options=OPTIONS[how],
    )
    assert getattr(loaded, "committed_step", 0) == steps_before
    go_on_alike((model, optimizer), (other, loaded))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam", "Adagrad", "RMSprop", "Lion"])
def test_making_state_takes_no_step(name):
    model = small_model()
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(optstate, name)(model.parameters(), lr=0.01, **options)
    before = bits(model.parameters())
    for how in (NESTED, FLATTENED):
        distributed.get_optimizer_state_dict(model, optimizer, options=how)
    assert optimizer.committed_step == 0 and optimizer.last_outcome is None
    assert bits(model.parameters()) == before
    assert optimizer.param_groups[0]["lr"] == 0.01
    state = optimizer.state_dict()["state"]
    assert list(state) == list(range(6)) and bool(optimizer.state)
    for index, parameter in enumerate(model.parameters()):
        assert state[index]["step"] == 0
        arrays = [each for key, each in state[index].items() if each.dim() > 0]
        assert arrays and all(each.shape == parameter.shape for each in arrays)
        assert not any(each.any() for each in arrays)
        assert list(optimizer.state[parameter]) == list(state[index])
    optimizer.load_state_dict(optimizer.state_dict())
    other = small_model()
    reference = getattr(optstate, name)(other.parameters(), lr=0.01, **options)
    for each, net in ((optimizer, model), (reference, other)):
        train(net, each, range(3))
    assert optimizer.committed_step == 3 and largest_difference(model, other) == 0


def test_a_trainers_own_step_is_taken():
    """A trainer's step with zero gradients and rates counts in a new job, as in torch."""
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def _init_optim_state():
        optimizer.step()

    _init_optim_state()
    assert optimizer.committed_step == 1
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_16_bit_parameters_keep_their_masters():
    model = small_model(dtype=torch.bfloat16)
    optimizer = optstate.AdamW(model.parameters(), lr=0.001)
    train(model, optimizer, range(STEPS))
    saved = copy.deepcopy(distributed.get_state_dict(model, optimizer, options=FLATTENED))
    assert "state.0.weight.master_param" in saved[1]
    other = small_model(seed=3, dtype=torch.bfloat16)
    loaded = optstate.AdamW(other.parameters(), lr=0.5)
    distributed.set_state_dict(
        other,
        loaded,
        model_state_dict=saved[0],
        optim_state_dict=saved[1],
        options=FLATTENED,
    )
    for each, net in ((optimizer, model), (loaded, other)):
        train(net, each, range(STEPS, STEPS + 4))
    assert largest_difference(model, other) == 0


def test_a_flattened_checkpoint_of_torchs_lacks_our_keys():
    """master_param and SGD's step: torch makes {} of what a checkpoint does not have."""
    for name, options in (("AdamW", {}), ("SGD", {"momentum": 0.9})):
        model, other = (small_model(dtype=torch.bfloat16) for _ in range(2))
        reference = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
        train(model, reference, range(STEPS))
        saved = copy.deepcopy(distributed.get_state_dict(model, reference, options=FLATTENED))
        optimizer = getattr(optstate, name)(other.parameters(), lr=0.01, **options)
        distributed.set_state_dict(
            other,
            optimizer,
            model_state_dict=saved[0],
            optim_state_dict=saved[1],
            options=FLATTENED,
        )
        key = "exp_avg" if name == "AdamW" else "momentum_buffer"
        mine, theirs = optimizer.state[other[0].weight], reference.state[model[0].weight]
        assert torch.equal(mine[key], theirs[key].float())


def test_16_bit_parameters_from_a_file_of_torchs(tmp_path, job):
    model, other = (small_model(seed, dtype=torch.bfloat16) for seed in range(2))
    reference = torch.optim.AdamW(model.parameters(), lr=0.001)
    train(model, reference, range(STEPS))
    saved = distributed.get_state_dict(model, reference, options=FLATTENED)
    dcp.save(dict(zip(("model", "optim"), saved)), checkpoint_id=tmp_path)
    live = optstate.AdamW(other.parameters(), lr=0.001, job=job)
    train(other, live, range(STEPS + 1))
    live.close()
    optimizer = optstate.AdamW(other.parameters(), lr=0.001, job=job)
    names, template = distributed.get_state_dict(other, optimizer, options=FLATTENED)
    template = {key: each for key, each in template.items() if not key.endswith("master_param")}
    dcp.load({"model": names, "optim": template}, checkpoint_id=tmp_path)
    distributed.set_state_dict(
        other, optimizer, model_state_dict=names, optim_state_dict=template, options=FLATTENED
    )
    for parameter in other.parameters():
        parameter.grad = None
    optimizer.step()
    for mine, theirs in zip(other.parameters(), model.parameters()):
        entry = optimizer.fetch_state(mine)
        assert torch.equal(entry["exp_avg"], reference.state[theirs]["exp_avg"].float())
        assert torch.equal(mine, theirs)
        assert torch.equal(entry["master_param"], mine.float())


def _on_rank(connection, rank, endpoint, directory, how):
    model = small_model()
    optimizer = optstate.AdamW(model.parameters(), lr=0.01, endpoint=endpoint)
    train(model, optimizer, range(STEPS))
    options = OPTIONS[how]
    saved = distributed.get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"optim": saved, "model": model.state_dict()}, checkpoint_id=directory)
    other = small_model(seed=3)
    loaded = optstate.AdamW(other.parameters(), lr=0.5, endpoint=endpoint)
    template = {
        "optim": distributed.get_optimizer_state_dict(other, loaded, options=options),
        "model": other.state_dict(),
    }
    dcp.load(template, checkpoint_id=directory)
    other.load_state_dict(template["model"])
    distributed.set_optimizer_state_dict(
        other, loaded, optim_state_dict=template["optim"], options=options
    )
    assert loaded.committed_step == 0
    for each, net in ((optimizer, model), (loaded, other)):
        train(net, each, range(STEPS, STEPS + 3))
    return largest_difference(model, other)


@pytest.mark.parametrize("how", list(OPTIONS))
@pytest.mark.parametrize("wire", ["shm", "grpc_unix"])
def test_on_ranks(daemon, wire, how, tmp_path):
    assert run(_on_rank, 2, getattr(daemon, wire), str(tmp_path), how) == [0, 0]


def test_state_that_is_broadcast_from_rank_0():
    """full_state_dict, into a new optimizer."""
    model, optimizer = trained("ours")
    options = distributed.StateDictOptions(full_state_dict=True)
    saved = copy.deepcopy(distributed.get_optimizer_state_dict(model, optimizer, options=options))
    other = copy.deepcopy(model)
    loaded = optstate.AdamW(other.parameters(), lr=0.5)
    distributed.set_optimizer_state_dict(other, loaded, saved, options=options)
    assert loaded.committed_step == 0
    loss_of(other, 0)
    go_on_alike((model, optimizer), (other, loaded))
