"""Steps of several ranks through one daemon: their cost, and how much of it overlap hides.

Each rank is a process of one thread; the slowest counts, from a barrier on.
"""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from interleave import Times, take_turns
from served import adamw, parameters_of, ranks, running_daemon
from table import FlatTable

Mi = 1 << 20
RANKS = (1, 2, 4, 8, 16)
PARTS = 32  # parameters, whole ones of which each rank pushes
OVERLAP_RANKS = 2
MODEL_PARAMETERS = 6.4e6  # the demo's
VOCABULARY = 80
BATCH = 4
GOAL = 1.15


def _serve(connection: Connection, rank: int, endpoint: str, elements: int) -> None:
    parameters = parameters_of([elements // PARTS] * PARTS)
    with adamw(parameters, endpoint) as optimizer:
        while connection.recv():
            dist.barrier()
            begin = time.perf_counter()
            optimizer.step()
            seconds = time.perf_counter() - begin
            ranks.say(connection, (seconds, optimizer.last_outcome.update_ns * 1e-9))


def _ask(group: ranks.Ranks) -> list:
    for connection in group.connections:
        connection.send(True)
    return [group.hear(rank) for rank in range(len(group.connections))]


def ranks_cost(benchmark) -> None:
    elements = 16 * Mi
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(running_daemon())
        update = {str(number): [] for number in RANKS}

        def step_of(number: int):
            group = stack.enter_context(ranks.running(_serve, number, daemon.shm, elements))
            _ask(group)  # maps its pages

            def step() -> float:
                answers = _ask(group)
                update[str(number)].append(max(seconds for _, seconds in answers))
                return max(seconds for seconds, _ in answers)

            return step

        sides = {str(number): step_of(number) for number in RANKS}
        times = take_turns(sides, benchmark.arguments.budget * len(sides))
    rows = dict.fromkeys(sides, elements)
    FlatTable("9: 16 Mi elements of more ranks: the update in the daemon", "ranks").add(
        rows, Times(update)
    )
    # Each rank copies all parameters into its own tensors: that many bytes more.
    FlatTable("9: the same, until the last rank has read all parameters", "ranks").add(
        rows, times, goal=False
    )


def _loss_of(model: torch.nn.Module) -> torch.Tensor:
    characters = torch.randint(VOCABULARY, (BATCH, 129))
    logits = model(characters[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten())


def _serve_overlap(connection: Connection, rank: int, endpoint: str) -> None:
    from gpt import GPT, width_for

    def make(overlap: bool):
        torch.manual_seed(7)
        model = GPT(VOCABULARY, width_for(MODEL_PARAMETERS))
        options = {"reduction": "daemon", "overlap": overlap}
        return model, adamw(model.named_parameters(), endpoint, **options)

    made = {True: make(True), False: make(False)}
    torch.manual_seed(rank)
    while connection.recv():
        seconds = {}
        for overlap, (model, optimizer) in made.items():
            optimizer.zero_grad()
            loss = _loss_of(model)
            dist.barrier()
            begin = time.perf_counter()
            loss.backward()
            if not overlap:
                seconds["backward"] = time.perf_counter() - begin
                dist.barrier()
                begin = time.perf_counter()
            optimizer.step()
            seconds["overlapped" if overlap else "step"] = time.perf_counter() - begin
        ranks.say(connection, seconds)


def overlap(benchmark) -> None:
    print("\n### 10: backward and step of the demo's GPT, two ranks, reduced in the daemon\n")
    with (
        running_daemon() as daemon,
        ranks.running(_serve_overlap, OVERLAP_RANKS, daemon.shm) as group,
    ):
        for _ in range(3):
            _ask(group)
        slowest: dict[str, list[float]] = {}

        def both() -> float:
            answers = _ask(group)
            taken = {key: max(each[key] for each in answers) for key in answers[0]}
            taken["longer"] = max(taken["backward"], taken["step"])
            taken["one after the other"] = taken["backward"] + taken["step"]
            for key, seconds in taken.items():
                slowest.setdefault(key, []).append(seconds)
            return taken["overlapped"]

        take_turns({"both": both}, 5 * benchmark.arguments.budget)
    times = Times(slowest)
    for key in ("backward", "step", "overlapped"):
        print(f"- {key}: {times.median_s(key) * 1e3:.1f} ms")
    for key, goal in (("overlapped", GOAL), ("one after the other", None)):
        middle, low, high = times.ratio(key, "longer")
        said = "" if goal is None else f"; {goal}: {'met' if middle <= goal else '**missed**'}"
        print(f"- {key} / the longer of the two: {middle:.2f} ({low:.2f} to {high:.2f}){said}")
