"""Keeps the parameters that attaching to a job replaced, in case a checkpoint is loaded next."""

from __future__ import annotations

import torch

from optstate._torch.names import quoted
from optstate._torch.parameters.parameters import Parameters
from optstate._torch.ranks import Ranks
from optstate._torch.tensors import bits_sum, in_memory


class ReplacedParameters:
    """Parameters as they were before a job overwrote them, in host memory.

    Frameworks load the model of a checkpoint, construct the optimizer, which attaches to
    the job and takes its parameters, and load the checkpoint's optimizer state last. By
    then the checkpoint's parameters are nowhere else. Parameters are kept until the first
    step, and only if they differ.
    """

    def __init__(self, parameters: Parameters) -> None:
        """Compares the parameters with the job's, before they are mapped and read."""
        self._parameters = parameters
        self._different = parameters.different()
        self._values: dict[int, torch.Tensor] = {}
        self._versions: list[int] = []
        # Parameters written, and changed, before the job was extended, which reads all again.
        self._written: set[int] = set()
        self._changed: set[int] = set()
        self.left_out = False  # whether a checkpoint's state was left out: the job goes on

    @property
    def count(self) -> int:
        """Number of kept parameters, which differed from the job's."""
        return len(self._values)

    @property
    def indices(self) -> list[int]:
        """The kept parameters."""
        return list(self._values)

    @property
    def held_bytes(self) -> int:
        return sum(value.numel() * value.element_size() for value in self._values.values())

    def take(self, left: dict[int, torch.Tensor]) -> None:
        """Keeps the values, before parameters that have not become views are read. left: the
        former memory of those that have, which nothing else uses now."""
        for index in self._different:
            if index in left:
                self._values[index] = left[index]
            else:
                self._values[index] = in_memory(self._parameters.values[index]).clone()

    def note_read(self, parameters: Parameters) -> None:
        """Notes that all were read, perhaps by another session that begins with the same ones."""
        self._parameters = parameters
        self._versions = parameters.versions()

    def drop_changed(self) -> None:
        """Forgets parameters that the trainer has changed since, before the job gets them."""
        self._written = self._written_since()
        self._changed = self._changed_of(self._written)
        for index in self._changed & self._values.keys():
            del self._values[index]

    def forget_values(self) -> None:
        """Forgets all values, because the job now has the present parameters."""
        self._values = {}

    def _written_since(self) -> set[int]:
        """Returns parameters written since attaching, even if their values did not change."""
        versions = self._parameters.versions()
        now = {i for i, version in enumerate(versions) if version != self._versions[i]}
        return self._written.union(now, self._parameters.written())

    def _changed_of(self, written: set[int]) -> set[int]:
        """Returns the written parameters whose values differ from the job's."""
        if not written:
            return self._changed
        return self._changed | written.intersection(self._parameters.different())

    def _kept(self) -> tuple[list[int], list[int]]:
        """Returns the parameters that have the job's values because attaching put them there, and
        the unclear ones, which have the job's values but were written since.

        A write that changes nothing proves nothing: DistributedDataParallel writes all when it is
        constructed, and a constraint on weights writes those that satisfy it already. But when
        others were changed, the write may be of a checkpoint's value that equals the job's by
        chance: it is taken for that when all were written, as by model.load_state_dict().
        """
        written = self._written_since()
        changed = self._changed_of(written)
        if not changed:
            return list(self._values), []
        if written.issuperset(self._values):
            return [], []
        kept = [index for index in self._values if index not in written]
        return kept, [i for i in self._values if i in written and i not in changed]

    def to_put_back(self, ranks: Ranks, is_of_another_step: bool) -> list[int]:
        """Returns the parameters to put back with state that is loaded. Collective.

        is_of_another_step: if not, the state is one for the job's own parameters.

        RuntimeError, on every rank, when ranks would put back different ones, or when it is
        unclear which to put back.
        """
        kept, unclear = self._kept() if is_of_another_step else ([], [])
        names = sorted(set().union(*ranks.gather([self._parameters.name_of(i) for i in unclear])))
        if names:
            self._raise_unclear(names)
        found = ranks.gather([(index, bits_sum(self._values[index])) for index in kept])
        if not self._parameters.has_parts and any(other != found[0] for other in found):
            raise RuntimeError(
                "load_state_dict() of a checkpoint that is not the job's state would put back the"
                " parameters that attaching replaced, but ranks had other ones: load the"
                " model's checkpoint on every rank before the optimizer is constructed, or after"
                ' it, or say resume="job"'
            )
        return kept

    def _raise_unclear(self, names: list[str]) -> None:
        raise RuntimeError(
            "load_state_dict() of a checkpoint that is not the job's state would put back the"
            " parameters that attaching replaced, but for those that were changed since: some"
            f" were, and parameters {quoted(names)} were written with the values that the job"
            " has, so that nobody can tell whether they are to have those. To train on the"
            " present parameters, call optimizer.upload_parameters() before; to go on with the"
            ' job, construct the optimizer with resume="job"'
        )

    @torch.no_grad()
    def put_back(self, indices: list[int]) -> None:
        """Writes the kept values of these parameters, and forgets the others."""
        self._values = {index: self._values[index] for index in indices}
        for index, values in self._values.items():
            self._parameters.values[index].copy_(values)


def words_on_parameters(put_back: int, replaced: int) -> str:
    """Returns a warning's words on the parameters that attaching to a job has replaced."""
    left = replaced - put_back
    if put_back:
        but = f", but not {left} more, which were changed since" if left else ""
        return (
            f", and with it {put_back} parameters that attaching to the job had replaced{but}. To"
            ' go on with the job, say resume="job" or do not load'
        )
    if left:
        return (
            f", but none of the {left} parameters that attaching to the job had replaced, which"
            " were changed since"
        )
    return ""
