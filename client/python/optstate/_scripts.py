"""The commands optstated and optctl, which execute the binaries of the package."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from optstate import _native


def _become(program: str) -> NoReturn:
    path = _native.PACKAGE_DIRECTORY / program
    try:
        os.execv(path, [program, *sys.argv[1:]])
    except OSError as error:
        print(f"{program}: cannot run {path}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def optstated() -> NoReturn:
    _become("optstated")


def optctl() -> NoReturn:
    _become("optctl")
