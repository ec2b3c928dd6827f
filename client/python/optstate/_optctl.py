"""Speaks to the daemon through optctl, the program that operators use."""

from __future__ import annotations

import json
import subprocess
from typing import Any, NamedTuple

from optstate import _native, errors

_TIMEOUT_S = 60
# The errors of the daemon, by optctl's exit code; the README of client/ctl has the codes.
_REFUSALS: dict[int, type[errors.OptstateError]] = {
    2: errors.InvalidArgumentError,
    3: errors.NotFoundError,
    4: errors.FailedPreconditionError,
    5: errors.UnavailableError,
    6: errors.DataLossError,
    8: errors.UnimplementedError,
}


def _run(
    endpoint: str | None, *arguments: str, within_s: float | None = None
) -> subprocess.CompletedProcess:
    command = [str(_native.PACKAGE_DIRECTORY / "optctl"), "-o", "json"]
    command += ["--endpoint", endpoint] if endpoint else []
    command += ["--timeout", str(within_s)] if within_s else []
    try:
        return subprocess.run(
            [*command, *arguments], capture_output=True, timeout=_TIMEOUT_S + (within_s or 0)
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise errors.UnavailableError(f"optctl {' '.join(arguments)}: {error}") from None


def _text_of(done: subprocess.CompletedProcess, *arguments: str) -> str:
    return f"optctl {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}"


def ask(endpoint: str | None, *arguments: str) -> dict[str, Any]:
    """Returns the JSON that optctl prints.

    The error that fits the daemon's refusal, with optctl's text; UnavailableError: there is no
    answer.
    """
    done = _run(endpoint, *arguments)
    if done.returncode != 0:
        refusal = _REFUSALS.get(done.returncode, errors.UnavailableError)
        raise refusal(_text_of(done, *arguments))
    try:
        answer = json.loads(done.stdout)
    except (ValueError, RecursionError) as error:
        raise errors.UnavailableError(f"optctl {' '.join(arguments)}: {error}") from None
    if not isinstance(answer, dict):
        raise errors.UnavailableError(
            f"optctl {' '.join(arguments)}: the answer is no JSON object, but {answer!r:.80}"
        )
    return answer


def change(endpoint: str | None, *arguments: str, within_s: float | None = None) -> None:
    """Has optctl change something; raises the error that fits the daemon's refusal.

    within_s: how long it waits for the daemon; None: as long as it does by itself.
    """
    done = _run(endpoint, *arguments, within_s=within_s)
    if done.returncode != 0:
        refusal = _REFUSALS.get(done.returncode, errors.UnknownError)
        raise refusal(_text_of(done, *arguments))


class RegisteredJob(NamedTuple):
    """A job that has a layout, as optctl prints it."""

    facts: dict[str, Any]  # of "describe job"
    parameters: list[dict[str, Any]]  # of "get params"


def find_registered(endpoint: str | None, job: str) -> RegisteredJob | None:
    """Returns the job; None: there is none, or one that its ranks have not registered. The latter
    goes by itself when they have ended."""
    try:
        facts = ask(endpoint, "describe", "job", job)
        if facts.get("phase") == "JOB_PHASE_EMPTY":
            return None
        parameters = ask(endpoint, "get", "params", job).get("parameters", [])
    except errors.NotFoundError:
        return None
    return RegisteredJob(facts, parameters)
