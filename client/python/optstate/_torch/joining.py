"""Lets ranks whose inputs have run out take part in the steps of the others, with torch's Join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from optstate._torch.collective.averaging import replicate_gradients
from optstate._torch.job.attachment import Attachment
from optstate._torch.served import Served
from optstate._torch.shared import Shared


class _StepsOfOthers(JoinHook):
    """The steps that a rank without inputs takes for each iteration of the others."""

    def __init__(self, optimizer: Joining) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._step_without_inputs()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._optimizer._join_config = None  # which torch leaves, enabled


class _JoinAlone(Join):
    """torch's Join of one optimizer, which is inside it from entering the block to leaving it, also
    by an error. torch's own puts it inside when it is constructed."""

    def __init__(self, optimizer: Joining, *how: bool, **keywords: Any) -> None:
        self._around = optimizer._join_config  # of another Join
        try:
            super().__init__([optimizer], *how, **keywords)
            self._config = optimizer._join_config
        finally:
            optimizer._join_config = self._around

    def __enter__(self) -> None:
        (optimizer,) = self._joinables
        self._around, optimizer._join_config = optimizer._join_config, self._config

    def __exit__(self, *raised: Any) -> bool | None:
        try:
            return super().__exit__(*raised)
        finally:
            for joinable in self._joinables:
                joinable._join_config = self._around


def _has_whole_parameters(attachment: Attachment) -> bool:
    """Returns whether a rank computes gradients of whole parameters, also of those whose state
    other nodes have."""
    shared_out = attachment.shared_out
    shared_count = 0 if shared_out is None else len(shared_out.tensors)
    return not attachment.is_sharded or shared_count == attachment.parameters.count


class Joining:
    """The part of ServedOptimizer that torch.distributed.algorithms.join.Join knows: a Joinable.

    A rank without inputs takes the step with the options of the others. With reduction="daemon" and
    "collective" it adds nothing to the gradients' sum, which is divided by the number of all ranks,
    as DistributedDataParallel does by default. With "trainer" it gets the reduced gradients, of
    which it pushes its part, from a rank that has inputs.

    Threads: one at a time, like the optimizer.
    """

    _served: Served
    param_groups: list[dict[str, Any]]
    _join_config = Shared()
    _has_inputs = Shared()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Returns a context manager for a loop whose inputs run out on some ranks before others:
        torch's Join with this optimizer alone, as DistributedDataParallel.join() is with a model.

        Ranks without inputs take part in the steps of the others when they leave the block. It is
        for reduction="daemon" and "collective" without DistributedDataParallel. Whatever else
        communicates in the loop must be in the same Join: Join([model, optimizer]).

        divide_by_initial_world_size: True, as gradients are averaged over all ranks.
        enable: False: the inputs are equally many, and nothing is done. throw_on_early_termination:
        RuntimeError on all ranks once a rank has no more inputs. Raises the errors of join_hook(),
        also with enable=False. Collective: every rank enters and leaves the block.
        """
        return _JoinAlone(
            self,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook for torch's Join, which passes it the keywords that it was given.

        One step() is taken in each iteration, on every rank. ValueError for
        divide_by_initial_world_size=False, and RuntimeError for an optimizer with accumulate=True,
        of sharded parameters, or with norm_group.
        """
        if not kwargs.get("divide_by_initial_world_size", True):
            raise ValueError(
                "divide_by_initial_world_size=False is not supported by optstate: gradients are"
                " averaged over all ranks, also those without inputs"
            )
        attachment = self._served.attached()
        refused = None
        if self._served.settings.accumulate:
            refused = (
                "accumulate=True: a rank without inputs cannot know which iterations are steps"
            )
        elif not _has_whole_parameters(attachment):
            refused = "sharded parameters: a rank without inputs has no gradients of its shards"
        elif attachment.nodes is not None and attachment.nodes.spans_jobs:
            refused = "norm_group: ranks of other jobs would wait for the steps of this one"
        if refused is not None:
            raise RuntimeError(f"optstate does not support Join, or join(), with {refused}")
        return _StepsOfOthers(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the messages by which ranks find out who has inputs."""
        is_nccl = dist.get_backend(self.join_process_group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The ranks that train the job together."""
        return self._served.process_group or dist.distributed_c10d._get_default_group()

    @property
    def _is_inside_join(self) -> bool:
        return self._join_config is not None and self._join_config.enable

    def _step_without_inputs(self) -> None:
        if not self._is_inside_join:
            raise RuntimeError("a Join was entered a second time: make another one for each loop")
        # Gradients of this rank's last iteration are still there.
        self.zero_grad(set_to_none=True)
        self._has_inputs = False
        try:
            self.step()
        finally:
            self._has_inputs = True

    def _meet(self, attachment: Attachment, *, has_scaler: bool) -> None:
        """Inside Join, has all ranks take the same step; elsewhere does nothing."""
        if not self._is_inside_join:
            return
        has_inputs = self._has_inputs
        said = None
        tensors = attachment.parameters.tensors
        if has_inputs:
            Join.notify_join_context(self)
            said = (self._options(), has_scaler, [each.grad is not None for each in tensors])
        everyones = attachment.ranks.gather(said)
        source = next(rank for rank, each in enumerate(everyones) if each is not None)
        options, _, has_gradient = everyones[source]
        if any(each is not None and each[1] for each in everyones):
            raise RuntimeError(
                "a GradScaler cannot be used inside Join: ranks without inputs have none, and would"
                " wait for a step that it skips. Use loss_scaler=optstate.LossScaler(...)"
            )
        if not has_inputs:
            self._take_options(options)
        if self._served.settings.reduction == "trainer" and None in everyones:
            wanted = [each for each, has in zip(tensors, has_gradient) if has]
            replicate_gradients(attachment.ranks, wanted, source, has_mine=has_inputs)

    def _options(self) -> tuple[Sequence[dict[str, Any]], Sequence[Any]]:
        apart = ("params", "param_names")
        groups = [{k: v for k, v in group.items() if k not in apart} for group in self.param_groups]
        served = self._served
        return groups, (served.max_norm, served.max_value, served.norm_type)

    def _take_options(self, options: tuple[Sequence[dict[str, Any]], Sequence[Any]]) -> None:
        """Takes the options of a rank with inputs, whose scheduler goes on."""
        groups, limits = options
        for group, theirs in zip(self.param_groups, groups):
            group.update(theirs)
        served = self._served
        served.max_norm, served.max_value, served.norm_type = limits
