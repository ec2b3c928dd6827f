"""A user's changes to Optimizer.state since the last step, until the daemon has them."""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from optstate._torch.job.attachment import Attachment
from optstate._torch.shards import as_dtensor, local_of, stand_in, state_like
from optstate._torch.state import checkpoint
from optstate._torch.state.checkpoint import MASTER_PARAM, PartialEntry, StateEntry
from optstate._torch.state.compare import same_bits

# Size of the tensors that were read, beyond which unreferenced ones are dropped.
_READ_BYTES = 64 << 20


class HasGroups(Protocol):
    """The optimizer whose state is edited."""

    param_groups: list[dict[str, Any]]

    def tensors(self) -> list[torch.Tensor]: ...


@dataclasses.dataclass
class _Written:
    """Values that were set: all of an entry, or some in addition to the daemon's."""

    is_whole: bool
    values: dict[str, Any]


class _Read:
    """A tensor that was handed out, which its holder may change in place."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._handed: weakref.ref[torch.Tensor] | None = None

    def hand_out(self) -> torch.Tensor:
        """Returns the tensor; the same object again while a reference to it exists."""
        handed = self._handed() if self._handed is not None else None
        if handed is None:
            handed = self.values.detach()
            self._handed = weakref.ref(handed)
        return handed

    def is_handed(self, value: Any) -> bool:
        return self._handed is not None and self._handed() is value


def _is_held(values: torch.Tensor) -> bool:
    """Returns whether another tensor or a numpy array uses the same memory."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    # Two uses are this tensor and the storage object made for this call.
    return count is None or count(local_of(values).untyped_storage()._cdata) > 2


