"""Surgery on param_groups."""

from __future__ import annotations

from typing import Any

from programs.model import random_values  # noqa: F401
from programs.program import Weight
from programs.registry import batch, index, of, operation

# The settings of a group that a script may edit, by name.
EDITS = {
    "lr": (0.0, 1e-4, 3e-3, 0.05, -1e-12),
    "weight_decay": (0.0, 0.01, 0.3),
    "maximize": (True, False),
    "eps": (1e-8, 1e-3),
    "momentum": (0.0, 0.5, 0.9),
    "nesterov": (True, False),
    "dampening": (0.0, 0.3),
    "betas": ((0.9, 0.999), (0.5, 0.75), (0.0, 0.0), (0.9, 1.0)),
    "alpha": (0.99, 0.5),
    "lr_decay": (0.0, 0.01),
    "momentum_decay": (4e-3, 0.05),
    "decoupled_weight_decay": (True, False),
    "beta2_decay": (-0.8, -0.5),
    "d": (1.0, 2.0),
    "initial_accumulator_value": (0.0, 0.5),
    "max_norm": (None, 0.5, 2.0),
    "max_value": (0.25,),
    "norm_type": (1.0,),
}
_OURS = ("max_norm", "max_value", "norm_type")


def _edit_of(rng: Any) -> tuple[str, Any]:
    name = rng.choice(sorted(EDITS))
    return name, rng.choice(EDITS[name])


@operation(6, group=index, edit=_edit_of)
def set_option(side: Any, group: int, edit: tuple[str, Any]) -> None:
    name, value = edit
    chosen = side.group(group)
    if name in chosen or (name in _OURS and side.program.scaler is None):
        if name == "eps" and isinstance(chosen["eps"], tuple):
            value = (1e-12, 1e-3)
        if name == "momentum" and bool(value) != bool(chosen[name]):
            return  # set_fixed_option
        chosen[name] = value


@operation(1, group=index, name=of("amsgrad", "centered", "momentum"))
def set_fixed_option(side: Any, group: int, name: str) -> bool:
    """Sets an option that decides about memory, which the README says cannot change, and sets
    it back."""
    chosen = side.group(group)
    if not side.is_ours or name not in chosen or side.program.optimizer == "Muon":
        return True
    if not all(parameter.requires_grad for parameter in chosen["params"]):
        return True  # what is frozen may be in no job
    before = chosen[name]
    chosen[name] = not before if isinstance(before, bool) else (0.0 if before else 0.5)
    try:
        side.optimizer.step()
    except ValueError as error:
        if "the job was registered with" not in str(error):
            raise
        return True
    finally:
        chosen[name] = before
    return False


# torch's scalers skip steps, and with them the KeyError; our references of optimizers that torch
# does not have ask for options only where there is a gradient.
@operation(
    1,
    lambda program: program.scaler is None and program.optimizer not in ("Lion", "LAMB"),
    group=index,
    name=of("lr", "weight_decay", "maximize", "betas", "momentum", "eps"),
)
def delete_option(side: Any, group: int, name: str) -> None:
    side.group(group).pop(name, None)


@operation(
    2,
    lambda program: program.optimizer != "Adagrad",  # torch's cannot step then
    shape=of((4,), (3, 5), (1,), (2, 3)),
    dtype=of("float32", "float32", "bfloat16"),
    seed=batch,
    option=_edit_of,
)
def add_group(side: Any, shape: tuple[int, ...], dtype: str, seed: int, option: Any) -> None:
    """A parameter that the model has grown."""
    if side.program.optimizer == "Muon":
        shape = shape if len(shape) == 2 else (3, 4)
    name, value = option
    chosen = side.optimizer.param_groups[0]
    own = {name: value} if name in ("lr", "weight_decay", "betas") and name in chosen else {}
    if own == {"lr": -1e-12}:
        own = {}
    parameter = side.model.grow(Weight(shape, dtype), seed)
    given: Any = parameter
    if side.program.names == "pairs":
        given = next(each for each in side.model.named_parameters() if each[1] is parameter)
    side.optimizer.add_param_group({"params": [given], **own})


@operation(1)
def reverse_groups(side: Any) -> None:
    side.optimizer.param_groups.reverse()


@operation(0.5, group=index)
def copy_group(side: Any, group: int) -> None:
    """Replaces a group by an equal dict."""
    groups = side.optimizer.param_groups
    groups[group % len(groups)] = dict(groups[group % len(groups)])


@operation(0.5)
def copy_groups(side: Any) -> None:
    """Replaces the list of groups, and each group, by equal ones."""
    side.optimizer.param_groups = [dict(group) for group in side.optimizer.param_groups]


@operation(0.5, group=index)
def pop_group(side: Any, group: int) -> None:
    """Removes a group, whose parameters are then trained no more."""
    groups = side.optimizer.param_groups
    if len(groups) > 1:
        groups.pop(group % len(groups))


@operation(0.5, group=index)
def reverse_parameters(side: Any, group: int) -> None:
    """The order within a group."""
    chosen = side.group(group)
    chosen["params"].reverse()
    if "param_names" in chosen:
        chosen["param_names"].reverse()


@operation(0.5, group=index)
def pop_parameter(side: Any, group: int) -> None:
    chosen = side.group(group)
    if len(chosen["params"]) > 1:
        chosen["params"].pop()
        if "param_names" in chosen:
            chosen["param_names"].pop()
