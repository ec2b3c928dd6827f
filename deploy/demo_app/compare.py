"""deploy/demo --optimizers: the GPT with every optimizer, beside torch's.

Each case trains the same small model on the same batches twice: with an optimizer of
optstate and with torch's. Prints a table and plots all curves.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import pathlib
import tempfile
from typing import Any, Callable

import optstate
import torch
import torch.multiprocessing
from gpt import GPT, width_for
from processes import Daemon
from screen import parse_count
from text import Text, write_text
from torch.nn import functional

BATCH = 8  # sequences a step, all ranks together
SEED = 7


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: what is compared, and how both are made."""

    name: str
    optimizer: str
    options: dict[str, Any]
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    # The model's dtype. torch's optimizer then works on float32 copies of the parameters, as
    # mixed precision training does.
    dtype: torch.dtype = torch.float32


CASES = (
    Case("AdamW", "AdamW", {"lr": 1e-3, "weight_decay": 0.1}),
    Case("Adam, amsgrad", "Adam", {"lr": 1e-3, "amsgrad": True}),
    Case("SGD, momentum, nesterov", "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    Case("Adagrad", "Adagrad", {"lr": 1e-2}),
    Case("RMSprop, centered", "RMSprop", {"lr": 3e-4, "centered": True}),
    Case("NAdam", "NAdam", {"lr": 1e-3}),
    Case("RAdam", "RAdam", {"lr": 1e-3}),
    Case("Adafactor", "Adafactor", {"lr": 1e-2}),
    Case("Muon (matrices), AdamW", "Muon", {"lr": 1e-2}),
    Case("Lion", "Lion", {"lr": 1e-4}),
    Case("LAMB", "LAMB", {"lr": 1e-2, "weight_decay": 0.01}),
    Case("AdamW, bfloat16 state", "AdamW", {"lr": 1e-3}, {"state_dtype": torch.bfloat16}),
    Case("AdamW, 8-bit state", "AdamW", {"lr": 1e-3}, {"state_dtype": "dynamic8"}),
    Case("Adafactor, bfloat16 state", "Adafactor", {"lr": 1e-2}, {"state_dtype": torch.bfloat16}),
    Case("Muon, AdamW, 8-bit state", "Muon", {"lr": 1e-2}, {"state_dtype": "dynamic8"}),
    Case("LAMB, 8-bit state", "LAMB", {"lr": 1e-2}, {"state_dtype": "dynamic8"}),
    Case("AdamW, bfloat16 model", "AdamW", {"lr": 1e-3}, dtype=torch.bfloat16),
    Case(
        "the same, split master", "AdamW", {"lr": 1e-3}, {"master": "split"}, dtype=torch.bfloat16
    ),
    Case(
        "the same with 8-bit state",
        "AdamW",
        {"lr": 1e-3},
        {"master": "split", "state_dtype": "dynamic8"},
        dtype=torch.bfloat16,
    ),
    Case(
        "Adafactor, split, 8-bit state",
        "Adafactor",
        {"lr": 1e-2},
        {"master": "split", "state_dtype": "dynamic8"},
        dtype=torch.bfloat16,
    ),
    Case("AdamW, overlap", "AdamW", {"lr": 1e-3}, {"overlap": True}),
    Case("AdamW, reduced by the daemon", "AdamW", {"lr": 1e-3}, {"reduction": "daemon"}, ranks=4),
    Case(
        "the same with overlap",
        "AdamW",
        {"lr": 1e-3},
        {"reduction": "daemon", "overlap": True},
        ranks=4,
    ),
)


def optimizers_of(
    module: Any, name: str, model: torch.nn.Module, options: dict[str, Any]
) -> list[torch.optim.Optimizer]:
    """One for all parameters; Muon takes matrices alone, and AdamW the others."""
    make = getattr(module, name)
    if name != "Muon":
        return [make(model.parameters(), **options)]
    ours = {key: value for key, value in options.items() if key not in ("lr", "weight_decay")}
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return [make(matrices, **options), module.AdamW(others, lr=1e-3, **ours)]


class WithMasters:
    """torch's optimizer on float32 copies of 16-bit parameters."""

    def __init__(self, case: Case, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.optimizer = getattr(torch.optim, case.optimizer)(self.masters, **case.options)

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters):
            master.grad = parameter.grad.float()
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.parameters):
            parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def train(
    text: Text,
    width: int,
    steps: int,
    make: Callable[[torch.nn.Module], list[torch.optim.Optimizer]],
    rank: int = 0,
    ranks: int = 1,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """This rank's losses; its share of each batch follows from the step alone."""
    torch.manual_seed(SEED)
    model = GPT(len(text.characters), width).to(dtype)
    optimizers = make(model)
    losses = []
    for step in range(steps):
        characters, following = text.batch(step, 0, BATCH)
        share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        logits = model(characters[share])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), following[share].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    for optimizer in optimizers:
        if isinstance(optimizer, optstate.ServedOptimizer):
            optimizer.close()
    return losses


