"""Matches an optimizer's param_groups with the groups of its job."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

import torch

from optstate._torch.frozen import is_frozen
from optstate._torch.layout import raise_exchanged
from optstate.session_spec import ParameterSpec


class GroupOrder:
    """Finds the groups of a job in param_groups, whose order and parts a script may change.

    A group is identified by its tensors, as torch identifies state by its tensor. Frozen
    tensors, which are in param_groups but in no job, are left out.

    Threads: one at a time, like the optimizer.
    """

    def __init__(self, param_groups: Sequence[dict], specs: Sequence[ParameterSpec]) -> None:
        """param_groups: the groups that the job has, in its order."""
        self._groups = [list(group["params"]) for group in param_groups]
        self._group_of = {
            id(tensor): number for number, tensors in enumerate(self._groups) for tensor in tensors
        }
        names = (spec.name for spec in specs)
        self._names = [list(itertools.islice(names, len(bound))) for bound in self._groups]
        # Groups of the last in_order(), and for each group of the job which of them contains it.
        self._known = self._groups
        self._sources: list[int] | None = None
        self._left_out: list[torch.Tensor] = []
        self._left_out_ids: set[int] = set()

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records frozen tensors that are in param_groups and not in the job."""
        self._left_out += tensors
        self._left_out_ids = set(map(id, self._left_out))

    def thawed(self) -> list[torch.Tensor]:
        """Returns the tensors that were left out and can be updated now."""
        return [tensor for tensor in self._left_out if not is_frozen(tensor)]

    @property
    def left_out(self) -> Sequence[torch.Tensor]:
        return self._left_out

    def in_order(self, param_groups: Sequence[dict]) -> Sequence[dict]:
        """Returns the groups as the job has them, whatever their order in the list is now.

        RuntimeError when a group's tensors are not those of groups of the job.
        """
        if len(param_groups) != len(self._known) or not all(
            len(known) == len(group["params"]) and all(map(operator.is_, known, group["params"]))
            for group, known in zip(param_groups, self._known)
        ):
            self._sources = self._find_sources(param_groups)
            self._known = [list(group["params"]) for group in param_groups]
        if self._sources is None:
            return param_groups
        return [
            {**param_groups[source], "params": bound, "param_names": names}
            for source, bound, names in zip(self._sources, self._groups, self._names)
        ]

    def clips_with(self, number: int) -> int:
        """Returns the daemon's clips_with for a group of the job: groups that are parts of one
        group of the last in_order() are clipped by one norm."""
        if self._sources is None:
            return 0
        first = self._sources.index(self._sources[number])
        return 0 if first == number else first + 1

    def _find_sources(self, param_groups: Sequence[dict]) -> list[int] | None:
        """Returns for each group of the job the index of the param group that contains it; None
        when both lists are the same."""
        if [list(map(id, group["params"])) for group in param_groups] == [
            list(map(id, bound)) for bound in self._groups
        ]:
            return None
        sources: dict[int, int] = {}
        without_tensors = [k for k, bound in enumerate(self._groups) if not bound]
        for index, group in enumerate(param_groups):
            ids = set(map(id, group["params"]))
            numbers = {self._group_of[each] for each in ids if each in self._group_of}
            if not ids and without_tensors:
                numbers.add(without_tensors.pop(0))
            bound = [tensor for number in numbers for tensor in self._groups[number]]
            strangers = ids - self._left_out_ids - set(map(id, bound))
            missing = set(map(id, bound)) - ids
            if strangers or missing or not numbers.isdisjoint(sources):
                former = self._known[index] if index < len(self._known) else bound
                raise_exchanged(index, group["params"], former)
            sources.update(dict.fromkeys(numbers, index))
        if len(sources) != len(self._groups):
            raise RuntimeError("param_groups lost parameters since they were attached")
        return [sources[number] for number in range(len(self._groups))]
