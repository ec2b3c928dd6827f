"""Lets signals, above all Ctrl-C, end a call that waits in the library.

Python runs its signal handlers between bytecodes, and none run while the library
waits. The library calls back every 50 ms or so; the callback runs the handlers,
and an exception that one raises is kept until the call has returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator
from typing import Any

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


def _answers(raised: list[BaseException]) -> Generator[int, None, None]:
    """Runs pending handlers at each send(); yields whether one raised.

    This is a generator because Python may run handlers itself at the first
    instruction executed here, and only code suspended within a `try` catches what
    they raise: an exception that leaves a ctypes callback is lost.
    """
    answer = 0
    while True:
        try:
            while True:
                yield answer
                # This call does nothing in threads other than the main one.
                ctypes.pythonapi.PyErr_CheckSignals()
                answer = 0
        except GeneratorExit:
            return
        except BaseException as error:
            raised.append(error)
            answer = 1


def _calls(
    function: Callable[[Any], object], raised: list[BaseException]
) -> Generator[None, Any, None]:
    """Calls the function with what each send() brings, as _answers() runs handlers."""
    while True:
        try:
            while True:
                function((yield))
        except GeneratorExit:
            return
        except BaseException as error:
            if not raised:
                raised.append(error)


class Interrupt:
    """The callback that a session gives the library, and what a handler raised.

    Lives as long as the session. Threads: any; handlers run in the main thread.
    """

    def __init__(self) -> None:
        self._raised: list[BaseException] = []
        answers = _answers(self._raised)
        next(answers)
        self.callback = CALLBACK(answers.send)

    def guard(self, function: Callable[[Any], object]) -> Callable[[Any], object]:
        """Returns what the library may call back in place of the function: an exception, of the
        function or of a signal handler, is kept until the call of the library has returned."""
        calls = _calls(function, self._raised)
        next(calls)
        return calls.send

    def raise_pending(self) -> None:
        """Raises the exception that a handler raised since the last call, if any."""
        if self._raised:
            raise self._raised.pop()
