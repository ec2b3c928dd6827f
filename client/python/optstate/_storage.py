"""Where a job's state lives, as a user writes it."""

from __future__ import annotations

import re
from typing import NamedTuple

_PLACEMENTS = {None: 0, "host": 1, "nvme": 2, "auto": 3}
_DURABILITIES = {None: 0, "none": 1, "step": 2, "every": 3, "interval": 4}
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600}


class Storage(NamedTuple):
    """See optstate_session_options; 0: the daemon decides."""

    placement: int = 0
    durability: int = 0
    host_budget_bytes: int = 0
    sub_group_elements: int = 0
    durability_steps: int = 0
    durability_interval_ms: int = 0
    parameters_on_disk: bool = False
    parameter_cache_bytes: int = 0
    has_offload_fraction: bool = False
    offload_fraction: float = 0.0
    device_budget_bytes: int = 0


def storage(
    placement: str | None,
    host_budget: int | str | None,
    durability: str | None,
    sub_group_size: int | None,
    offload_fraction: float | str | None = None,
    device_budget: int | str | None = None,
) -> Storage:
    """Converts the keyword arguments of an optimizer; ValueError names the wrong one."""
    if placement not in _PLACEMENTS:
        raise ValueError(f"Invalid placement: {placement!r} (one of host, nvme, auto)")
    kind, steps, interval_ms = _durability(durability)
    if sub_group_size is not None and (sub_group_size <= 0 or sub_group_size % 4096):
        raise ValueError(f"Invalid sub_group_size: {sub_group_size} (a multiple of 4096)")
    offload_fraction = _first_fraction(offload_fraction, device_budget)
    return Storage(
        placement=_PLACEMENTS[placement],
        durability=_DURABILITIES[kind],
        host_budget_bytes=bytes_of("host_budget", host_budget),
        sub_group_elements=sub_group_size or 0,
        durability_steps=steps,
        durability_interval_ms=interval_ms,
        has_offload_fraction=offload_fraction is not None,
        offload_fraction=offload_fraction or 0.0,
        device_budget_bytes=bytes_of("device_budget", device_budget),
    )


def _first_fraction(fraction: float | str | None, device_budget: int | str | None) -> float | None:
    """Returns the fraction that a new job begins with; None: 1, or what a job has."""
    if fraction == "auto":
        # Records stay on devices that update something.
        return None if device_budget is None else 0.5
    if fraction is None or (not isinstance(fraction, str) and 0 <= fraction <= 1):
        return fraction
    raise ValueError(f'Invalid offload_fraction: {fraction!r} (from 0 to 1, or "auto")')


def bytes_of(name: str, value: int | str | None) -> int:
    """Returns the bytes of 67108864, "64MiB" or "64 MiB"; 0: none are given."""
    if value is None:
        return 0
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    unit = _UNITS.get(match[2].upper()) if match else None
    if not match or unit is None or float(match[1]) * unit < 1:
        raise ValueError(f'Invalid {name}: {value!r} (bytes, or a text such as "64MiB")')
    return int(float(match[1]) * unit)


def _durability(text: str | None) -> tuple[str | None, int, int]:
    """Returns the kind, steps and milliseconds of "none", "step", "every 50" or "interval 30s"."""
    wrong = ValueError(
        f'Invalid durability: {text!r} ("none", "step", "every 50" or "interval 30s")'
    )
    if text is None:
        return None, 0, 0
    match = re.fullmatch(r"(none|step|every|interval)(?:\s+(\d+)\s*(ms|s|min|m|h)?)?", text)
    if match is None:
        raise wrong
    kind, number, unit = match.groups()
    if kind in ("none", "step"):
        if number is not None:
            raise wrong
        return kind, 0, 0
    if not number or int(number) == 0 or (kind == "every" and unit) or int(number) >= 1 << 31:
        raise wrong
    if kind == "every":
        return kind, int(number), 0
    milliseconds = int(int(number) * _SECONDS[unit or "s"] * 1000)
    if not 0 < milliseconds < 1 << 32:
        raise wrong
    return kind, 0, milliseconds
