"""Torch's tests of state_dict() and load_state_dict(), of every optimizer we serve."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torchs_table import (
    INFOS,
    INPUTS,
    assert_follows,
    copied,
    ours,
    parameters_for,
    take_steps,
    torchs,
)

# Entries that we have besides torch's: whether there was a step, for optimizers that count none.
OURS_ALONE = {"SGD": {"step"}, "Muon": {"step"}}
# Torch's and our continuation of one state: rounding, and what cancellation makes of it; a
# state array that is lost or swapped shows at once.
OF_WAY = {name: 1e-3 for name in INFOS} | {"Muon": 2e-2}


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def trained(name: str, kind: type, options: dict, seed: int, steps: int = 5):
    parameters = parameters_for(name, seed)
    optimizer = kind(parameters, **options)
    take_steps(name, [(optimizer, parameters)], seed, steps)
    return optimizer, parameters


def equal(one: object, other: object) -> bool:
    """Returns whether nested states have equal keys, types and bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(("name", "options"), INPUTS)
def test_has_torchs_form(name, options, seed):
    """Groups are torch's; entries have its keys, dtypes and shapes, before a step and after."""
    mine, theirs = parameters_for(name, seed), parameters_for(name, seed)
    optimizer, reference = ours(name)(mine, **options), torchs(name)(theirs, **options)
    for steps in (0, 5):
        take_steps(name, [(optimizer, mine), (reference, theirs)], seed, steps, missing=0.5)
        saved, expected = optimizer.state_dict(), reference.state_dict()
        assert list(saved) == list(expected)
        assert equal(saved["param_groups"], expected["param_groups"])
        if not OURS_ALONE.get(name):
            # Ours in the order of the parameters, torch's in that of their first updates.
            assert list(saved["state"]) == sorted(expected["state"])
        for index, entry in saved["state"].items():
            # torch's SGD writes "momentum_buffer": None where there is none.
            wanted = {k: v for k, v in expected["state"].get(index, {}).items() if v is not None}
            assert entry.keys() - OURS_ALONE.get(name, set()) == wanted.keys(), index
            for key, value in wanted.items():
                found = entry[key]
                assert (found.dtype, found.shape) == (value.dtype, value.shape), key


@pytest.mark.parametrize("name", list(INFOS))
def test_is_laid_out_as_torchs(name, seed):
    """A parameter's strides are its state's."""
    entries = []
    for kind in (ours(name), torchs(name)):
        parameter = torch.nn.Parameter(torch.ones(6, 4).t())
        assert not parameter.is_contiguous()
        optimizer = kind([parameter], **({"momentum": 0.9} if name == "SGD" else {}))
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        entries.append(optimizer.state_dict()["state"][0])
    found = {key: value.stride() for key, value in entries[0].items() if value.dim() == 2}
    assert found and found == {key: entries[1][key].stride() for key in found}


@pytest.mark.parametrize(("name", "options"), INPUTS)
def test_round_trip(name, options, seed):
    """Through a file (weights_only) into an optimizer with other hyperparameters: the same
    dict again, and the same continuation bit for bit."""
    first, mine = trained(name, ours(name), options, seed)
    saved = through_a_file(first.state_dict())
    others = copied(mine)
    second = ours(name)(others, **{**options, "lr": 0.125})
    second.load_state_dict(saved)
    assert equal(second.state_dict(), first.state_dict())
    take_steps(name, [(first, mine), (second, others)], seed + 1, 5)
    assert all(map(torch.equal, mine, others))


@pytest.mark.parametrize(("name", "options"), INPUTS)
def test_torchs_loads_into_ours_and_ours_into_torchs(name, options, seed):
    for saving, loading in ((ours(name), torchs(name)), (torchs(name), ours(name))):
        first, parameters = trained(name, saving, options, seed)
        start, others = copied(parameters), copied(parameters)
        second = loading(others, **options)
        second.load_state_dict(through_a_file(first.state_dict()))
        take_steps(name, [(first, parameters), (second, others)], seed + 1, 5)
        assert_follows(others, parameters, start, OF_WAY[name])
        # The state counts: without it the continuation is another one.
        if saving is ours(name) and first.state_dict()["state"][0].keys() - {"step"}:
            fresh = copied(start)
            take_steps(name, [(loading(fresh, **options), fresh)], seed + 1, 5)
            with pytest.raises(AssertionError, match="too far"):
                assert_follows(fresh, parameters, start, OF_WAY[name])


@pytest.mark.parametrize("options", [{}, {"initial_accumulator_value": 0.25}])
def test_adagrads_state_of_parameters_that_were_never_updated(options, seed):
    """torch's Adagrad has it from the constructor on and fails without; both ways."""
    name = "Adagrad"
    for saving, loading in ((ours(name), torchs(name)), (torchs(name), ours(name))):
        for steps in (0, 2):
            parameters = parameters_for(name, seed)
            first = saving(parameters, **options)
            take_steps(name, [(first, parameters)], seed, steps, missing=0.9)
            start, others = copied(parameters), copied(parameters)
            second = loading(others, **options)
            second.load_state_dict(first.state_dict())
            take_steps(name, [(first, parameters), (second, others)], seed + 1, 5, missing=0)
            assert_follows(others, parameters, start, OF_WAY[name])


