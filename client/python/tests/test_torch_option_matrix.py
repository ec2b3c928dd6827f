"""Every option that torch tests of its optimizers: ours gives torch's result, or says no.

The options are those of torch's table (optim_db), for each optimizer that we serve.
"""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torchs_table import (
    INFOS,
    INPUTS,
    SERVED,
    STEPS_MAX,
    assert_follows,
    copied,
    default_of,
    ours,
    parameters_for,
    take_steps,
    takes,
    torchs,
)

# How torch computes, not what: with these the daemon's result is the same, bit for bit.
ACCEPTED_FLAGS = ("foreach", "fused")
# These promise what an update outside the trainer cannot keep.
REFUSED_FLAGS = ("capturable", "differentiable")
TENSOR_BETAS = ("Adam", "AdamW")  # the others take numbers, in torch too


def test_every_served_optimizer_is_in_torchs_table():
    present = [name for name in SERVED if hasattr(torch.optim, name)]
    assert sorted(INFOS) == sorted(present)


# Each side adds a quotient of sums of some roundings each to a parameter: 16 ulps. Muon's comes
# out of Newton-Schulz in bfloat16, which has 8 bits. Torch's own error against float64 shows what
# cancellation makes of a rounding (weight decay against a gradient).
OF_WAY = {name: 16 * 2**-23 for name in SERVED} | {"Muon": 1e-2}


@pytest.mark.parametrize(("name", "options"), INPUTS)
def test_every_input(name, options, seed):
    start = parameters_for(name, seed)
    mine, theirs, plain, exact = (
        copied(start, dtype) for dtype in (None, None, None, torch.float64)
    )
    runs = [
        (ours(name)(mine, **options), mine),
        (torchs(name)(theirs, **options), theirs),
        (torchs(name)(plain), plain),
        (torchs(name)(exact, **options), exact),
    ]
    take_steps(name, runs, seed, STEPS_MAX)
    assert_follows(mine, theirs, start, OF_WAY[name], exact)
    # The run can tell the option: without it, it ends elsewhere.
    if any(value != default_of(name, option) for option, value in options.items()):
        with pytest.raises(AssertionError, match="too far"):
            assert_follows(plain, theirs, start, OF_WAY[name], exact)


@pytest.mark.parametrize("name", list(INFOS))
def test_flags_of_torchs_implementations(name, seed):
    """Each is accepted with equal bits or refused by its name; there are no others."""
    info = INFOS[name]
    flags = set(info.supported_impls) | ({"capturable"} if info.has_capturable_arg else set())
    assert flags <= {*ACCEPTED_FLAGS, *REFUSED_FLAGS}
    start = parameters_for(name, seed)
    expected = copied(start)
    plain = ours(name)(expected)
    take_steps(name, [(plain, expected)], seed, 3)
    plain.close()
    for flag in ACCEPTED_FLAGS:
        for value in (True, False, None) if takes(name, flag) else ():
            mine, theirs = copied(start), copied(start)
            optimizer = ours(name)(mine, **{flag: value})
            reference = torchs(name)(theirs, **{flag: value})
            take_steps(name, [(optimizer, mine)], seed, 3)
            assert all(map(torch.equal, mine, expected)), (flag, value)
            said = optimizer.state_dict()["param_groups"]
            assert said == reference.state_dict()["param_groups"]
            optimizer.close()
    for flag in REFUSED_FLAGS:
        if takes(name, flag):
            with pytest.raises(ValueError, match=f"{flag}=True is not supported"):
                ours(name)(copied(start), **{flag: True})


@pytest.mark.parametrize("dimensions", [0, 1])
@pytest.mark.parametrize("name", list(INFOS))
def test_lr_as_a_tensor(name, dimensions, seed):
    """Equal bits to the number's, it stays the tensor, and edits of it count."""
    start = parameters_for(name, seed)
    mine, expected = copied(start), copied(start)
    lr = torch.full([1] * dimensions, 2.0**-9)
    optimizer, reference = ours(name)(mine, lr=lr), ours(name)(expected, lr=2.0**-9)
    runs = [(optimizer, mine), (reference, expected)]
    take_steps(name, runs, seed, 3)
    lr.fill_(2.0**-7)
    reference.param_groups[0]["lr"] = 2.0**-7
    take_steps(name, runs, seed + 1, 3)
    assert all(map(torch.equal, mine, expected))
    assert optimizer.param_groups[0]["lr"] is lr