def _rank(rank: int, case: Case, arguments: tuple, meeting: str, endpoint: str, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(case.ranks)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=case.ranks
    )
    options = {**case.options, **case.ours, "endpoint": endpoint}
    make = functools.partial(_make_ours, case.optimizer, options)
    queue.put((rank, train(Text(arguments[0]), *arguments[1:], make, rank, case.ranks)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _make_ours(
    name: str, options: dict[str, Any], model: torch.nn.Module
) -> list[torch.optim.Optimizer]:
    return optimizers_of(optstate, name, model, options)


def train_ours(
    case: Case, path: pathlib.Path, width: int, steps: int, endpoint: str
) -> list[float]:
    """The mean of the ranks' losses, which is that of the whole batch."""
    if case.ranks == 1:
        options = {**case.options, **case.ours, "endpoint": endpoint}
        return train(
            Text(path),
            width,
            steps,
            functools.partial(_make_ours, case.optimizer, options),
            dtype=case.dtype,
        )
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        started = torch.multiprocessing.spawn(
            _rank,
            (case, (path, width, steps), f"{directory}/meeting", endpoint, queue),
            nprocs=case.ranks,
            join=False,
        )
        by_rank = [queue.get()[1] for _ in range(case.ranks)]
        while not started.join():
            pass
    return [sum(losses) / case.ranks for losses in zip(*by_rank)]


def train_torchs(case: Case, path: pathlib.Path, width: int, steps: int) -> list[float] | None:
    if not hasattr(torch.optim, case.optimizer):
        return None
    if case.dtype != torch.float32:
        return train(
            Text(path), width, steps, lambda model: [WithMasters(case, model)], dtype=case.dtype
        )
    make = functools.partial(optimizers_of, torch.optim, case.optimizer, options=case.options)
    return train(Text(path), width, steps, lambda model: make(model=model))


def plot(results: list[tuple[Case, list[float], list[float] | None]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 4
    rows = -(-len(results) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(14, 2.8 * rows), sharey=True)
    for axes, (case, ours, torchs) in zip(grid.flat, results):
        if torchs is not None:
            axes.plot(torchs, "-", label="torch.optim")
        axes.plot(ours, "--", label="optstate")
        axes.set_title(case.name, fontsize=9)
        axes.legend(fontsize=7)
    for axes in list(grid.flat)[len(results) :]:
        axes.remove()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--params", type=parse_count, required=True, help="such as 400k")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    text = arguments.output / "bible.txt"
    write_text(text)
    width = width_for(arguments.params)
    print(
        f"{'':30} last loss   last loss   largest\n{'':30}  optstate       torch   difference",
        flush=True,
    )
    results = []
    with contextlib.closing(Daemon(arguments.output / "optstated.log")) as daemon:
        for case in CASES:
            ours = train_ours(case, text, width, arguments.steps, daemon.endpoint)
            torchs = train_torchs(case, text, width, arguments.steps)
            results.append((case, ours, torchs))
            line = f"{case.name:30}   {ours[-1]:.5f}"
            if torchs is not None:
                largest = max(abs(a - b) for a, b in zip(ours, torchs))
                line += f"     {torchs[-1]:.5f}      {largest:.1e}"
            print(line, flush=True)
    plot(results, arguments.output / "optimizers.png")
    print(f"plot: {arguments.output / 'optimizers.png'}")


if __name__ == "__main__":
    main()
