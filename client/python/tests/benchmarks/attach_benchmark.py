"""What it costs to attach, save and load a job of many small parameters."""

from __future__ import annotations

import argparse
import contextlib
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
    print(f"  {what:16} {time.perf_counter() - start:6.2f} s", flush=True)


def measure(endpoint: str, count: int, numel: int) -> None:
    parameters = [torch.nn.Parameter(row.clone()) for row in torch.randn(count, numel)]
    options = {"job": f"attach-{os.getpid()}-{endpoint[:4]}", "endpoint": endpoint}
    with timed("new job"):
        optimizer = optstate.AdamW(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.ones(numel)
    with timed("step"):
        optimizer.step()
    with timed("state_dict"):
        saved = optimizer.state_dict()
    with timed("load_state_dict"):
        optimizer.load_state_dict(saved)
    optimizer.close()
    with timed("re-attach"):
        optimizer = optstate.AdamW(parameters, **options)
    optimizer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--numel", type=int, default=16)
    arguments = parser.parse_args()
    torch.optim.AdamW([torch.zeros(1)])  # the first optimizer imports for seconds
    daemon = Daemon()
    try:
        for endpoint in (daemon.shm, daemon.grpc_unix):
            print(endpoint.split("/")[0])
            measure(endpoint, arguments.count, arguments.numel)
    finally:
        daemon.stop()


if __name__ == "__main__":
    main()
