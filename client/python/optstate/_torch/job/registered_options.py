"""The options of a job's groups, and the hyperparameters of its steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from optstate import _native
from optstate._torch.layout import check_options, optimizer_info
from optstate._torch.optimizer_info import OptimizerInfo, hyperparams_of, max_norm_of
from optstate._torch.parameters.group_order import GroupOrder

ParamGroups = Sequence[dict[str, Any]]


class RegisteredOptions:
    """The options that the groups of a job were registered with, in the job's order.

    A group may change its hyperparameters, but not these. Threads: one at a time.
    """

    def __init__(
        self,
        info: OptimizerInfo,
        group_options: Sequence[int],
        required: Collection[str],
        fixed: Mapping[str, float],
    ) -> None:
        """required: options of torch's class, which a group may lack. fixed: arguments of the
        constructor that no group can change."""
        self._info = info
        self._group_options = group_options
        self._required = required
        self.fixed = fixed
        # The struct of a commit.
        self.hyperparams = _native.array_of(_native.Hyperparams, len(group_options))

    def check_groups(self, param_groups: ParamGroups) -> None:
        """Raises ValueError when options of param_groups differ from those registered."""
        for index, group in enumerate(param_groups):
            self._check(group, self._group_options[index], index)
        if optimizer_info(param_groups, self._info.name) != self._info:
            raise ValueError("decoupled_weight_decay differs from what the job was registered with")

    def check_required(self, param_groups: ParamGroups) -> None:
        """Raises KeyError when a group, even one without parameters in the job, lacks an option."""
        for group in param_groups:
            for name in self._required:
                group[name]

    def check_same(self, group: dict[str, Any], present: dict[str, Any], index: int) -> None:
        """Does the check of check_groups() for a group that the job is to get as it is now."""
        self._check(group, self._info.option_bits(present), index)

    def _check(self, group: dict[str, Any], registered: int, index: int) -> None:
        check_options(group, index)
        differing = registered ^ self._info.option_bits(group)
        for bit, name in enumerate(self._info.options):
            if differing >> bit & 1:
                how = "with" if registered >> bit & 1 else "without"
                raise ValueError(
                    f"{name} of param_groups[{index}] is {group[name]}, but the job was"
                    f" registered {how} it"
                )

    def fixed_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the group with the constructor's fixed values in place of its own."""
        return {**group, **self.fixed} if self.fixed else group

    def fill(self, param_groups: ParamGroups, order: GroupOrder) -> None:
        """Fills the struct for a commit, before anything is pushed. ValueError, in torch's words,
        for invalid values, and KeyError for missing ones."""
        for index, group in enumerate(param_groups):
            out = self.hyperparams[index]
            values = hyperparams_of(self._info, group, index, self._required, self.fixed)
            out.value[: len(values)] = values
            out.max_norm = max_norm_of(group, index)
            out.clips_with = order.clips_with(index)
