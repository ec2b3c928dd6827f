"""A program's two sides: a training script with torch's optimizer, and with ours."""

from __future__ import annotations

import copy
from typing import Any

import optstate
import torch
import torch.distributed as dist
from optstate._torch.gradients import views as gradient_views

from programs import references
from programs.model import Model
from programs.program import Program

# Gives small models gradients that are views.
gradient_views.BYTES_MIN = 1

# Steps without overflow before a loss scale grows.
GROWTH_INTERVAL = 3


class Side:
    """The variables of a training script. Operations use them through these methods."""

    is_ours = False

    def __init__(self, program: Program, shared: dict[str, Any]) -> None:
        """shared: what the sides of a program tell each other."""
        self.program = program
        self.shared = shared
        self.model = Model(program.weights, program.seed)
        self.slots: dict[Any, Any] = {}
        self.scheduler: Any = None
        self.scheduler_kind = ""
        self.counted: dict[str, int] = {"before": 0, "after": 0}
        served = program.served
        self.clipping = {
            key: served[key] for key in ("max_norm", "max_value", "norm_type") if key in served
        }
        self.accumulates = served.get("accumulate", False)
        self.reduction = served.get("reduction", "trainer")
        self.scaler: torch.amp.GradScaler | None = None
        self.optimizer = self.make_optimizer(self.first_groups(), program.wire)

    # Making optimizers.

    def first_groups(self) -> list[dict[str, Any]]:
        groups = [{"params": [], **options} for options in self.program.group_options]
        for weight, named in zip(self.program.weights, self.named()):
            groups[weight.group % len(groups)]["params"].append(named)
        return [group for group in groups if group["params"]]

    def named(self) -> list[Any]:
        """Parameters as the script gives them to an optimizer."""
        if self.program.names == "pairs":
            return list(self.model.named_parameters())
        return self.model.distinct()

    def groups_again(self) -> list[dict[str, Any]]:
        """The present groups as a script that starts anew writes them."""
        names = {id(each): name for name, each in self.model.named_parameters()}
        groups = []
        for group in self.optimizer.param_groups:
            made = {key: value for key, value in group.items() if key != "param_names"}
            made["params"] = list(group["params"])
            if self.program.names == "pairs":
                made["params"] = [(names[id(each)], each) for each in made["params"]]
            groups.append(made)
        return groups

    def make_optimizer(self, groups: list[dict[str, Any]], wire: str) -> torch.optim.Optimizer:
        raise NotImplementedError

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Goes on with another optimizer."""
        self.optimizer = optimizer
        self.scheduler = None

    def parameter(self, index: int) -> torch.nn.Parameter:
        parameters = self.model.distinct()
        return parameters[index % len(parameters)]

    def group(self, index: int) -> dict[str, Any]:
        return self.optimizer.param_groups[index % len(self.optimizer.param_groups)]

    # Training.

    def backward(self, batch: int, **how: Any) -> torch.Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        loss = self.model.loss(batch + 10_000 * rank, **how)
        self.scaled(loss).backward()
        return loss

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    @property
    def reduces(self) -> bool:
        """Returns whether the script averages gradients over the ranks."""
        return dist.is_initialized() and dist.get_world_size() > 1

    def reduce(self) -> None:
        """Reduces as DistributedDataParallel does: a gradient that a rank lacks counts as 0."""
        if not self.reduces:
            return
        parameters = self.model.distinct()
        present = torch.tensor([float(each.grad is not None) for each in parameters])
        dist.all_reduce(present)
        for parameter, count in zip(parameters, present.tolist()):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                total = self.in_full(parameter)
                dist.all_reduce(total)
                mean = total / dist.get_world_size()
                parameter.grad = mean.to(parameter.dtype)
                self.note_mean(parameter, mean)

    def in_full(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a copy of its gradient as float32."""
        return parameter.grad.float().clone()

    def note_mean(self, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        """Called with what a gradient is before it is rounded to its dtype."""

    def optimizer_step(self, closure: Any = None, unscales: bool = False) -> None:
        """One step, by whichever scaler there is."""
        if self.scaler is None:
            self.optimizer.step(closure)
            return
        if unscales:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def micro_step(self) -> None:
        """Does what accumulate_step() is for."""
        raise NotImplementedError

    def close(self) -> None:
        pass

    # The methods below return what a script can observe.

    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by the parameters' names."""
        said = self.optimizer.state_dict()
        names = {id(each): name for name, each in self.model.named_parameters()}
        found = {}
        for group, saved in zip(self.optimizer.param_groups, said["param_groups"]):
            for parameter, number in zip(group["params"], saved["params"]):
                entry = said["state"].get(number)
                if entry:
                    entry = {key: value for key, value in entry.items() if value is not None}
                    found[names[id(parameter)]] = entry
        return found


class TorchSide(Side):
    classes = references.REFERENCES

    def __init__(self, program: Program, shared: dict[str, Any]) -> None:
        super().__init__(program, shared)
        if program.scaler is not None:
            self.scaler = torch.amp.GradScaler(
                "cpu", init_scale=1024.0, growth_interval=GROWTH_INTERVAL
            )

    def make_optimizer(self, groups: list[dict[str, Any]], wire: str) -> torch.optim.Optimizer:
        made = self.classes[self.program.optimizer](groups, **self.program.options)
        made.prepare(self.clipping)
        return made

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        super().adopt(optimizer)
        optimizer.prepare(self.clipping)

    def micro_step(self) -> None:
        self.reduce()
        self.optimizer.accumulate(self.loss_scale())

    def in_full(self, parameter: torch.Tensor) -> torch.Tensor:
        # A gradient that is taken once more has been reduced already.
        return self.optimizer.in_full(parameter)

    def note_mean(self, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        if self.reduction == "daemon":
            self.optimizer.means[parameter] = mean


class ExactSide(TorchSide):
    """torch's optimizer in float64: says how far torch's own rounding takes it."""

    classes = references.EXACT


class ServedSide(Side):
    is_ours = True

    def __init__(
        self, program: Program, shared: dict[str, Any], job: str, endpoints: dict[str, str]
    ) -> None:
        self.job = job
        self.endpoints = endpoints
        super().__init__(program, shared)
        if program.scaler == "trainer":
            self.scaler = torch.amp.GradScaler(
                "cpu", init_scale=1024.0, growth_interval=GROWTH_INTERVAL
            )

    def make_optimizer(self, groups: list[dict[str, Any]], wire: str) -> torch.optim.Optimizer:
        program = self.program
        served = copy.copy(program.served)
        served.update(self.clipping)
        if program.scaler == "daemon":
            served["loss_scaler"] = optstate.LossScaler(
                init_scale=1024.0, growth_interval=GROWTH_INTERVAL
            )
        if program.names == "model":
            served["model"] = self.model
        return getattr(optstate, program.optimizer)(
            groups,
            **program.options,
            **served,
            job=self.job if program.has_job else None,
            endpoint=self.endpoints[wire],
        )

    def next_job(self) -> str | None:
        """The next optimizer is of a job of another name."""
        self.job += "-next"
        return self.job if self.program.has_job else None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        if self.program.scaler == "daemon":
            return self.optimizer.scale(loss)
        return super().scaled(loss)

    @property
    def reduces(self) -> bool:
        return super().reduces and self.reduction == "trainer"

    def micro_step(self) -> None:
        self.reduce()
        self.optimizer.accumulate_step()

    def loss_scale(self) -> float:
        if self.program.scaler == "daemon":
            return self.optimizer.loss_scale
        return super().loss_scale()

    def close(self) -> None:
        self.optimizer.close()
