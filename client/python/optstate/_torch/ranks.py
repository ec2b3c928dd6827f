"""Small messages that the ranks of a job exchange among themselves.

They are exchanged when an optimizer is constructed, is extended or loads a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from optstate import errors

_OTHER_DTYPE = ", or leave communication_dtype out"


@contextlib.contextmanager
def _reaching_all(or_else: str = "") -> Iterator[None]:
    """Makes the process group's errors, which are plain RuntimeErrors, such as say what to do.

    or_else: what helps too where the backend does not take tensors of the dtype.
    """
    try:
        yield
    except RuntimeError as error:
        if "scalar type" in str(error):  # before anything is sent, on all ranks
            raise errors.UnimplementedError(
                "the process group's backend does not take tensors of this dtype"
                f" ({error}): use another backend{or_else}"
            ) from error
        raise errors.UnavailableError(
            f"the ranks of the process group do not reach each other ({error}): one has ended, or"
            " the network between them is down. End all ranks and start them again: they go on"
            " from the step that is committed"
        ) from error


class Ranks:
    """This process's place among the processes that train one job together.

    The ranks are those of `process_group` if given; else of torch.distributed's
    default group when it is initialised; else this process alone.

    UnavailableError, of all that is exchanged: another rank has ended or cannot be reached.
    """

    def __init__(self, process_group: Any | None, name: str = "process_group") -> None:
        """name: what the group is called in errors."""
        self._group = process_group
        self.rank, self.world_size = 0, 1
        self._distributed = dist.is_available() and dist.is_initialized()
        if process_group is not None and not self._distributed:
            raise ValueError(f"{name} is given, but torch.distributed is not initialised")
        # Until the process group's backend says that it cannot.
        self._can_reduce = self._can_gather = True
        if self._distributed:
            self.rank = dist.get_rank(process_group)
            self.world_size = dist.get_world_size(process_group)
            if self.rank < 0:
                raise ValueError(f"this process is not a member of {name}")

    def from_first(self, value: Any) -> Any:
        """Returns rank 0's value on every rank."""
        return self.object_from(value, 0)

    def object_from(self, value: Any, source: int) -> Any:
        """Returns the value of rank `source` on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        sender = dist.get_global_rank(self._group, source) if self._group is not None else source
        with _reaching_all():
            dist.broadcast_object_list(box, src=sender, group=self._group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _reaching_all():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on some rank. One small all-reduce."""
        if self.world_size == 1:
            return flag
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        box = torch.tensor(int(flag), dtype=torch.int32, device=device)
        with _reaching_all():
            dist.all_reduce(box, dist.ReduceOp.MAX, group=self._group)
            return bool(box.item())  # NCCL's errors may come as late as here

    def add_up(self, tensor: torch.Tensor) -> None:
        """Makes the tensor, in place, the sum of all ranks'. One all-reduce."""
        if self.world_size == 1:
            return
        if dist.get_backend(self._group) == "nccl" and not tensor.is_cuda:
            there = tensor.cuda()
            self.add_up(there)
            tensor.copy_(there)
            return
        with _reaching_all(_OTHER_DTYPE):
            dist.all_reduce(tensor, group=self._group)

    def add_up_at(self, tensor: torch.Tensor, destination: int) -> None:
        """Makes the tensor, in place, the sum of all ranks' on rank `destination`; on the others it
        holds anything then. One reduce, which sends half of what an all-reduce does; an all-reduce
        where the backend has no reduce."""
        if self.world_size == 1:
            return
        if dist.get_backend(self._group) == "nccl" and not tensor.is_cuda:
            there = tensor.cuda()
            self.add_up_at(there, destination)
            if self.rank == destination:
                tensor.copy_(there)
            return
        if self._can_reduce:
            group = self._group
            at = dist.get_global_rank(group, destination) if group is not None else destination
            try:
                dist.reduce(tensor, dst=at, group=group)
                return
            except RuntimeError as error:
                # All ranks have the same backend, which says so before it sends anything.
                if "does not support reduce" not in str(error):
                    with _reaching_all(_OTHER_DTYPE):
                        raise
                self._can_reduce = False
        self.add_up(tensor)

    def tensors_of_all(
        self, tensor: torch.Tensor, destination: int | None
    ) -> Sequence[torch.Tensor]:
        """Returns every rank's tensor, equally large and contiguous, on rank `destination` (None:
        on all), and nothing on the others. One gather, or all-gather."""
        if self.world_size == 1:
            return [tensor]
        backend = dist.get_backend(self._group)
        there = tensor
        if backend == "nccl" and not tensor.is_cuda:
            there = tensor.cuda()
        elif backend == "gloo" and tensor.is_cuda:
            there = tensor.cpu()
        if there is not tensor:
            found = self.tensors_of_all(there, destination)
            return [each.to(tensor.device) for each in found]

        def room() -> list[torch.Tensor]:
            return [torch.empty_like(tensor) for _ in range(self.world_size)]

        if destination is not None and self._can_gather:
            group = self._group
            at = dist.get_global_rank(group, destination) if group is not None else destination
            gathered = room() if self.rank == destination else None
            try:
                dist.gather(tensor, gathered, dst=at, group=group)
                return gathered or []
            except RuntimeError as error:
                # All ranks have the same backend, which says so before it sends anything.
                if "does not support gather" not in str(error):
                    with _reaching_all():
                        raise
                self._can_gather = False
        found = room()
        with _reaching_all():
            dist.all_gather(found, tensor, group=self._group)
        return found if destination in (None, self.rank) else []

    def replicate(self, tensor: torch.Tensor, source: int) -> None:
        """Makes the tensor, in place, that of rank `source` on all ranks. One broadcast."""
        self.replicate_all([(tensor, source)])

    def replicate_all(self, tensors: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Makes each (tensor, rank), in place, the tensor of that rank on all ranks. One broadcast
        for each, all at the same time."""
        if self.world_size == 1:
            return
        is_nccl = dist.get_backend(self._group) == "nccl"
        # gloo sends what lies behind the first element, whatever the strides.
        there = [tensor.contiguous() for tensor, _ in tensors]
        if is_nccl:
            there = [each.cuda() for each in there]
        with _reaching_all():
            under_way = [
                dist.broadcast(each, self._global(source), self._group, async_op=True)
                for each, (_, source) in zip(there, tensors)
            ]
            refusals = []
            # One that fails leaves none behind that would write to its tensor later.
            for each in under_way:
                try:
                    each.wait()
                except RuntimeError as error:
                    refusals.append(error)
            if refusals:
                raise refusals[0]
        for each, (tensor, _) in zip(there, tensors):
            if each is not tensor:
                tensor.copy_(each)

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Returns every rank's numbers, equally many and of 64 bits. One small all-gather."""
        if self.world_size == 1:
            return [numbers]
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        with _reaching_all():
            dist.all_gather(found, mine, group=self._group)
            return [each.tolist() for each in found]

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank when some rank has an error: the rank's own, if any.

        This keeps a rank from waiting for one that has failed.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return
        mine = None if error is None else (getattr(error, "code", 2), str(error))
        everyones = self.gather(mine)
        if error is not None:
            raise error
        for rank, other in enumerate(everyones):
            if other is not None:
                raise errors.from_status(other[0], f"rank {rank}: {other[1]}")
