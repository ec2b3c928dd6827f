"""Hooks that fetch a module's parameters where they are computed with, and push gradients."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from optstate.parameter_store import ParameterStore


class _Saved(NamedTuple):
    """The place of a parameter's values, which autograd keeps instead of them."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class LayerHooks:
    """The hooks of one module; see ParameterStore.hooks().

    A parameter outside of its submodule's forward() is a tensor of its shape whose elements are one
    number in memory. Within, its values are there. What autograd would keep of them for the
    backward pass is their name, and they are fetched again there.

    Threads: one at a time.
    """

    def __init__(self, store: ParameterStore, module: torch.nn.Module) -> None:
        self._store = store
        self._names: dict[int, str] = {}  # by id() of a parameter
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._own: dict[torch.nn.Module, list[torch.nn.Parameter]] = {}
        self._fetched: dict[int, str] = {}  # by address of the values
        # Which submodule was computed after and before another one last: what to prefetch.
        self._follows: dict[torch.nn.Module, torch.nn.Module] = {}
        self._precedes: dict[torch.nn.Module, torch.nn.Module] = {}
        self._last: torch.nn.Module | None = None
        self._submodule_of: dict[str, torch.nn.Module] = {}
        self._handles: list[Any] = []
        self._saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._take_over(module)

    def _take_over(self, module: torch.nn.Module) -> None:
        """Replaces the module's parameters by ones without memory."""
        replaced: dict[int, torch.nn.Parameter] = {}
        given = {id(parameter): name for name, parameter in module.named_parameters()}
        known = self._store.shapes
        for name, parameter in module.named_parameters():
            if known.get(name) != (tuple(parameter.shape), parameter.dtype):
                raise ValueError(
                    f'the module\'s "{name}" is {tuple(parameter.shape)}, {parameter.dtype}; the'
                    f" store has {known.get(name, 'no such parameter')}"
                )
        for submodule in module.modules():
            for key, parameter in submodule._parameters.items():
                if parameter is None:
                    continue
                new = replaced.get(id(parameter))
                if new is None:
                    new = torch.nn.Parameter(_placeholder(parameter), parameter.requires_grad)
                    replaced[id(parameter)] = new
                    self._names[id(new)] = given[id(parameter)]
                    self._parameters[given[id(parameter)]] = new
                submodule._parameters[key] = new
                self._own.setdefault(submodule, []).append(new)

    def __enter__(self) -> LayerHooks:
        for submodule, parameters in self._own.items():
            self._handles += [
                submodule.register_forward_pre_hook(self._before),
                submodule.register_forward_hook(self._after, always_call=True),
            ]
            for parameter in parameters:
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._push)
                    self._handles.append(hook)
        self._saved.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._saved.__exit__(kind, error, trace)
        while self._handles:
            self._handles.pop().remove()

    def _names_of(self, submodule: torch.nn.Module) -> list[str]:
        return [self._names[id(parameter)] for parameter in self._own[submodule]]

    def _before(self, submodule: torch.nn.Module, _: Any) -> None:
        if self._last is not None:
            self._follows[self._last] = submodule
            self._precedes[submodule] = self._last
        self._last = submodule
        self._prefetch(self._follows.get(submodule))
        names = self._names_of(submodule)
        for name, values in zip(names, self._store.fetch_many(names)):
            self._submodule_of[name] = submodule
            self._fetched[values.data_ptr()] = name
            self._parameters[name].data = values

    def _prefetch(self, submodule: torch.nn.Module | None) -> None:
        if submodule is not None:
            self._store.prefetch(self._names_of(submodule))

    def _after(self, submodule: torch.nn.Module, _: Any, __: Any) -> None:
        for parameter in self._own[submodule]:
            self._fetched.pop(parameter.data_ptr(), None)
            parameter.data = _placeholder(parameter)
        self._store.release(self._names_of(submodule))

    def _push(self, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._store.push(self._names[id(parameter)], gradient)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        name = None
        if tensor.layout is torch.strided and tensor.numel():
            name = self._fetched.get(tensor.untyped_storage().data_ptr())
        if name is None:
            return tensor
        return _Saved(name, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def _unpack(self, kept: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        self._last = None  # a backward pass
        self._prefetch(self._precedes.get(self._submodule_of[kept.name]))
        values = self._store.fetch(kept.name)
        self._store.release([kept.name])
        return values.as_strided(kept.size, kept.stride, kept.offset)


def _placeholder(parameter: torch.Tensor) -> torch.Tensor:
    shape: Sequence[int] = parameter.shape
    return torch.zeros((), dtype=parameter.dtype).expand(*shape)
