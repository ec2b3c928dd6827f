"""Converts torch's param_groups to the layout that the daemon knows."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from optstate import _native
from optstate._torch.flat_shards import (
    given_name,
    lacks_place,
    name_without_fsdp,
    note_fsdp_shards,
)
from optstate._torch.optimizer_info import OptimizerInfo, infos
from optstate._torch.parameters.memory import check_disjoint
from optstate._torch.shards import is_dtensor, local_of, shard_of
from optstate.session_spec import ParameterSpec

DTYPE_CODES = {
    torch.float32: _native.FLOAT32,
    torch.bfloat16: _native.BFLOAT16,
    torch.float16: _native.FLOAT16,
}
NamedParameters = Iterable[tuple[str, torch.Tensor]]
# Prefixes that torch.compile and DistributedDataParallel put before a module's names.
# A job keeps its names whether or not the model is wrapped.
_WRAPPER_PREFIXES = ("_orig_mod.", "module.")


_SHARDS_ITSELF = (
    "optstate does not support it: the daemon shards the state by itself, so use"
    " DistributedDataParallel, or none"
)


def refuse_sharding_optimizer() -> None:
    """Raises RuntimeError when ZeroRedundancyOptimizer constructs the optimizer.

    That class gives each rank other parameters, which may look alike: of one shape, all zeros.
    """
    module = sys.modules.get("torch.distributed.optim")
    sharding = getattr(module, "ZeroRedundancyOptimizer", None)
    frame = sys._getframe(1)
    while sharding is not None and frame is not None:
        if isinstance(frame.f_locals.get("self"), sharding):
            raise RuntimeError(
                "ZeroRedundancyOptimizer gives each rank a part of the parameters, and"
                f" {_SHARDS_ITSELF}, with the optimizer itself and all parameters on each rank"
            )
        frame = frame.f_back


def raise_exchanged(
    group_index: int, tensors: Sequence[torch.Tensor], attached: Sequence[torch.Tensor]
) -> NoReturn:
    """Raises RuntimeError for a param group whose tensors are not those that were attached."""
    where = f"param_groups[{group_index}]['params']"
    if any(map(is_dtensor, tensors)) and not any(map(is_dtensor, attached)):
        raise RuntimeError(
            f"{where} was given DTensors after construction, as frameworks that use fully_shard do:"
            " shard the model first, and construct the optimizer of its parameters then"
        )
    if len(tensors) > len(attached) and all(map(operator.is_, attached, tensors)):
        raise RuntimeError(f"{where} has more than was attached: add_param_group adds parameters")
    raise RuntimeError(
        f"{where} has other tensors than were attached. Of frameworks DeepSpeed does so, which"
        " updates parts or copies of the parameters: give its engine no optimizer and call"
        " optimizer.step() yourself, or switch its ZeRO and mixed precision off. In a script,"
        " add_param_group adds parameters, and another optimizer begins with others"
    )


def check_tensor(tensor: torch.Tensor, what: str) -> None:
    """Raises TypeError when the daemon cannot hold such a parameter."""
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise TypeError(f"{what} is uninitialized: run the lazy module once before")
    if lacks_place(tensor):
        raise TypeError(
            f"{what} is FullyShardedDataParallel's, a part of the model's on each rank, and does"
            " not say which: give the wrapped module to the optimizer too, as model="
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{what} is {tensor.layout}: optstate supports dense parameters only")
    if tensor.is_complex():
        raise TypeError(
            f"{what} is complex ({tensor.dtype}), which optstate does not support:"
            " optimize torch.view_as_real of it"
        )
    if tensor.dtype not in DTYPE_CODES:
        raise TypeError(
            f"{what} is {tensor.dtype}: optstate supports float32, bfloat16 and float16"
        )
    if tensor.device.type == "meta":
        raise TypeError(f"{what} is on the meta device: it has no values")


def model_names(model: torch.nn.Module | NamedParameters | None) -> dict[int, str]:
    """Returns names of a model's parameters, or of (name, parameter) pairs, by id(), without
    the prefixes of wrappers. Notes on FSDP1's parameters which parts of the model they are."""
    if model is None:
        return {}
    if isinstance(model, torch.nn.Module):
        note_fsdp_shards(model)
    names = {}
    pairs = list(model.named_parameters() if isinstance(model, torch.nn.Module) else model)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in pairs):
        raise TypeError("named_parameters must be a module or (name, parameter) pairs")
    for name, parameter in pairs:
        names[id(parameter)] = name_without_fsdp(name)
    return dict(zip(names, _without_wrappers(list(names.values()))))


