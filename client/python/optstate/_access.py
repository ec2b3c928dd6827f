"""The users of a job besides its owner, as a user writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# As proto/types/access_names.h has them.
_READERS_MAX = 32
_NAME_BYTES_MAX = 100


class Access(NamedTuple):
    """See v1.JobAccess."""

    group: str = ""
    is_private: bool = False
    readers: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = [f"group={self.group!r}"] if self.group else []
        said += [f"private={self.is_private}"]
        said += [f"readers={list(self.readers)}"] if self.readers else []
        return ", ".join(said)


def access(
    group: str | int | None = None, private: bool = False, readers: Iterable[str] = ()
) -> Access | None:
    """Converts the keyword arguments of an optimizer; None: nothing is asked for.

    TypeError or ValueError names the wrong one. Whether there are such users and groups is
    the daemon's to say.
    """
    if not isinstance(private, bool):
        raise TypeError(f"private is {private!r}, not True or False")
    if isinstance(readers, (str, bytes)):
        raise TypeError(f'readers is {readers!r}: give a list of names, such as ["{readers!s}"]')
    names = tuple(map(_text, readers))
    asked = Access("" if group is None else _text(group), private, names)
    if group is not None and not _can_be_name(asked.group):
        raise ValueError(f"Invalid group: {group!r} (the name or number of a group)")
    for name in names:
        if not _can_be_name(name.removeprefix("@")):
            raise ValueError(f'Invalid reader: {name!r} (a user, or a group as "@ops")')
    if names and not private:
        raise ValueError(
            f"readers={list(names)} needs private=True: all who may look at jobs may look at one"
            " that is not private"
        )
    if len(names) > _READERS_MAX:
        raise ValueError(
            f"{len(names)} readers; at most {_READERS_MAX}: put them into a group, and name that"
            ' as "@GROUP"'
        )
    return None if asked == Access() else asked


def check_same(asked: Iterable[Access | None]) -> None:
    """Raises ValueError, on every rank alike, when ranks ask for different ones."""
    all_of_them = [Access() if each is None else each for each in asked]
    for rank, each in enumerate(all_of_them):
        if each != all_of_them[0]:
            raise ValueError(
                f"rank {rank} asks for a job with {each}, rank 0 for one with {all_of_them[0]}:"
                " give all ranks the same group=, private= and readers="
            )


def _text(name: str | int) -> str:
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise TypeError(f"{name!r} is no name or number of a user or group")
    return str(name)


def _can_be_name(name: str) -> bool:
    return (
        0 < len(name.encode()) <= _NAME_BYTES_MAX
        and name[0] != "@"
        and name == name.strip()
        and not any(c in ",:/" or ord(c) < 32 or ord(c) == 127 for c in name)
    )
