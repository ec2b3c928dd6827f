"""Finds in which way ranks have prepared other steps than each other: by which option, if by one.

Votes have digests alone, which say that a step differs, and not why. What each rank has taken the
step with is exchanged only when a step is refused for it, on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from optstate import errors
from optstate._torch.nodes.places import Places
from optstate._torch.nodes.resolution import Step
from optstate._torch.optimizer_info import by_kind
from optstate._torch.ranks import Ranks
from optstate.session_spec import SessionSpec

# Options that all jobs of a norm_group share; other options are each job's own.
_OF_ALL_JOBS = ("max_norm", "norm_type", "loss scale")
# Options whose 0 says that there is none.
_NONE_AT_ZERO = ("max_norm", "max_value", "loss scale")

_EQUAL_OPTIONS = "Give all ranks equal options"


class _Facts(NamedTuple):
    """One rank's step."""

    job: str
    options: dict[str, float]  # in the order in which they are compared
    loaded: int


class Differences:
    """How this rank takes its steps, for the error of ranks that do so otherwise.

    Threads: one at a time. Collective: describe().
    """

    def __init__(self, ranks: Ranks, places: Places) -> None:
        self._ranks = ranks
        self._places = places
        self._spec: SessionSpec | None = None
        self._options: tuple[Any, float, dict[str, Any]] | None = None

    def note_spec(self, spec: SessionSpec) -> None:
        """Notes the job."""
        self._spec = spec

    def note_options(self, hyperparams: Any, loss_scale: float, how: dict[str, Any]) -> None:
        """Notes what the next step is taken with, as NodeAgreement.note_options() does."""
        self._options = hyperparams, loss_scale, how

    def describe(
        self, votes: Sequence[Step], kinds: Sequence[Hashable] | None, loaded: int, said: str
    ) -> str:
        """Returns why the votes of all ranks are not for one step.

        kinds: as for resolution.decide(). loaded: identifies what this rank has loaded. said: the
        nodes' digests.
        """
        head = f"the nodes have prepared different steps ({said}), and the step is taken on none: "
        try:
            found = self._ranks.gather(self._facts(loaded))
        except errors.UnavailableError:  # this rank knows enough to say that they differ
            return head + f"gradients, options, or loads of state differ. {_EQUAL_OPTIONS}"
        return head + (
            self._other_steps(votes)
            or self._other_options(found)
            or self._other_content(votes, kinds or [0] * len(votes), found)
        )

    def _facts(self, loaded: int) -> _Facts:
        options: dict[str, float] = {}
        if self._options is not None and self._spec is not None:
            hyperparams, loss_scale, how = self._options
            names = by_kind(self._spec.optimizer).hyperparams
            for index, group in enumerate(hyperparams):
                of_group = f"of param_groups[{index}]"
                options.update(
                    {f"{name} {of_group}": value for name, value in zip(names, group.value)}
                )
                options[f"max_norm {of_group}"] = group.max_norm
            options["max_norm"] = how["max_norm"]
            options["norm_type"] = how["norm_type"]
            options["max_value"] = how["max_value"]
            options["loss scale"] = loss_scale
            options["scale of gradients (GradScaler)"] = how["grad_scale"]
        return _Facts("" if self._spec is None else self._spec.job, options, loaded)

    def _on(self, rank: int) -> str:
        return f"on rank {rank} ({self._places.names[rank]})"

    def _other_steps(self, votes: Sequence[Step]) -> str:
        other = next((r for r, vote in enumerate(votes) if vote.step != votes[0].step), None)
        if other is None:
            return ""
        return (
            f"it is step {votes[0].step} {self._on(0)}, and step {votes[other].step}"
            f" {self._on(other)}. Call step() equally often on all ranks; to go on, construct the"
            " optimizer anew on all of them"
        )

    def _other_options(self, found: Sequence[_Facts]) -> str:
        for of_all, among in self._comparisons(found):
            first = found[among[0]].options
            for name, value in first.items():
                if of_all and name not in _OF_ALL_JOBS:
                    continue
                for rank in among[1:]:
                    other = found[rank].options.get(name, value)
                    if repr(other) != repr(value):  # nan is like nan
                        where = "jobs of norm_group" if of_all else "ranks"
                        return (
                            f"{where} have another {name} than each other:"
                            f" {_text(name, value)} {self._on(among[0])},"
                            f" {_text(name, other)} {self._on(rank)}. {_EQUAL_OPTIONS}"
                        )
        return ""

    def _comparisons(self, found: Sequence[_Facts]) -> list[tuple[bool, Sequence[int]]]:
        """Returns which ranks have equal options: those of a job all, those of several some."""
        by_job: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(found):
            by_job.setdefault(of_rank.job, []).append(rank)
        of_jobs: list[tuple[bool, Sequence[int]]] = [(False, each) for each in by_job.values()]
        return of_jobs if len(by_job) == 1 else [*of_jobs, (True, range(len(found)))]

    def _other_content(
        self, votes: Sequence[Step], kinds: Sequence[Hashable], found: Sequence[_Facts]
    ) -> str:
        first_of: dict[Hashable, int] = {}
        for rank, kind in enumerate(kinds):
            first = first_of.setdefault(kind, rank)
            if votes[rank].digest == votes[first].digest:
                continue
            both = f"{self._on(first)} and {self._on(rank)}"
            if found[rank].loaded != found[first].loaded:
                return (
                    f"options are alike, and what was loaded since (load_state_dict(), parameters"
                    f" changed in place) differs {both}. Load equal state on all nodes"
                )
            return (
                f"options are alike, and gradients differ {both}. Average them over all ranks of"
                ' the job (DistributedDataParallel, or reduction="collective")'
            )
        return (
            "options are alike, and what else was to be equal differs: parameters without a"
            " gradient, or step counts that were loaded. Give all ranks of a job the same"
        )


def _text(name: str, value: float) -> str:
    is_off = value == 0 and any(name.startswith(each) for each in _NONE_AT_ZERO)
    return "none" if is_off else repr(value)
