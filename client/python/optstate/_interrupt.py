"""Lets signals, above all Ctrl-C, end a call that waits in the library.

Python runs its signal handlers between bytecodes, of which there are none while
the library waits. The library asks us every 50 ms or so; we run the handlers
then, and when one raises we keep what it raised until the call has returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


def _answers(raised: list[BaseException]) -> Generator[int, None, None]:
    """Runs pending handlers at each send(); yields whether one raised.

    A generator, because Python may run them itself as soon as it executes our
    first instruction, and only one that waits within a `try` catches that: an
    exception that leaves a ctypes callback is lost.
    """
    answer = 0
    while True:
        try:
            while True:
                yield answer
                # Does nothing in other threads than the main one.
                ctypes.pythonapi.PyErr_CheckSignals()
                answer = 0
        except GeneratorExit:
            return
        except BaseException as error:
            raised.append(error)
            answer = 1


class Interrupt:
    """What a session gives the library to ask, and what a handler raised.

    Lives as long as the session. Threads: any; handlers run in the main one.
    """

    def __init__(self) -> None:
        self._raised: list[BaseException] = []
        answers = _answers(self._raised)
        next(answers)
        self.callback = CALLBACK(answers.send)

    def raise_pending(self) -> None:
        """Raises what a handler raised since the last call."""
        if self._raised:
            raise self._raised.pop()
