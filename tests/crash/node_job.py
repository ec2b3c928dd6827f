"""A job on several nodes for node_kills.py: what its ranks do, and hearing them."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import logging
import os
import pathlib
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

import optstate
import torch
from optstate._torch.nodes.agreement import NodeAgreement
from ranks import RECEIVE_TIMEOUT_S, Ranks, say

# A rank that waits longer for another one fails.
GROUP_TIMEOUT_S = 60
STEPS_PER_CHECKPOINT = 4
SIZES = (120_001, 31, 65_536)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A job and the ranks that train it."""

    endpoints: Sequence[str]  # by node
    ranks_per_node: int
    job: str | None
    steps: int
    optimizer: str
    options: dict[str, Any]
    uses_ddp: bool
    across_nodes: str  # of several nodes
    folder: str  # of the checkpoints, and where the ranks meet
    start: str = ""  # the checkpoint that a new job begins with

    @property
    def world_size(self) -> int:
        return len(self.endpoints) * self.ranks_per_node


class Model(torch.nn.Module):
    """The gradient of each parameter is what it is multiplied with: numbers that add up exactly,
    because DistributedDataParallel adds in another order in the first step of a process."""

    def __init__(self) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(1)
        self.weights = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.randn(size, generator=noise)) for size in SIZES]
        )

    def forward(self, step: int, rank: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(1000 * step + rank)
        loss = torch.zeros(())
        for weight in self.weights:
            factor = torch.randint(-64, 65, (weight.numel(),), generator=noise) / 64
            if step % 7 == 3 and rank == 0:
                factor[0] = float("inf")  # the step is skipped on all nodes
            loss = loss + (weight * factor).sum()
        return loss


def digest(tensors: Sequence[torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        found.update(memoryview(tensor.detach().contiguous().reshape(-1).numpy()).cast("B"))
    return found.hexdigest()


def _save(path: pathlib.Path, step: int, model: Model, optimizer: Any) -> None:
    """Saves a checkpoint by rank 0. Collective."""
    optimizer.consolidate_state_dict(to=0)
    if torch.distributed.get_rank():
        return
    saved = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def _announce_votes(connection: Any) -> None:
    """Says when the node of this rank has prepared a step, so that kills hit what comes next."""
    votes = NodeAgreement._votes

    def announcing(self: NodeAgreement, outcome: Any) -> Any:
        say(connection, ("voting", 0 if outcome is None else outcome.step, ""))
        return votes(self, outcome)

    NodeAgreement._votes = announcing  # type: ignore[method-assign]


def train(connection: Any, rank: int, setting: Setting, meeting: str) -> str:
    """Says (what, step, digest of the parameters) after attaching and after each step; returns
    the digest of the state at the end."""
    node = rank // setting.ranks_per_node
    os.environ["OPTSTATE_NODE"] = f"node{node}"
    os.environ["LOCAL_WORLD_SIZE"] = str(setting.ranks_per_node)
    logging.getLogger("optstate").setLevel(logging.ERROR)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=setting.world_size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    model = Model()
    start = torch.load(setting.start) if setting.start else None
    if start is not None:
        model.load_state_dict(start["model"])
    options = dict(setting.options)
    if len(setting.endpoints) > 1:
        options["across_nodes"] = setting.across_nodes
    trained: torch.nn.Module = model
    if setting.uses_ddp:
        trained = torch.nn.parallel.DistributedDataParallel(model)
    else:
        options["reduction"] = "collective"
    optimizer = getattr(optstate, setting.optimizer)(
        model.named_parameters(),
        lr=0.01,
        job=setting.job,
        endpoint=setting.endpoints[node],
        **options,
    )
    begin = 0
    if start is not None:
        begin = start["step"]
        if optimizer.committed_step == 0:
            optimizer.load_state_dict(start["optimizer"])
    if len(setting.endpoints) > 1:
        _announce_votes(connection)
    parameters = list(model.parameters())
    say(connection, ("attached", begin + optimizer.committed_step, digest(parameters)))
    for step in range(begin + optimizer.committed_step, setting.steps):
        optimizer.zero_grad()
        trained(step, rank).backward()
        optimizer.step()
        taken = begin + optimizer.committed_step
        say(connection, ("stepped", taken, digest(parameters)))
        if taken % STEPS_PER_CHECKPOINT == 1:
            _save(pathlib.Path(setting.folder) / "checkpoint.pt", taken, model, optimizer)
    optimizer.consolidate_state_dict(to=None)
    entries = optimizer.state_dict()["state"]
    state = digest([value for _, entry in sorted(entries.items()) for value in entry.values()])
    optimizer.close()
    return state


class Generation:
    """Ranks that were started together."""

    def __init__(self, setting: Setting, number: int) -> None:
        meeting = f"{setting.folder}/meeting-{number}"
        self._ranks = Ranks(train, setting.world_size, setting, meeting, grouped=False)
        self.living = set(range(setting.world_size))
        self.ended: dict[int, tuple[str, str]] = {}  # by rank: ("result" or "error", text)

    def kill(self, victims: Sequence[int]) -> None:
        self._ranks.kill(*victims)
        self.living.difference_update(victims)

    def hear(self, ranks: set[int], timeout_s: float = RECEIVE_TIMEOUT_S) -> list[Any]:
        """Waits for some of these ranks; returns what they say as (rank, what, step, digest)."""
        heard = []
        connections = {self._ranks.connections[rank]: rank for rank in ranks - set(self.ended)}
        ready = wait(list(connections), timeout_s)
        if not ready and timeout_s:
            raise AssertionError(f"ranks {sorted(connections.values())} say nothing")
        for connection in ready:
            rank = connections[connection]  # type: ignore[index]
            try:
                kind, value = connection.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                self.ended[rank] = ("killed", "")
                continue
            if kind == "said":
                heard.append((rank, *value))
            else:
                self.ended[rank] = (kind, value)
        return heard

    def close(self) -> None:
        self._ranks.close()


def undisturbed(setting: Setting) -> tuple[dict[int, str], str, float]:
    """Returns digests by step, that of the state, and the time of a step."""
    begin = time.monotonic()
    generation = Generation(setting, 0)
    try:
        found: dict[int, str] = {}
        while len(generation.ended) < setting.world_size:
            for _, what, step, value in generation.hear(generation.living):
                assert found.setdefault(step, value) == value
                if what == "attached":
                    begin = time.monotonic()
        step_s = (time.monotonic() - begin) / setting.steps
        ends = set(generation.ended.values())
        assert len(ends) == 1 and {kind for kind, _ in ends} == {"result"}, ends
        return found, ends.pop()[1], step_s
    finally:
        generation.close()