@pytest.mark.parametrize("name", list(INFOS))
def test_of_an_older_torch(name, seed):
    """Groups without the options that came later, and steps that are numbers."""
    first, mine = trained(name, ours(name), {}, seed)
    saved = first.state_dict()
    for group in saved["param_groups"]:
        for flag in (*INFOS[name].not_og_supported_flags, "decoupled_weight_decay"):
            if name != "Adafactor" or flag == "foreach":
                group.pop(flag, None)
    if name in ("Adam", "AdamW"):
        saved["param_groups"][0].pop("amsgrad")
    if name == "RMSprop":
        saved["param_groups"][0].pop("momentum")
        saved["param_groups"][0].pop("centered")
    for entry in saved["state"].values():
        if "step" in entry:
            entry["step"] = int(entry["step"])
    others, theirs = copied(mine), copied(mine)
    second, reference = ours(name)(others), torchs(name)(theirs)
    second.load_state_dict(saved)
    reference.load_state_dict(saved)
    assert second.param_groups[0].keys() == reference.param_groups[0].keys()
    take_steps(name, [(first, mine), (second, others)], seed + 1, 3)
    assert all(map(torch.equal, mine, others))


@pytest.mark.parametrize("name", list(INFOS))
def test_a_group_without_lr_is_refused(name, seed):
    """torch takes it, and fails at step(); nothing may change here."""
    optimizer, _ = trained(name, ours(name), {}, seed)
    before = optimizer.state_dict()
    spoiled = copy.deepcopy(before)
    del spoiled["param_groups"][0]["lr"]
    with pytest.raises(ValueError, match=r"param_groups\[0\] has no lr"):
        optimizer.load_state_dict(spoiled)
    assert equal(optimizer.state_dict(), before)


@pytest.mark.parametrize("name", list(INFOS))
def test_names_of_parameters(name, seed):
    """Names load over none, and stay where none are loaded; positions decide."""
    plain, mine = trained(name, ours(name), {}, seed)
    pairs = [(f"p{index}", parameter) for index, parameter in enumerate(copied(mine))]
    named = ours(name)(pairs)
    named.load_state_dict(plain.state_dict())
    names = [pair[0] for pair in pairs]
    assert named.state_dict()["param_groups"][0]["param_names"] == names
    parameters = [pair[1] for pair in pairs]
    take_steps(name, [(plain, mine), (named, parameters)], seed + 1, 3)
    assert all(map(torch.equal, mine, parameters))
    others = copied(mine)
    unnamed = ours(name)(others)
    unnamed.load_state_dict(named.state_dict())
    assert unnamed.param_groups[0]["param_names"] == names
    take_steps(name, [(plain, mine), (unnamed, others)], seed + 2, 3)
    assert all(map(torch.equal, mine, others))


@pytest.mark.parametrize("name", list(INFOS))
def test_keys_of_the_users_own_are_kept(name, seed):
    parameters = parameters_for(name, seed)
    halves = [{"params": parameters[:1], "tag": "head"}, {"params": parameters[1:], "lr": 0.5}]
    first = ours(name)(halves)
    take_steps(name, [(first, parameters)], seed, 2)
    saved = first.state_dict()
    others = copied(parameters)
    second = ours(name)([{"params": others[:1]}, {"params": others[1:]}])
    second.load_state_dict(saved)
    assert second.param_groups[0]["tag"] == "head" and second.param_groups[1]["lr"] == 0.5
    order = list(range(len(parameters)))
    assert [saved["param_groups"][0]["params"], saved["param_groups"][1]["params"]] == [
        order[:1],
        order[1:],
    ]


@pytest.mark.parametrize("name", list(INFOS))
def test_what_was_given_stays_as_it_was(name, seed):
    """Neither loading nor training writes to a dict that was saved or loaded."""
    optimizer, parameters = trained(name, ours(name), {}, seed)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    take_steps(name, [(optimizer, parameters)], seed + 1, 2)
    optimizer.param_groups[0]["lr"] = 0.75
    assert equal(saved, kept)


@pytest.mark.parametrize("name", list(INFOS))
def test_state_that_does_not_fit_is_refused(name, seed):
    optimizer, parameters = trained(name, ours(name), {"lr": 0.01}, seed)
    before = optimizer.state_dict()
    fewer = copy.deepcopy(before)
    fewer["param_groups"][0]["params"].pop()
    more = copy.deepcopy(before)
    more["param_groups"].append(copy.deepcopy(more["param_groups"][0]))
    for spoiled, text in ((fewer, "doesn't match the size"), (more, "different number of")):
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(spoiled)
        assert equal(optimizer.state_dict(), before)


@pytest.mark.parametrize("name", list(INFOS))
def test_hooks(name, seed):
    """Hooks run in torch's order, prepended ones first, each with torch's arguments."""
    optimizer, parameters = trained(name, ours(name), {}, seed)
    heard = []

    def hear(what, answer=None):
        return lambda *given: heard.append((what, len(given))) or answer

    optimizer.register_state_dict_pre_hook(hear("before save"))
    optimizer.register_state_dict_pre_hook(hear("first of all"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "mine": [1]})
    optimizer.register_state_dict_post_hook(hear("after save"))
    optimizer.register_state_dict_post_hook(hear("first after save"), prepend=True)
    saved = optimizer.state_dict()
    assert saved["mine"] == [1]
    replaced = copy.deepcopy(saved)
    replaced["param_groups"][0]["lr"] = 0.75
    optimizer.register_load_state_dict_pre_hook(lambda _, given: replaced)
    seen = []
    optimizer.register_load_state_dict_pre_hook(
        lambda _, given: seen.append({**given["state"]}), prepend=True
    )
    optimizer.register_load_state_dict_post_hook(hear("after load"))
    gone = optimizer.register_load_state_dict_post_hook(hear("never"))
    gone.remove()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.75
    optimizer.load_state_dict(saved)
    heard.pop()
    assert all(equal(each, saved["state"]) for each in seen) and len(seen) == 2
    assert heard == [
        ("first of all", 1),
        ("before save", 1),
        ("first after save", 2),
        ("after save", 2),
        ("after load", 1),
    ]