def _without_wrappers(names: list[str]) -> list[str]:
    """Strips wrappers' prefixes. A wrapper prefixes every name; a module's own attribute of
    that name seldom does."""
    for prefix in _WRAPPER_PREFIXES * 2:
        if names and all(name.startswith(prefix) for name in names):
            names = [name[len(prefix) :] for name in names]
    return names


def parameter_names(param_groups: Sequence[dict[str, Any]], by_id: dict[int, str]) -> list[str]:
    """Returns stable names: those that flat_shard() was given, else those of torch's (name,
    parameter) pairs, else those of model=, else "GROUP.INDEX"."""
    names: list[str | None] = []
    places: list[str] = []
    for group_index, group in enumerate(param_groups):
        given = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            name = by_id.get(id(parameter)) if given is None else given[index]
            names.append(given_name(parameter) or name)
            places.append(f"{group_index}.{index}")
    # A copied optimizer may have place names from before its groups changed their order.
    taken = set(names)
    for index, place in enumerate(places):
        if names[index] is None:
            while place in taken:
                place += "'"
            taken.add(place)
            names[index] = place
    return names


def unnamed_alike(
    param_groups: Sequence[dict[str, Any]], by_id: dict[int, str]
) -> tuple[str, str] | None:
    """Returns two parameters of equal shape and dtype that only their places tell apart."""
    seen: dict[tuple, str] = {}
    for group_index, group in enumerate(param_groups):
        if group.get("param_names") is not None:
            continue
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in by_id or given_name(parameter) or not parameter.numel():
                continue
            name = f"{group_index}.{index}"
            other = seen.setdefault((parameter.shape, parameter.dtype), name)
            if other != name:
                return other, name
    return None


def check_options(group: dict[str, Any], group_index: int) -> None:
    """Raises when a param group asks for what the daemon cannot do."""
    for key in ("max_value", "norm_type"):
        if group.get(key) is not None:
            raise ValueError(
                f"param_groups[{group_index}] has a {key} of its own, which is the optimizer's:"
                " a group has only max_norm"
            )
    if group.get("capturable"):
        raise ValueError("capturable=True is not supported: the update runs in the daemon")
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True is not supported: the update runs in the daemon, outside autograd"
        )


def check_group(group: dict[str, Any], group_index: int) -> None:
    """Raises when check_options() does, or when a parameter is in the group twice."""
    check_options(group, group_index)
    parameters = group["params"]
    if len(set(map(id, parameters))) != len(parameters):
        raise ValueError(
            f"param_groups[{group_index}] has the same parameter twice: torch.optim would"
            " update it twice a step, optstate updates a parameter once"
        )


def optimizer_info(param_groups: Sequence[dict[str, Any]], default: str) -> OptimizerInfo:
    """Returns the optimizer of these groups. Adam and AdamW may become each other: in newer
    torch, Adam's groups may ask for decoupled decay."""
    if default not in ("adam", "adamw"):
        return infos()[default]
    names = {
        ("adamw" if group["decoupled_weight_decay"] else "adam")
        if "decoupled_weight_decay" in group
        else default
        for group in param_groups
    }
    if len(names) != 1:
        raise ValueError("decoupled_weight_decay must be the same in all param groups")
    return infos()[names.pop()]


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which autograd will accumulate this parameter's gradient."""
    # In newer torch a parameter has a gradient dtype of its own, or None for any dtype.
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def parameter_specs(
    param_groups: Sequence[dict[str, Any]], names: Sequence[str], *, sharded: bool = False
) -> list[ParameterSpec]:
    """Returns the layout's parameters in order. sharded: of this rank, each with its shard, whose
    owner is not known yet.

    Raises TypeError, naming the parameter, and ValueError for two that share memory.
    """
    specs: list[ParameterSpec] = []
    for group_index, group in enumerate(param_groups):
        check_group(group, group_index)
        for parameter in group["params"]:
            name = names[len(specs)]
            check_tensor(parameter, f'parameter "{name}"')
            gradient = gradient_dtype(parameter)
            if gradient not in DTYPE_CODES:
                raise TypeError(f'gradients of parameter "{name}" are {gradient}')
            local = local_of(parameter)
            specs.append(
                ParameterSpec(
                    name=name,
                    shape=tuple(local.shape),
                    numel=local.numel(),
                    dtype=DTYPE_CODES[parameter.dtype],
                    gradient_dtype=DTYPE_CODES[gradient],
                    group=group_index,
                    shard=shard_of(parameter, f'parameter "{name}"') if sharded else None,
                )
            )
    parameters = [each for group in param_groups for each in group["params"]]
    check_disjoint(parameters, names)
    return specs
