"""Queries the daemon through optctl, the program that operators use."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from optstate import _native, errors

_TIMEOUT_S = 60


def ask(endpoint: str | None, *arguments: str) -> dict[str, Any]:
    """Returns the JSON that optctl prints; UnavailableError, with its text, if it prints none."""
    command = [str(_native.PACKAGE_DIRECTORY / "optctl"), "-o", "json"]
    command += ["--endpoint", endpoint] if endpoint else []
    try:
        done = subprocess.run(
            [*command, *arguments], capture_output=True, check=True, timeout=_TIMEOUT_S
        )
        return json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        text = error.stderr.decode(errors="replace").strip()
        raise errors.UnavailableError(f"optctl {' '.join(arguments)}: {text}") from None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise errors.UnavailableError(f"optctl {' '.join(arguments)}: {error}") from None
