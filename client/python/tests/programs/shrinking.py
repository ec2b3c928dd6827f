"""Makes a program that fails small."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Callable

from programs.program import Program, Weight
from programs.registry import KINDS


def _without_operations(program: Program) -> Iterator[Program]:
    operations = program.operations
    size = len(operations) // 2 or 1
    while size:
        for begin in range(0, len(operations), size):
            kept = operations[:begin] + operations[begin + size :]
            yield dataclasses.replace(program, operations=kept)
        size //= 2


def _simpler(program: Program) -> Iterator[Program]:
    """Smaller programs, one change each."""
    yield from _without_operations(program)
    weights = program.weights
    if len(weights) > 1:
        for number in range(len(weights)):
            kept = weights[:number] + weights[number + 1 :]
            yield dataclasses.replace(program, weights=kept)
    for number, weight in enumerate(weights):
        plain = Weight(weight.shape, group=weight.group)
        candidates = [plain, dataclasses.replace(weight, shape=(2, 2))]
        candidates += [dataclasses.replace(weight, group=0)]
        for other in candidates:
            if other != weight:
                changed = weights[:number] + (other,) + weights[number + 1 :]
                yield dataclasses.replace(program, weights=changed)
    for field in ("options", "served"):
        for key in getattr(program, field):
            kept = {k: v for k, v in getattr(program, field).items() if k != key}
            yield dataclasses.replace(program, **{field: kept})
    if len(program.group_options) > 1:
        yield dataclasses.replace(program, group_options=program.group_options[:-1])
    if any(program.group_options):
        plain_groups = tuple({} for _ in program.group_options)
        yield dataclasses.replace(program, group_options=plain_groups)
    for change in ({"scaler": None}, {"names": "none"}, {"wire": "shm"}, {"has_job": False}):
        (key,) = change
        if getattr(program, key) != change[key]:
            yield dataclasses.replace(program, **change)
    for number, (name, arguments) in enumerate(program.operations):
        for key, value in arguments.items():
            for plain_value in _plainer(value):
                operation = (name, {**arguments, key: plain_value})
                changed = program.operations[:number] + (operation,)
                changed += program.operations[number + 1 :]
                yield dataclasses.replace(program, operations=changed)


def _plainer(value: object) -> list[object]:
    if isinstance(value, list) and value:
        return [[]] if not isinstance(value[0], int) or len(value) < 2 else [[], value[:1]]
    if value is True:
        return [False]
    if isinstance(value, int) and not isinstance(value, bool) and value not in (0, 1):
        return [0, 1]
    return []


def shrink(program: Program, fails: Callable[[Program], bool], attempts: int = 200) -> Program:
    """The smallest program found that fails still."""
    while attempts > 0:
        for candidate in _simpler(program):
            if not all(KINDS[name].suits(candidate) for name, _ in candidate.operations):
                continue
            attempts -= 1
            if attempts <= 0:
                return program
            if fails(candidate):
                program = candidate
                break
        else:
            return program
    return program
