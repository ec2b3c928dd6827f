"""Runs random training programs beside torch; a program that fails is made small.

random_programs.py --count 2000            # seeds 0 to 1999
random_programs.py --first 17 --count 1    # one seed
random_programs.py --text FILE             # a program as it was printed
"""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import time

import torch
from daemon import Daemon
from programs.drawing import draw
from programs.execution import Failure, run
from programs.program import Program, program_of
from programs.shrinking import shrink

# A daemon keeps named jobs until they are deleted, of which a program may make several, and has
# room for 128 of a user; a new one has none.
RUNS_OF_A_DAEMON = 40


class Daemons:
    """One daemon after the other."""

    def __init__(self) -> None:
        self._daemon = Daemon()
        self._runs = 0

    def endpoints(self) -> dict[str, str]:
        self._runs += 1
        if self._runs % RUNS_OF_A_DAEMON == 0:
            self._daemon.stop()
            self._daemon = Daemon()
        daemon = self._daemon
        return {"shm": daemon.shm, "grpc_unix": daemon.grpc_unix, "grpc_tcp": daemon.grpc_tcp}

    def stop(self) -> None:
        self._daemon.stop()


def fails_on(program: Program, daemons: Daemons) -> Failure | None:
    try:
        run(program, daemons.endpoints())
    except Failure as failure:
        return failure
    return None


def report(program: Program, failure: Failure, daemons: Daemons, shrinks: bool) -> str:
    """Returns a failure as text that can be run again."""
    lines = [f"seed {program.seed}: {failure}"]
    if shrinks:

        def fails_alike(candidate: Program) -> bool:
            other = fails_on(candidate, daemons)
            return other is not None and other.kind == failure.kind

        small = shrink(failure.program, fails_alike)
        again = fails_on(small, daemons)
        lines += [f"made small: {again}", small.text()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=50, help="how many seeds")
    parser.add_argument("--seeds", type=int, nargs="+", help="these seeds alone")
    parser.add_argument("--text", help="a file with a program's text in place of seeds")
    parser.add_argument("--no-shrinking", action="store_true")
    parser.add_argument("--show", action="store_true", help="prints the programs too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("optstate").setLevel(logging.ERROR)
    if options.text:
        with open(options.text) as file:
            drawn = [program_of(file.read())]
    elif options.seeds:
        drawn = map(draw, options.seeds)
    else:
        drawn = map(draw, range(options.first, options.first + options.count))
    failed: list[int] = []
    count = refused = 0
    kinds: collections.Counter[str] = collections.Counter()
    begin = time.monotonic()
    daemons = Daemons()
    try:
        for program in drawn:
            count += 1
            if options.show:
                print(program.text())
            try:
                refused += run(program, daemons.endpoints())
            except Failure as failure:
                failed.append(program.seed)
                kinds[failure.kind] += 1
                print(report(program, failure, daemons, not options.no_shrinking), flush=True)
    finally:
        daemons.stop()
    seconds = time.monotonic() - begin
    print(
        f"{count - len(failed)} passed, {len(failed)} failed, {refused} operations refused;"
        f" {count / seconds:.1f} programs a second"
    )
    for why, times in kinds.most_common():
        print(f"  {times} x {why}")
    if failed:
        print("seeds that fail:", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