@pytest.mark.parametrize("name", TENSOR_BETAS)
def test_betas_as_tensors(name, seed):
    start = parameters_for(name, seed)
    mine, expected = copied(start), copied(start)
    betas = (torch.tensor([[0.75]]), torch.tensor(0.875))
    runs = [
        (ours(name)(mine, betas=betas), mine),
        (ours(name)(expected, betas=(0.75, 0.875)), expected),
    ]
    take_steps(name, runs, seed, 5)
    assert all(map(torch.equal, mine, expected))


ERRORS = [
    pytest.param(name, error, id=f"{name}-{error.optimizer_error_input.desc.replace(' ', '_')}")
    for name, info in INFOS.items()
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
]


@pytest.mark.parametrize(("name", "error"), ERRORS)
def test_every_error(name, error):
    """We refuse what torch refuses, in its words; places where we are stricter are listed."""
    given = error.optimizer_error_input
    parameters = given.params
    if parameters is None:
        parameters = [torch.nn.Parameter(torch.randn(1, 1))]

    def construct():
        return ours(name)(parameters, **given.kwargs)

    if error.error_on.name == "STEP_ERROR":  # torch notices at step(), we at once
        assert "complex" in given.desc
        with pytest.raises(TypeError, match="is complex"):
            construct()
    elif "cannot have duplicate parameters" in given.desc:
        # torch warns and updates it twice a step; we warn and refuse.
        with (
            pytest.warns(UserWarning, match=error.error_regex),
            pytest.raises(ValueError, match="same parameter twice"),
        ):
            construct()
    elif issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            construct()
    else:
        with pytest.raises(error.error_type, match=error.error_regex):
            construct()


@pytest.mark.parametrize("name", list(INFOS))
def test_kinds_of_parameters_that_are_refused(name):
    """A TypeError with the kind refuses at construction what torch may take."""
    kinds = {
        "complex": torch.ones(2, 2, dtype=torch.complex64),
        "float64": torch.ones(2, 2, dtype=torch.float64),
        "sparse": torch.ones(2, 2).to_sparse(),
    }
    if name == "Adagrad":  # torch's constructor cannot make its state, and says so
        del kinds["sparse"]
    for kind, tensor in kinds.items():
        with pytest.raises(TypeError, match=kind):
            ours(name)([torch.nn.Parameter(torch.ones(2, 2)), tensor.requires_grad_()])


@pytest.mark.parametrize("name", list(INFOS))
def test_sparse_gradients_are_refused(name):
    """The error names the parameter, nothing changes, and a dense gradient can be stepped with."""
    embedding = torch.nn.Embedding(4, 4, sparse=True)
    optimizer = ours(name)([("table", embedding.weight)])
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match='sparse gradients .*"table"') as raised:
        optimizer.step()
    assert isinstance(raised.value, RuntimeError)  # as torch's own refusals
    assert torch.equal(embedding.weight, before)
    embedding.weight.grad = embedding.weight.grad.to_dense()
    optimizer.step()
    assert optimizer.committed_step == 1


@pytest.mark.parametrize("name", list(INFOS))
def test_no_parameters(name):
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        ours(name)([])
    # torch takes a group of none; a job needs something to keep.
    with pytest.raises(ValueError, match="no parameters"):
        ours(name)([{"params": []}])


@pytest.mark.parametrize("name", list(INFOS))
def test_signature_begins_with_torchs(name):
    mine = inspect.signature(ours(name)).parameters
    theirs = inspect.signature(torchs(name)).parameters
    assert list(mine)[: len(theirs)] == list(theirs)
    for option, parameter in theirs.items():
        assert mine[option].default == parameter.default, option
        assert mine[option].kind == parameter.kind, option


@pytest.mark.parametrize("name", list(INFOS))
def test_nothing_warns(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parameters = parameters_for(name, 1)
        optimizer = ours(name)(parameters)
        take_steps(name, [(optimizer, parameters)], 1, 2)
        optimizer.load_state_dict(optimizer.state_dict())
