"""Runs a program on both sides."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, Callable

import optstate
import torch.distributed as dist

from programs import operations  # noqa: F401  (registers them)
from programs.comparison import Comparison, Mismatch
from programs.program import Program
from programs.refusals import refusal_of, torchs_own_refusal
from programs.registry import KINDS
from programs.sides import ExactSide, ServedSide, Side, TorchSide

_numbers = itertools.count()


class Failure(AssertionError):
    """A program whose sides part. `where`: the operation's number, -1: construction."""

    def __init__(self, program: Program, where: int, why: str) -> None:
        super().__init__(f"operation {where}: {why}")
        self.program, self.where, self.why = program, where, why

    @property
    def kind(self) -> str:
        """The text that failures of one cause mostly have in common."""
        return re.sub(r"[0-9.]+|\[.*", "", self.why.split("(")[0])[:60]


class _Refused(Exception):
    def __init__(self, blamed: int) -> None:
        self.blamed = blamed


def job_name() -> str:
    return f"program-{os.getpid()}-{next(_numbers)}"


def run(program: Program, endpoints: dict[str, str], name: Callable[[], str] = job_name) -> int:
    """Runs it; returns how many operations were refused. Failure when the sides part."""
    refused = 0
    while True:
        try:
            _run_once(program, endpoints, name, exactly=False)
            return refused
        except _Refused as refusal:
            refused += 1
            program = _without(program, refusal.blamed)
        except Mismatch:
            try:
                _run_once(program, endpoints, name, exactly=True)
                return refused
            except Mismatch as mismatch:
                where = getattr(mismatch, "where", -1)
                raise Failure(program, where, f"Mismatch: {mismatch}") from None
            except _Refused as refusal:  # of an operation behind the first mismatch
                refused += 1
                program = _without(program, refusal.blamed)


def _without(program: Program, operation: int) -> Program:
    kept = list(program.operations)
    del kept[operation]
    return dataclasses.replace(program, operations=tuple(kept))


def _attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    try:
        return function(*args, **kwargs), None
    except Mismatch:
        raise
    except Exception as error:
        return None, error


def _run_once(
    program: Program, endpoints: dict[str, str], name: Callable[[], str], exactly: bool
) -> None:
    shared: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A script is assumed to heed a warning as loud as this one.
        warnings.filterwarnings("error", message=".*parameters that have no names")
        ours, error = _attempt(ServedSide, program, shared, name(), endpoints)
        torchs, torch_error = _attempt(TorchSide, program, shared)
        exact, exact_error = _attempt(ExactSide, program, shared) if exactly else (None, None)
        try:
            if error is not None or torch_error is not None or exact_error is not None:
                _check_errors(program, -1, error, torch_error or exact_error)
                return
            shared["peer"] = torchs
            _follow(program, ours, torchs, exact)
        finally:
            if ours is not None:
                ours.close()


def _follow(program: Program, ours: Side, torchs: Side, exact: Side | None) -> None:
    comparison = Comparison(program.optimizer)
    steps = [*program.operations, ("look", {})]
    where = -1
    try:
        comparison.parameters(ours, torchs, exact)
        for where, (operation, arguments) in enumerate(steps):
            apply = KINDS[operation].apply
            mine, error = _attempt(apply, ours, **arguments)
            if error is not None and refusal_of(error) is not None:
                _check_errors(program, where, error, None)
            theirs, torch_error = _attempt(apply, torchs, **arguments)
            exactly = apply(exact, **arguments) if exact and torch_error is None else None
            if error is not None or torch_error is not None:
                _check_errors(program, where, error, torch_error)
                return  # both refuse; neither says what is left of the operation
            found = _compared(comparison, operation, (ours, torchs, exact), (mine, theirs, exactly))
            if found is not None:
                raise found
    except Mismatch as mismatch:
        mismatch.where = where
        raise
    except optstate.OptstateError as error:  # of what is compared
        _check_errors(program, where, error, None)


def _compared(
    comparison: Comparison, operation: str, sides: Sequence[Any], returned: Sequence[Any]
) -> Mismatch | None:
    """Returns a difference; on every rank when there is one on any."""
    ours, torchs, exact = sides
    found = None
    try:
        if any(each is not None for each in returned[:2]):
            comparison.values(operation, *returned)
        comparison.parameters(ours, torchs, exact)
        comparison.options(ours, torchs)
        comparison.values("loss_scale", ours.loss_scale(), torchs.loss_scale(), None)
    except Mismatch as mismatch:
        found = mismatch
    if dist.is_initialized():
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, None if found is None else str(found))
        said = [f"rank {rank}: {each}" for rank, each in enumerate(of_ranks) if each]
        found = Mismatch("; ".join(said)) if said else None
    return found


def _check_errors(program: Program, where: int, error: Any, torch_error: Any) -> None:
    """Checks an operation in which both sides raised, or one did. Returns when that is right."""
    before = {name for name, _ in program.operations[: max(where, 0)]}
    if error is None:
        if torchs_own_refusal(torch_error, before):
            return
        raise Failure(program, where, f"torch alone refuses: {_said(torch_error)}")
    if torch_error is not None:
        kinds = [each for each in type(torch_error).__mro__ if each is not object]
        if isinstance(error, kinds[0]) or torchs_own_refusal(error, before):
            return
        if torchs_own_refusal(torch_error, before):
            return
        raise Failure(program, where, f"{_said(error)}, torch {_said(torch_error)}")
    refusal = refusal_of(error)
    if refusal is not None:
        until = program.operations[: where + 1]
        for number in reversed(range(len(until))):
            if until[number][0] in refusal.blames:
                raise _Refused(number)
    raise Failure(program, where, f"ours alone refuses: {_said(error)}") from error


def _said(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    at = " < ".join(f"{os.path.basename(f.filename)}:{f.lineno}" for f in reversed(frames))
    return f"{type(error).__name__}: {error} ({at})"
