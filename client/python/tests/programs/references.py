"""The references that ours is compared with: torch's, with fp32 masters of 16-bit parameters.

torch rounds a 16-bit parameter, and its moments, after every step. What optstate documents is a
step of the fp32 master whose rounding the parameter is; so the reference lends torch's own
step() the masters. With float64 in place of fp32 it is the exact run.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from plain_optimizers import LAMB as PlainLAMB
from plain_optimizers import Lion


class LAMB(PlainLAMB):
    """LAMB with `maximize`."""

    def __init__(self, params: Any, *args: Any, maximize: bool = False, **options: Any) -> None:
        super().__init__(params, *args, **options)
        for group in self.param_groups:
            group.setdefault("maximize", maximize)
        self.defaults["maximize"] = maximize

    @torch.no_grad()
    def step(self) -> None:
        negated = [p for g in self.param_groups if g["maximize"] for p in g["params"]]
        for parameter in negated:
            if parameter.grad is not None:
                parameter.grad = -parameter.grad
        super().step()


class Reference(torch.optim.Optimizer):
    """Adds masters and the meaning of daemon options to a class of torch: a mixin before it."""

    master_dtype = torch.float32  # of parameters of 16 bits
    is_exact = False  # float64 masters of all

    def prepare(self, clipping: dict[str, Any]) -> None:
        """Sets up clipping, sums and masters; called after construction, and in a copy."""
        self.clipping = clipping
        self.micro: dict[torch.Tensor, torch.Tensor] = {}
        # Gradients before they were rounded, where the daemon takes the mean: it does not round it.
        self.means: dict[torch.Tensor, torch.Tensor] = {}
        self.norms: list[float] = []
        self.masters: dict[torch.Tensor, torch.Tensor] = self.__dict__.get("masters", {})
        # Masters of a checkpoint whose parameters may be loaded after them, until the next step.
        self.loaded: dict[torch.Tensor, torch.Tensor] = {}
        for parameter, entry in self.state.items():  # Adagrad's, of its constructor
            for key, value in entry.items():
                if key == "sum":
                    entry[key] = value.to(self._master_dtype(parameter))

    def _parameters(self) -> list[torch.Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def _master_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if self.is_exact:
            return torch.float64
        return torch.float32

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the values in full: the master's, unless the script has written the parameter."""
        master = self.masters.get(parameter)
        values = parameter.detach()
        if parameter in self.loaded:
            return self._fitting(self.loaded[parameter], values)
        if master is not None and torch.equal(master.to(values.dtype), values):
            return master
        return values.to(self._master_dtype(parameter), copy=True)

    @staticmethod
    def _fitting(master: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.where(master.to(values.dtype) == values, master, values.to(master.dtype))

    @contextlib.contextmanager
    def _in_full(self) -> Iterator[None]:
        """Parameters are their masters meanwhile, without gradients."""
        narrow = [p for p in self._parameters() if p.dtype is not self._master_dtype(p)]
        gradients = [p.grad for p in self._parameters()]
        was = [p.data for p in narrow]
        for parameter in self._parameters():
            parameter.grad = None
        for parameter in narrow:
            parameter.data = self._master(parameter)
        try:
            yield
        finally:
            for parameter, values in zip(narrow, was):
                self.masters[parameter] = parameter.data
                self.loaded.pop(parameter, None)
                values.copy_(parameter.data)
                parameter.grad = None
                parameter.data = values
            for parameter, gradient in zip(self._parameters(), gradients):
                parameter.grad = gradient

    def accumulate(self, scale: float) -> None:
        """Does what accumulate_step() does. scale: of the loss."""
        for parameter in self._parameters():
            if parameter.grad is not None:
                total = self.micro.get(parameter, 0)
                self.micro[parameter] = total + self.in_full(parameter) / scale
                parameter.grad = None

    def in_full(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's gradient in full precision, unless the script changed it since."""
        mean, gradient = self.means.get(parameter), parameter.grad
        if mean is None or not mean.numel() or not mean.isfinite().all():
            return gradient.float().clone()
        largest, was = float(gradient.abs().max()), float(mean.abs().max())
        # A scaler has multiplied by a power of two, which rounds nothing.
        factor = 2.0 ** round(math.log2(largest / was)) if 0 < largest < math.inf and was else 1.0
        in_full = mean * factor
        return in_full if torch.equal(in_full.to(gradient.dtype), gradient) else gradient.float()

    def _gradients(self) -> list[torch.Tensor | None]:
        found = []
        for parameter in self._parameters():
            gradient = None if parameter.grad is None else self.in_full(parameter)
            if parameter in self.micro:
                total = self.micro[parameter]
                gradient = total.clone() if gradient is None else total + gradient
            found.append(gradient)
        self.micro.clear()
        return found

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients()
        self.norms = [float(g.double().norm()) for g in gradients if g is not None]
        hooks = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        with self._in_full():
            for parameter, gradient in zip(self._parameters(), gradients):
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
            self._clip()
            # The wrapper of the base class's step() would call the hooks once more.
            self._optimizer_step_pre_hooks = OrderedDict()
            self._optimizer_step_post_hooks = OrderedDict()
            try:
                super().step()
            finally:
                self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = hooks
        return loss

    def _clip(self) -> None:
        norm_type = self.clipping.get("norm_type", 2.0)
        clip = torch.nn.utils.clip_grad_norm_
        # The norm of all is that of the gradients before the groups are clipped.
        gradients = [p.grad for p in self._parameters() if p.grad is not None and p.numel()]
        if not gradients:
            return
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        for group in self.param_groups:
            if group.get("max_norm"):
                clip([p for p in group["params"] if p.numel()], group["max_norm"], norm_type)
        if self.clipping.get("max_norm"):
            torch.nn.utils.clip_grads_with_norm_(
                self._parameters(), self.clipping["max_norm"], norm
            )
        if self.clipping.get("max_value"):
            torch.nn.utils.clip_grad_value_(self._parameters(), self.clipping["max_value"])

    def state_dict(self) -> dict[str, Any]:
        said = super().state_dict()
        for number, parameter in enumerate(self._parameters()):
            if parameter not in self.masters:
                continue
            entry, master = said["state"].get(number), self._master(parameter)
            # torch's SGD has no entry without momentum, but a master may differ.
            is_sgd = isinstance(self, torch.optim.SGD)
            if entry or (is_sgd and not torch.equal(master, parameter.detach().to(master.dtype))):
                said["state"][number] = {**(entry or {}), "master_param": master}
        return said

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        masters = {}
        for number, entry in state_dict["state"].items():
            if "master_param" in entry:
                masters[number] = entry["master_param"]
        state = {
            number: {key: value for key, value in entry.items() if key != "master_param"}
            for number, entry in state_dict["state"].items()
        }
        limits = [{"max_norm": g["max_norm"]} if "max_norm" in g else {} for g in self.param_groups]
        with self._in_full():
            super().load_state_dict({**state_dict, "state": state})
        for group, limit in zip(self.param_groups, limits):
            group.update({**limit, **group})  # a checkpoint without one leaves it as it is
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self._parameters()):
            self.masters.pop(parameter, None)
            self.loaded.pop(parameter, None)
            if number in masters:
                master = masters[number].to(self._master_dtype(parameter))
                self.masters[parameter] = self._fitting(master, parameter.detach())
                if not torch.equal(self.masters[parameter], master):
                    self.loaded[parameter] = master

    def __getstate__(self) -> dict[str, Any]:
        masters = {parameter: self._master(parameter) for parameter in self.masters}
        return {**super().__getstate__(), "masters": masters}


def _reference(torchs: type[torch.optim.Optimizer], exact: bool) -> type[Reference]:
    name = ("Exact" if exact else "Reference") + torchs.__name__
    made = type(name, (Reference, torchs), {"is_exact": exact, "__module__": __name__})
    globals()[name] = made  # where pickle looks for it
    return made


_TORCHS = {"Lion": Lion, "LAMB": LAMB}
for _name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adafactor", "Muon"):
    if hasattr(torch.optim, _name):
        _TORCHS[_name] = getattr(torch.optim, _name)
SERVED = tuple(sorted(_TORCHS))
REFERENCES = {name: _reference(torchs, False) for name, torchs in _TORCHS.items()}
EXACT = {name: _reference(torchs, True) for name, torchs in _TORCHS.items()}
