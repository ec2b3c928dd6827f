"""CUDA's driver, libcuda.so.1, by ctypes: opened when it is needed, and without torch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any


class Refused(Exception):
    """There is no driver, or a call of it failed; the text says which and why."""

    def __init__(self, text: str, error: int = 0) -> None:
        super().__init__(text)
        self.error = error  # the driver's; 0: there is none


def opened(functions: Mapping[str, tuple[Any, ...]]) -> ctypes.CDLL:
    """Returns the driver with these functions, which have arguments of these types. Raises
    Refused."""
    functions = {**functions, "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))}
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name, arguments in functions.items():
            function = getattr(driver, name)
            function.restype = ctypes.c_int
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise Refused(str(error)) from error
    return driver


def call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Calls a function of the driver. Raises Refused."""
    error = getattr(driver, name)(*arguments)
    if error == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(error, ctypes.byref(text))
    said = text.value.decode() if text.value else "which the driver does not know"
    raise Refused(f"{name}: error {error}, {said}", error)
