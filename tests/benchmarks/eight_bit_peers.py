"""AdamW with 8-bit state of others: bitsandbytes' and torchao's, where they are installed."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

# Below this bitsandbytes keeps float32 state.
NUMEL_MIN = 4096


def _module(name: str) -> tuple[ModuleType | None, str]:
    """The module, or None and why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name), ""
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"{name} is missing: {error}"


def bitsandbytes() -> tuple[ModuleType | None, str]:
    return _module("bitsandbytes")


def torchao_optimizers() -> tuple[ModuleType | None, str]:
    return _module("torchao.optim")
