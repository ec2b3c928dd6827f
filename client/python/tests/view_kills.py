"""Kills ranks, the engine and the daemon at random moments of a job whose parameters are views.

view_kills.py --kills 200            # of one rank and of two, by turns
view_kills.py --seed 17 --kills 10

After every step, and whenever a trainer attaches again, its parameters are those of one
step, bit for bit: of the step that the job says it is at.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import logging
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait

import optstate
import torch
from daemon import Daemon
from ranks import Ranks, say

SIZES = (700_001, 300_000, 31, 400_000, 65_536)
STEPS_PER_KILL = 4
# From a step's end to the kill: a step takes a few milliseconds.
DELAY_MAX_S = 0.03
VICTIMS = ("ranks", "engine", "supervisor", "engine and supervisor", "ranks and engine")


def parameters_of_trainer() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def digest(parameters: list[torch.nn.Parameter]) -> str:
    found = hashlib.blake2b(digest_size=12)
    for parameter in parameters:
        found.update(memoryview(parameter.detach().numpy()).cast("B"))
    return found.hexdigest()


def edit(parameters: list[torch.nn.Parameter], step: int) -> None:
    """Writes without a trace. The same again when the step is begun again."""
    if step % 3 == 1:
        parameters[0].data[step:400_000:7] = 0.125 * step
        parameters[4].detach().numpy()[:100] = step


def give_gradients(parameters: list[torch.nn.Parameter], base: torch.Tensor, step: int) -> None:
    """Makes gradients by backward(), so that they are views too; changes some without a trace."""
    for parameter in parameters:
        values = base[step : step + parameter.numel()] * (1 + step % 5)
        parameter.grad = None
        (parameter * values).sum().backward()
    parameters[step % 4].grad.data.mul_(0.5)


def train(connection, rank: int, endpoint: str, job: str | None, steps: int) -> None:
    """Says (what, step, digest) after attaching, after each edit and after each step."""
    logging.getLogger("optstate").setLevel(logging.ERROR)
    parameters = parameters_of_trainer()
    base = torch.randn(max(SIZES) + steps, generator=torch.Generator().manual_seed(2))
    optimizer = optstate.AdamW(
        parameters,
        lr=0.01,
        job=job,
        endpoint=endpoint,
        max_norm=100.0,
        gradients_as_views=True,
    )
    assert len(optimizer._served.attachment.parameters._in_view) == len(SIZES)
    say(connection, ("attached", optimizer.committed_step, digest(parameters)))
    for step in range(optimizer.committed_step, steps):
        edit(parameters, step)
        say(connection, ("edited", step, digest(parameters)))
        give_gradients(parameters, base, step)
        optimizer.step()
        say(connection, ("stepped", optimizer.committed_step, digest(parameters)))
    optimizer.close()


class Reference:
    """The digests, by step, of an undisturbed run."""

    def __init__(self, steps: int) -> None:
        self._of: dict[str, dict[int, str]] = {"attached": {}, "edited": {}, "stepped": {}}
        ranks = Ranks(train, 1, "embedded", None, steps)
        try:
            for _ in range(1 + 2 * steps):
                what, step, value = ranks.hear(0)
                self._of[what][step] = value
            ranks.results()
        finally:
            ranks.close()
        self._of["stepped"][0] = self._of["attached"][0]

    def check(self, what: str, step: int, value: str) -> None:
        expected = {self._of["edited" if what == "edited" else "stepped"][step]}
        if what == "attached" and step in self._of["edited"]:
            expected.add(self._of["edited"][step])  # the load was whole, the step did not come
        assert value in expected, f"{what} at step {step}: parameters of no step"


class Campaign:
    """One job that is killed and killed again."""

    def __init__(self, seed: int, world_size: int, kills: int) -> None:
        self._random = random.Random(seed)
        self._world_size = world_size
        self._steps = (kills + 1) * STEPS_PER_KILL
        self._reference = Reference(self._steps)
        self._directory = tempfile.TemporaryDirectory(prefix="optstate-test-")
        config = pathlib.Path(self._directory.name) / "config.yaml"
        config.write_text("engine:\n  restarts_max: 1000000\n")
        self._daemon = Daemon("--config", str(config))
        self._job = f"kills-{seed}"
        self._ranks = self._start()
        self.killed: collections.Counter[str] = collections.Counter()

    def _start(self) -> Ranks:
        arguments = (self._daemon.shm, self._job, self._steps)
        return Ranks(train, self._world_size, *arguments)

    def close(self) -> None:
        self._ranks.close()
        self._daemon.stop()
        self._directory.cleanup()

    def run(self) -> None:
        for kill in range(1, self._steps // STEPS_PER_KILL):
            self._follow(until=kill * STEPS_PER_KILL)
            self._kill(self._random.choice(VICTIMS))
        self._follow(until=self._steps)

    def _follow(self, until: int) -> None:
        """Checks what ranks say, until each has come so far."""
        behind = set(range(self._world_size))
        while behind:
            for connection in wait([self._ranks.connections[rank] for rank in behind]):
                rank = self._ranks.connections.index(connection)
                what, step, value = self._ranks.hear(rank)
                self._reference.check(what, step, value)
                if step >= until and what != "edited":
                    behind.discard(rank)

    def _kill(self, victim: str) -> None:
        described = self._daemon.optctl("describe", "job", self._job)
        engine = int(described["engine_pid"])
        time.sleep(
            self._random.uniform(0, DELAY_MAX_S)
        )  # nothing waits for this: any moment will do
        self.killed[victim] += 1
        if "engine" in victim:
            os.kill(engine, signal.SIGKILL)
        if "supervisor" in victim:
            self._daemon.kill()
            self._daemon.start()
        if "ranks" in victim:
            self._ranks.kill(*self._random.sample(range(self._world_size), self._world_size))
            self._check_last_words()
            self._ranks.close()
            self._ranks = self._start()

    def _check_last_words(self) -> None:
        for connection in self._ranks.connections:
            while connection.poll(0):
                try:
                    _, said = connection.recv()
                except EOFError:
                    break
                self._reference.check(*said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    total: collections.Counter[str] = collections.Counter()
    batch = 20
    for index, begin in enumerate(range(0, arguments.kills, batch)):
        seed, world_size = arguments.seed + index, 1 + index % 2
        kills = min(batch, arguments.kills - begin)
        print(f"seed {seed}: {kills} kills, ranks: {world_size}", flush=True)
        campaign = Campaign(seed, world_size, kills)
        try:
            campaign.run()
        finally:
            campaign.close()
        total += campaign.killed
    print(", ".join(f"{victim}: {count}" for victim, count in sorted(total.items())))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
