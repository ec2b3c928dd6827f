"""Measures attach, save and load of a job of many small parameters, or of some large ones."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import pathlib
import sys
import time
from collections.abc import Iterator

import optstate
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from daemon import Daemon


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"  {what:16} {time.perf_counter() - start:7.3f} s", flush=True)


def random_parameters(count: int, numel: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(numel)) for _ in range(count)]


def give_gradients(parameters: list[torch.nn.Parameter]) -> None:
    gradient = torch.ones_like(parameters[0])
    for parameter in parameters:
        parameter.grad = gradient


def measure(endpoint: str, count: int, numel: int, *, attach_only: bool) -> None:
    parameters = random_parameters(count, numel)
    options = {"job": f"attach-{os.getpid()}-{endpoint[:4]}", "endpoint": endpoint}
    with timed("new job"):
        optimizer = optstate.AdamW(parameters, **options)
    give_gradients(parameters)
    with timed("step"):
        optimizer.step()
    if not attach_only:
        with timed("state_dict"):
            saved = optimizer.state_dict()
        with timed("load_state_dict"):
            optimizer.load_state_dict(saved)
        del saved
    optimizer.close()
    # Makes new parameters, as a script that is started again: nothing of the former one is
    # to be freed.
    del optimizer, parameters
    gc.collect()
    parameters = random_parameters(count, numel)
    give_gradients(parameters)
    with timed("re-attach"):
        optimizer = optstate.AdamW(parameters, **options)
    with timed("step at once"):
        optimizer.step()
    with timed("next step"):
        optimizer.step()
    optimizer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--numel", type=int, default=16)
    parser.add_argument("--attach-only", action="store_true", help="neither save nor load")
    arguments = parser.parse_args()
    torch.optim.AdamW([torch.zeros(1)])  # the first optimizer imports for seconds
    daemon = Daemon()
    try:
        for endpoint in (daemon.shm, daemon.grpc_unix):
            print(endpoint.split("/")[0])
            measure(endpoint, arguments.count, arguments.numel, attach_only=arguments.attach_only)
    finally:
        daemon.stop()


if __name__ == "__main__":
    main()