class StateEdits:
    """State in addition to the daemon's: values that the user has set or may have changed,
    until the next step sends them; and keys that are the user's own.

    Tensors that are read are kept, because a change in place leaves no other trace. They
    are compared with the daemon's, and released, before the next step.

    Threads: one at a time, like the optimizer.

    Size: an entry is an array, a count or a master, and is read, set, compared and sent:
    one short method for each pair.
    """

    def __init__(self, served: HasGroups, attachment: Attachment, own: Mapping[Any, Any]) -> None:
        """own: state that the daemon does not know, by parameter and other keys."""
        self._served = weakref.ref(served)
        self._attachment = attachment
        self._keys = frozenset(checkpoint.keys_of(attachment.info))
        self.others: defaultdict[Any, Any] = defaultdict(dict)
        self._own: dict[torch.Tensor, dict[str, Any]] = {}
        self.set_own(own)
        self._written: dict[torch.Tensor, _Written] = {}
        self._read: dict[torch.Tensor, dict[str, _Read]] = {}
        self._read_bytes, self._read_bytes_max = 0, _READ_BYTES
        # Tensors that were read before the last step, and their versions; they are stale.
        self._stale: list[tuple[torch.Tensor, int]] = []
        self._counts: list[int] | None = None
        self._groups: dict[int, dict[str, Any]] = {}

    def set_own(self, own: Mapping[Any, Any]) -> None:
        """Replaces all of the user's own keys by these."""
        self._own.clear()
        self.others.clear()
        for key, value in own.items():
            if self.is_parameter(key):
                self._own[key] = dict(value)
            else:
                self.others[key] = value

    def own(self) -> dict[Any, Any]:
        """Returns all of the user's own keys, as set_own() takes them."""
        return {**{key: dict(own) for key, own in self._own.items() if own}, **self.others}

    # Methods that read entries.

    def is_parameter(self, key: Any) -> bool:
        return (
            isinstance(key, torch.Tensor) and self._attachment.parameters.index_of(key) is not None
        )

    def _group_of(self, tensor: torch.Tensor) -> dict[str, Any]:
        if not self._groups:
            served = self._served()
            assert served is not None
            self._groups = {
                id(each): group for group in served.param_groups for each in group["params"]
            }
        try:
            return self._groups[id(tensor)]
        except KeyError:
            raise KeyError("a parameter that is in no group of the optimizer any more") from None

    def _count_of(self, tensor: torch.Tensor) -> int:
        if self._counts is None:
            attachment = self._attachment
            indices = range(attachment.parameters.count)
            self._counts = attachment.arrays.fetch_step_counts(indices)
        index = self._attachment.parameters.index_of(tensor)
        assert index is not None
        return self._counts[index]

    def _name_of(self, tensor: torch.Tensor) -> str:
        index = self._attachment.parameters.index_of(tensor)
        assert index is not None
        return self._attachment.arrays.name(index)

    def _keys_in_job(self, tensor: torch.Tensor) -> list[str]:
        attachment = self._attachment
        return checkpoint.entry_keys(
            attachment.info,
            self._count_of(tensor),
            tensor,
            self._group_of(tensor),
            attachment.is_initialised,
        )

    def keys(self, tensor: torch.Tensor) -> list[str]:
        """Returns all keys of a parameter's entry."""
        written = self._written.get(tensor)
        keys = [] if written is not None and written.is_whole else self._keys_in_job(tensor)
        if written is not None:
            keys += [key for key in written.values if key not in keys]
        return [*keys, *self._own.get(tensor, ())]

    def parameters_with_entries(self) -> list[torch.Tensor]:
        served = self._served()
        assert served is not None
        return [
            tensor for tensor in served.tensors() if self.is_parameter(tensor) and self.keys(tensor)
        ]

    def value(self, tensor: torch.Tensor, key: str) -> Any:
        """Returns a value of a parameter's entry; KeyError when the entry has no such key."""
        if key in self._own.get(tensor, ()):
            return self._own[tensor][key]
        written = self._written.get(tensor)
        if written is not None and key in written.values:
            return written.values[key]
        if key not in self.keys(tensor):
            raise KeyError(key)
        read = self._read.setdefault(tensor, {})
        if key not in read:
            if self._read_bytes > self._read_bytes_max:
                self._let_go()
                read = self._read.setdefault(tensor, {})
            with torch.inference_mode(False):
                read[key] = _Read(self._fetch(tensor, [key])[key])
            self._read_bytes += read[key].values.nbytes
        return read[key].hand_out()

    def _fetch(self, tensor: torch.Tensor, keys: list[str] | None = None) -> StateEntry:
        group = {**self._group_of(tensor), "params": [tensor]}
        return self._attachment.fetch([group], keys).get(tensor, {})

    # Methods that write entries.

    def set_value(self, tensor: torch.Tensor, key: str, value: Any) -> None:
        """Sets a value of an entry; ValueError when the value does not fit the parameter."""
        if key not in self._keys:
            self._own.setdefault(tensor, {})[key] = value
            return
        if value is None:
            if key in self.keys(tensor):
                self.delete_value(tensor, key)
            return
        read = self._read.get(tensor, {}).get(key)
        if read is not None and read.is_handed(value):
            return
        value = as_dtensor(value, tensor, f'{key} of parameter "{self._name_of(tensor)}"')
        self._check_value(tensor, key, value)
        self._retire(tensor, key)
        written = self._written.setdefault(tensor, _Written(False, {}))
        written.values[key] = value

    def _check_value(self, tensor: torch.Tensor, key: str, value: Any) -> None:
        info, name = self._attachment.info, self._name_of(tensor)
        group = self._group_of(tensor)
        if key == "step":
            checkpoint.check_step(value, name)
        elif key == info.scalar:
            float(value)
        elif key == MASTER_PARAM:
            checkpoint.check_array(value, key, name, tuple(state_like(tensor).shape))
        else:
            arrays = info.arrays_of(group, state_like(tensor).shape)
            if key not in arrays:
                raise ValueError(f'parameter "{name}" has no {key} with the options of its group')
            checkpoint.check_array(value, key, name, arrays[key][1])

    def delete_value(self, tensor: torch.Tensor, key: str) -> None:
        """Deletes a key of an entry; KeyError when there is none, RuntimeError when torch could
        not step without it."""
        if key in self._own.get(tensor, ()):
            del self._own[tensor][key]
            return
        if key not in self.keys(tensor):
            raise KeyError(key)
        written = self._written.get(tensor)
        if written is not None and written.is_whole:
            del written.values[key]
        elif self._attachment.info.name in checkpoint.WITHOUT_STEP and key != MASTER_PARAM:
            own = self._own.get(tensor)
            self.reset(tensor)
            if own is not None:
                self._own[tensor] = own
        else:
            raise RuntimeError(
                f'{key} of parameter "{self._name_of(tensor)}" cannot be deleted alone: delete or'
                " assign the whole entry, optimizer.state[parameter]"
            )

    def replace(self, tensor: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Replaces the whole entry; ValueError when the values do not fit the parameter."""
        what = f'state of parameter "{self._name_of(tensor)}"'
        given = {
            key: as_dtensor(value, tensor, what) if key in self._keys else value
            for key, value in values.items()
        }
        torchs = {
            key: value
            for key, value in given.items()
            if key in self._keys and not checkpoint.is_absent(value)
        }
        if torchs:
            checkpoint.check_entry(
                self._attachment.info,
                torchs,
                self._name_of(tensor),
                state_like(tensor),
                self._group_of(tensor),
            )
        for key, read in list(self._read.get(tensor, {}).items()):
            if not any(read.is_handed(value) for value in torchs.values()):
                self._retire(tensor, key)
        self._read.pop(tensor, None)
        self._written[tensor] = _Written(True, torchs)
        self._own.pop(tensor, None)
        own = {key: value for key, value in given.items() if key not in self._keys}
        if own:
            self._own[tensor] = own

    def reset(self, tensor: torch.Tensor) -> None:
        """Makes the parameter start anew, as in torch when it has no entry."""
        self.replace(tensor, {})

    # Methods that compare and send changes.

    @property
    def is_idle(self) -> bool:
        """Returns whether optimizer.state was not accessed, and no tensor of it is in use."""
        return not (self._written or self._read or self._stale)

    @property
    def has_writes(self) -> bool:
        """Returns whether values were set; changes in place do not count."""
        return bool(self._written)

    def check_stale(self) -> None:
        """Raises RuntimeError when a stale tensor, no longer the state, was changed."""
        kept = [each for each in self._stale if _is_held(each[0])]
        self._stale = [each for each in kept if each[0]._version == each[1]]
        if len(self._stale) != len(kept):
            raise RuntimeError(
                "a tensor of optimizer.state was changed in place after the step or load that"
                " followed reading it, which has no effect: the state is in the daemon. Read"
                " it from optimizer.state again after each step"
            )

    def pending(self) -> dict[int, StateEntry | None]:
        """Returns the entries to load, which differ from the daemon's, by index in the job."""
        self.check_stale()
        found: dict[int, StateEntry | None] = {}
        for tensor in list({**self._written, **self._read}):
            entry = self._difference(tensor)
            if entry is None or entry:
                index = self._attachment.parameters.index_of(tensor)
                assert index is not None
                found[index] = entry
        return found

    def _difference(self, tensor: torch.Tensor) -> StateEntry | None:
        """Returns what to load. None: the parameter starts anew. {}: the daemon has all."""
        written = self._written.get(tensor, _Written(False, {}))
        read = {key: each.values for key, each in self._read.get(tensor, {}).items()}
        values = {**read, **written.values}
        if written.is_whole:
            if not values:
                return self._from_start(tensor)
            self._check_whole(tensor, values)
            if tensor.dtype is not torch.float32:
                values.setdefault(MASTER_PARAM, state_like(tensor).detach().float())
        present = self._fetch(tensor, list(values))
        changed = {key: each for key, each in values.items() if not _same(each, present.get(key))}
        if MASTER_PARAM in changed:
            self._check_master(tensor, changed[MASTER_PARAM])
        if not changed:
            return {}
        whole = values if written.is_whole else {**self._fetch(tensor), **values}
        self._check_whole(tensor, whole)
        if checkpoint.step_of(self._attachment.info, whole) == 0:
            return self._at_step_0(tensor, whole, changed)
        return PartialEntry(changed) if self._count_of(tensor) else whole

    def _from_start(self, tensor: torch.Tensor) -> StateEntry | None:
        """Returns what to load for a parameter whose entry, and so its master, was deleted."""
        if tensor.dtype is not torch.float32:
            master = state_like(tensor).detach().float()
            if not _same(master, self._fetch(tensor, [MASTER_PARAM]).get(MASTER_PARAM)):
                return {"step": 0, MASTER_PARAM: master}
        return None if self._count_of(tensor) else {}

    def _at_step_0(
        self, tensor: torch.Tensor, whole: StateEntry, changed: StateEntry
    ) -> StateEntry | None:
        """Returns what to load for arrays that are kept while their step begins anew."""
        info, count = self._attachment.info, self._count_of(tensor)
        names = [name for name, _ in info.state_arrays if name in whole]
        if not any(bool(local_of(whole[name]).any()) for name in names):
            return None if count else {}
        # From step 0 a parameter can only begin anew, including its scalar.
        if count == 0 or info.scalar:
            raise RuntimeError(
                f'optimizer.state of parameter "{self._name_of(tensor)}" was changed, but its step'
                " is 0, with which it begins anew: set its step too, or delete its entry"
            )
        return PartialEntry(changed)

    def _check_whole(self, tensor: torch.Tensor, values: StateEntry) -> None:
        checkpoint.check_entry(
            self._attachment.info,
            values,
            self._name_of(tensor),
            state_like(tensor),
            self._group_of(tensor),
        )

    def _check_master(self, tensor: torch.Tensor, master: torch.Tensor) -> None:
        master = local_of(master)
        if not same_bits(checkpoint.fitting_master(master, stand_in(tensor)), master):
            raise RuntimeError(
                f'{MASTER_PARAM} of parameter "{self._name_of(tensor)}" was set to values that do'
                " not round to the parameter: change the parameter itself"
            )

    def put_over(
        self, entries: dict[Any, Any], *, only: torch.Tensor | None = None
    ) -> dict[Any, Any]:
        """Overrides the daemon's entries by what is written and by the user's own keys.

        only: the one parameter whose entry is wanted.
        """
        self.check_stale()
        for tensor, read in self._read.items():
            if tensor in entries:
                entries[tensor].update((key, each.values.clone()) for key, each in read.items())
        for tensor, written in self._written.items():
            if only is not None and tensor is not only:
                continue
            entry = {} if written.is_whole else entries.get(tensor, {})
            entries[tensor] = {**entry, **written.values}
            if not entries[tensor]:
                del entries[tensor]
        if only is not None:
            return entries
        for key, own in self.own().items():
            is_entry = self.is_parameter(key)
            entries[key] = {**entries.get(key, {}), **own} if is_entry else own
        return entries

    def forget(self) -> None:
        """Marks what was read as stale, before a step and after a load."""
        self._counts = None
        self._groups = {}
        if self.is_idle:
            return
        for tensor, read in list(self._read.items()):
            for key in list(read):
                self._retire(tensor, key)
        for written in self._written.values():
            for value in written.values.values():
                self._watch(value)
        self._read.clear()
        self._written.clear()
        self._read_bytes, self._read_bytes_max = 0, _READ_BYTES

    def _retire(self, tensor: torch.Tensor, key: str) -> None:
        read = self._read.get(tensor, {}).pop(key, None)
        if read is not None and _is_held(read.values):
            self._watch(read.values)

    def _watch(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and not value.is_inference():
            self._stale.append((value.detach(), value._version))

    def _let_go(self) -> None:
        """Drops tensors that were read, are unchanged and have no other references."""
        for tensor, read in list(self._read.items()):
            present = self._fetch(tensor, list(read))
            for key, each in list(read.items()):
                if not _is_held(each.values) and _same(each.values, present.get(key)):
                    self._read_bytes -= each.values.nbytes
                    del read[key]
        self._read_bytes_max = 2 * self._read_bytes + _READ_BYTES


def _same(one: Any, other: Any) -> bool:
    if other is None:
        return False
    if isinstance(one, torch.Tensor) and one.dim() > 0:
        return same_bits(one, other)
    return float(one) == float(other)
