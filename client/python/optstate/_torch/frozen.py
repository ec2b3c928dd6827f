"""Frozen parameters: parameters that nothing updates are in no job, whatever dtype or class.

A parameter enters the job when it first has a gradient or requires one: the job is then
extended by a group. So the groups of a job may be parts of param_groups, in another order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Callable

import torch

from optstate import _optctl, errors
from optstate._torch.layout import parameter_names
from optstate._torch.nodes import parts

ParamGroups = Sequence[dict[str, Any]]


def is_frozen(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad and tensor.grad is None


def check_thawed_alike(world_size: int, tensors: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError when ranks might disagree about what is frozen, because extending a job
    is collective."""
    if world_size > 1 and not all(each.requires_grad for each in tensors):
        raise RuntimeError(
            "a parameter with requires_grad=False has a gradient: with several ranks set"
            " requires_grad before the step, on every rank"
        )


def part_of(group: dict[str, Any], pairs: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Returns the group with these (name, parameter) pairs alone."""
    names, tensors = [name for name, _ in pairs], [tensor for _, tensor in pairs]
    return {**group, "params": tensors, "param_names": names}


def groups_with(
    param_groups: ParamGroups,
    names_by_id: dict[int, str],
    is_wanted: Callable[[torch.Tensor], bool],
    *,
    only: Collection[int] | None = None,
) -> ParamGroups:
    """Returns groups with the parameters that a job is to have.

    `only`: indices of the groups to take. Returns param_groups itself when nothing is left
    out; groups whose parameters are all left out are not in the job.
    """
    wanted = [list(map(is_wanted, group["params"])) for group in param_groups]
    if only is None and all(map(all, wanted)):
        return param_groups
    names = iter(parameter_names(param_groups, names_by_id))
    found = []
    for index, (group, flags) in enumerate(zip(param_groups, wanted)):
        named = [(next(names), tensor) for tensor in group["params"]]
        kept = [pair for pair, is_kept in zip(named, flags) if is_kept]
        if (kept or not named) and (only is None or index in only):
            found.append(part_of(group, kept))
    return found


def groups_to_register(
    param_groups: ParamGroups, names_by_id: dict[int, str], state: Any
) -> ParamGroups:
    """Returns groups for a new attachment: parameters that can be updated or have state. Returns
    all groups when there are none, because a job has at least one parameter."""

    def is_wanted(tensor: torch.Tensor) -> bool:
        return not is_frozen(tensor) or "step" in state.get(tensor, ())

    if not any(is_wanted(tensor) for group in param_groups for tensor in group["params"]):
        return param_groups
    return groups_with(param_groups, names_by_id, is_wanted)


def groups_as_in(
    in_job: Sequence[tuple[str, int]],
    param_groups: ParamGroups,
    registered: ParamGroups,
    names_by_id: dict[int, str],
) -> ParamGroups | None:
    """Returns the groups of a job that has (name, group) in this order; None when they are not
    parts of these param_groups, or lack a parameter of `registered`."""
    names = iter(parameter_names(param_groups, names_by_id))
    places = {
        next(names): (index, tensor)
        for index, group in enumerate(param_groups)
        for tensor in group["params"]
    }
    pairs: dict[int, list[tuple[str, torch.Tensor]]] = {}
    sources: dict[int, int] = {}
    for name, number in in_job:
        if name not in places:
            return None
        index, tensor = places[name]
        if sources.setdefault(number, index) != index:
            return None
        pairs.setdefault(number, []).append((name, tensor))
    found = {id(tensor) for each in pairs.values() for _, tensor in each}
    wanted = (id(tensor) for group in registered for tensor in group["params"])
    if sorted(pairs) != list(range(len(pairs))) or not found.issuperset(wanted):
        return None
    return [part_of(param_groups[sources[number]], pairs[number]) for number in sorted(pairs)]


def parameters_in_job(job: str, endpoint: str | None) -> list[tuple[str, int]]:
    """Returns (name, group) of each parameter, in the job's order; empty if optctl fails."""
    try:
        found = _optctl.ask(endpoint, "get", "params", job).get("parameters", [])
    except errors.OptstateError:
        return []
    names = [each["parameter"]["name"] for each in found]
    if parts.part_of(names) is not None:
        found = found[1:]
    pairs = [(_global_name(each["parameter"]), each["parameter"].get("group", 0)) for each in found]
    return list(dict.fromkeys(pairs))  # shards of a parameter are beside each other


def _global_name(parameter: dict[str, Any]) -> str:
    """Returns a parameter's name; of a shard that of the parameter that is sharded."""
    name = parameter["name"]
    return name.rpartition("@")[0] if "shard" in parameter else name
