"""Checks that two sides of a program are where rounding may have taken them."""

from __future__ import annotations

from typing import Any

import torch

from programs.sides import Side

# A step adds a quotient of sums of some roundings each; Muon's comes out of
# Newton-Schulz in bfloat16 (as test_torch_option_matrix has it).
ULP = 2.0**-23
OF_WAY = {"Muon": 5e-2}
OF_STATE = {"Muon": 1e-5}
# Entries that ours has and torch's lacks: SGD, Lion and Muon count no steps there, and a count
# that came to torch with our checkpoint stays what it was.
WITHOUT_STEP = ("SGD", "Lion", "Muon")
ONLY_OURS = ("step", "master_param")


class Mismatch(AssertionError):
    """The sides differ."""


class Comparison:
    """Compares the sides of one program after each operation.

    A parameter may differ by some roundings of the way it went, step by step, and by an ulp of
    its size for every operation; and, when the exact side runs too, by twice as much as torch's
    own differs from that.
    """

    def __init__(self, optimizer: str) -> None:
        self._counts_steps = optimizer not in WITHOUT_STEP
        self._of_way = OF_WAY.get(optimizer, 16 * ULP)
        self._of_state = OF_STATE.get(optimizer, 256 * ULP)
        self._way: dict[str, float] = {}
        self._size: dict[str, float] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._peaks: dict[tuple[str, str], float] = {}
        self._operations = 0

    def parameters(self, ours: Side, torchs: Side, exact: Side | None) -> None:
        self._operations += 1
        mine = dict(ours.model.named_parameters())
        theirs = dict(torchs.model.named_parameters())
        truth = {} if exact is None else dict(exact.model.named_parameters())
        if list(mine) != list(theirs):
            raise Mismatch(f"parameters {list(mine)} beside torch's {list(theirs)}")
        for name, their in theirs.items():
            my = mine[name]
            if (my.dtype, my.shape, my.requires_grad) != (
                their.dtype,
                their.shape,
                their.requires_grad,
            ):
                raise Mismatch(f"{name} is {my.dtype} {my.requires_grad}, torch's {their.dtype}")
            value = their.detach().double().clone()
            before = self._before.get(name)
            if before is not None and value.numel():
                step = float((value - before).abs().max())
                self._way[name] = self._way.get(name, 0.0) + step
            self._before[name] = value
            if not value.numel():
                continue
            self._size[name] = max(self._size.get(name, 0.0), float(value.abs().max()))
            allowed = self._of_way * self._way.get(name, 0.0)
            allowed += self._operations * ULP * self._size[name]
            if their.dtype is not torch.float32:
                allowed += torch.finfo(their.dtype).eps * self._size[name]
            if name in truth:
                allowed += 2 * float((value - truth[name].detach().double()).abs().max())
            self._check(f"parameter {name}", my, value, allowed)

    def options(self, ours: Side, torchs: Side) -> None:
        """param_groups are equal, value by value, and of the same parameters."""
        of_side = []
        for side in (ours, torchs):
            names = {id(each): name for name, each in side.model.named_parameters()}
            of_side.append(
                [
                    # torch's load_state_dict puts differentiable into the defaults.
                    {
                        **group,
                        "differentiable": None,
                        "params": [names.get(id(each)) for each in group["params"]],
                    }
                    for group in side.optimizer.param_groups
                ]
            )
        mine, theirs = of_side
        if mine != theirs:
            raise Mismatch(f"param_groups are {mine}, torch's {theirs}")

    def values(self, what: str, mine: Any, theirs: Any, exact: Any) -> None:
        """Compares the results of an operation: state by parameter, or plain numbers."""
        if not isinstance(theirs, dict):
            if mine != theirs:
                raise Mismatch(f"{what}: {mine}, torch's {theirs}")
            return
        extra = [key for key in mine if key not in theirs and key not in ONLY_OURS]
        extra = [key for key in extra if not self._is_start(mine[key])]
        missing = [key for key in theirs if key not in mine]
        if not self._counts_steps:  # of ours, which torch has loaded
            missing = [k for k in missing if k != "step" and not self._is_start(theirs[k])]
        if theirs.get("step", 1) == 0:  # Adagrad's, which is not updated yet
            missing = [key for key in missing if key != "master_param"]
        # torch's fused optimizers take a step that a scaler skips, and begin state in it.
        missing = [k for k in missing if not self._is_untouched(theirs[k])]
        if self._is_untouched(theirs):
            missing = []
        if extra or missing:
            raise Mismatch(f"{what} has {sorted(mine)}, torch's {sorted(theirs)}")
        for key, value in theirs.items():
            if key not in mine:
                continue
            exactly = exact.get(key) if isinstance(exact, dict) else None
            if isinstance(value, dict):
                self.values(f"{what} {key}", mine[key], value, exactly)
            elif isinstance(value, torch.Tensor):
                self._tensors(what, key, mine[key], value, exactly)
            elif mine[key] != value:
                raise Mismatch(f"{what} {key}: {mine[key]}, torch's {value}")

    @staticmethod
    def _is_untouched(entry: Any) -> bool:
        """Returns whether the entry is that of a parameter that was never updated."""
        return (
            isinstance(entry, dict)
            and isinstance(entry.get("step"), torch.Tensor)
            and not any(bool(each.any()) for key, each in entry.items() if key != "master_param")
        )

    @staticmethod
    def _is_start(entry: Any) -> bool:
        """Returns whether torch keeps nothing at all of the entry: SGD without momentum, Muon."""
        return isinstance(entry, dict) and set(entry) <= set(ONLY_OURS)

    def _tensors(self, what: str, key: str, mine: Any, theirs: torch.Tensor, exact: Any) -> None:
        if key == "step" and not self._counts_steps:
            return
        if not isinstance(mine, torch.Tensor) or mine.shape != theirs.shape:
            raise Mismatch(f"{what} {key} is {mine}, torch's {theirs}")
        if not theirs.numel():
            return
        value = theirs.detach().double()
        peak = max(self._peaks.get((what, key), 0.0), float(value.abs().max()))
        self._peaks[what, key] = peak
        allowed = self._of_state * peak
        if key == "step":
            allowed = 0.0
        elif key == "master_param":
            allowed += self._of_way * max(self._way.values(), default=0.0)
            allowed += self._operations * ULP * peak
        if isinstance(exact, torch.Tensor) and exact.shape == value.shape:
            allowed += 2 * float((value - exact.double()).abs().max())
        self._check(f"{what} {key}", mine, value, allowed)

    @staticmethod
    def _check(what: str, mine: torch.Tensor, theirs: torch.Tensor, allowed: float) -> None:
        one, other = mine.detach().double().reshape(-1), theirs.reshape(-1)
        equal = (one == other) | (one.isnan() & other.isnan())
        apart = (one - other).abs().masked_fill(equal, 0.0)
        # Not <=: a NaN on one side is a difference.
        if not bool((apart <= allowed).all()):
            worst = int(apart.nan_to_num(torch.inf).argmax())
            raise Mismatch(
                f"{what}[{worst}] is {one[worst].item()!r}, torch's {other[worst].item()!r}:"
                f" {apart[worst].item():.3e} apart, {allowed:.3e} allowed"
            )
