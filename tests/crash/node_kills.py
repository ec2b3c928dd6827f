"""Kills processes of a job on several nodes at random instants, and compares every bit.

node_kills.py --kills 500
node_kills.py --seed 17 --kills 10

Each node is a daemon of its own on this machine, told apart by $OPTSTATE_NODE. Ranks, engines,
supervisors and whole nodes are killed, within steps and while ranks attach. Ranks that live end by
themselves or go on; then all are started again, and after every step each rank has the parameters
of an undisturbed job, whose ranks were all on one node. A job that cannot go on must say so to all
ranks, and only after a kill that loses what it needs; it begins again from a checkpoint. A node
whose memory is lost gets a replicated job back from the other one.

A seed says everything: even ones are of replicas, odd ones of shards; two of three clip by a norm.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client/python/tests"))

import optstate
from daemon import Daemon
from node_job import Generation, Setting, undisturbed
from optstate import _native
from optstate._torch.nodes.copy_note import position_on_node
from optstate.job_position import find_position
from optstate.session_spec import SessionSpec
from ranks import RECEIVE_TIMEOUT_S

STEPS_PER_KILL = 4
KILLS_PER_JOB = 20

# The processes that are killed, of one node or of all at once.
VICTIMS = {
    "one rank": ("rank",),
    "ranks": ("ranks",),
    "engine": ("engine",),
    "supervisor": ("supervisor",),
    "engine and supervisor": ("engine", "supervisor"),
    "ranks and engine": ("ranks", "engine"),
    "ranks and supervisor": ("ranks", "supervisor"),
    "node": ("ranks", "engine", "supervisor"),
    "node and its memory": ("ranks", "engine", "supervisor", "memory"),
}
# The last one makes the job begin again, and is drawn less often.
WEIGHTS = [2] * (len(VICTIMS) - 1) + [1]


# The texts that end ranks whose step is to be clipped by the norm of all nodes, without a loss.
SUMS_ARE_LOST = re.compile(r"sums of squares|has not noted the norm")

# Silence after which a rank is taken to wait for another one's return.
_RETURN_AWAITED_S = 10.0


class Campaign:
    """One job that is killed and killed again."""

    def __init__(self, seed: int, kills: int) -> None:
        self._random = random.Random(seed)
        self._directory = tempfile.TemporaryDirectory(prefix="optstate-test-")
        folder = pathlib.Path(self._directory.name)
        (folder / "config.yaml").write_text("engine:\n  restarts_max: 1000000\n")
        self._nodes = [Daemon("--config", str(folder / "config.yaml")) for _ in range(2)]
        wire = self._random.choice(["shm", "shm", "grpc_unix"])
        self._over_shm = wire == "shm"
        ranks_per_node = self._random.choice([1, 1, 2])
        alone = Setting(
            endpoints=["embedded"],
            ranks_per_node=2 * ranks_per_node,
            job=None,
            steps=(kills + 1) * STEPS_PER_KILL,
            optimizer=self._random.choice(["AdamW", "SGD", "Lion"]),
            options={"max_norm": 1.0 if seed // 2 % 3 else None},
            uses_ddp=self._random.random() < 0.5,
            across_nodes="sharded" if seed % 2 else "replicated",
            folder=self._directory.name,
        )
        # The sums of squares end with the engine that prepared the step, and then ranks end.
        self._may_lose_sums = bool(seed % 2 and alone.options["max_norm"])
        if alone.optimizer == "SGD":
            alone.options["momentum"] = 0.9
        if seed % 2:  # some of the parameters are cut
            alone.options["partition"] = self._random.choice(["greedy", "contiguous"])
        self._expected, self._expected_state, self._step_s = undisturbed(alone)
        self._setting = dataclasses.replace(
            alone,
            endpoints=[getattr(each, wire) for each in self._nodes],
            ranks_per_node=ranks_per_node,
            job=f"kills-{seed}",
        )
        self.about = (
            f"{wire}, ranks on a node: {ranks_per_node}, {alone.optimizer} {alone.options},"
            f" DDP: {alone.uses_ddp}, {alone.across_nodes}"
        )
        self._kills_left = kills
        self._generations = 0
        self._attach_s = 1.0
        self._reached = 0  # the newest step that some rank has seen
        # Whether the last kills may have lost what the job needs.
        self._may_be_lost = self._memory_is_lost = False
        # Before, a kill may leave a load on one node alone.
        self._has_stepped = False
        self.killed: collections.Counter[str] = collections.Counter()
        self.found: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self._ranks = self._start()

    def close(self) -> None:
        self._ranks.close()
        for each in self._nodes:
            each.stop()
        self._directory.cleanup()

    def run(self) -> None:
        self._attach()
        while self._kills_left:
            self._follow(until=min(self._reached + STEPS_PER_KILL, self._setting.steps - 1))
            if self._kill(within_s=2 * self._step_s):
                self._attach()
        self._follow(until=self._setting.steps)
        self._check_end()

    def _start(self) -> Generation:
        self._generations += 1
        return Generation(self._setting, self._generations)

    # Following ranks.

    def _check(self, heard: Sequence[tuple[int, str, int, str]]) -> None:
        for rank, what, step, value in heard:
            if what == "voting":
                continue
            assert value == self._expected[step], f"rank {rank} {what} at step {step}: other bits"
            # A step that a rank has seen is committed, and stays so.
            assert what != "attached" or step >= self._reached, (
                f"rank {rank} attached at step {step} after step {self._reached} was seen"
            )
            self._reached = max(self._reached, step)
            self._has_stepped |= what == "stepped"

    def _follow(self, until: int) -> None:
        """Checks what ranks say, until each has come so far."""
        behind = set(self._ranks.living)
        while True:
            if self._have_lost_sums():
                self.found["ranks ended, as sums of squares were lost"] += 1
                self._end_of_ranks()
                self._replace_ranks()
                self._attach()
                behind = set(self._ranks.living)
            for rank, (kind, text) in self._ranks.ended.items():
                assert kind == "result", f"rank {rank} ended with {kind}: {text}"
            behind -= set(self._ranks.ended)
            if not behind:
                return
            heard = self._ranks.hear(behind)
            self._check(heard)
            behind -= {rank for rank, what, step, _ in heard if what != "voting" and step >= until}

    def _have_lost_sums(self) -> bool:
        """Returns whether ranks have ended because an engine died with what clips the step."""
        errors = [text for kind, text in self._ranks.ended.values() if kind == "error"]
        return self._may_lose_sums and any(map(SUMS_ARE_LOST.search, errors))

    def _attach(self) -> None:
        """Waits until all ranks are attached, and takes one step each; starts them until they
        are. At times it kills again meanwhile."""
        while True:
            begin = time.monotonic()
            if self._kills_left > 1 and self._random.random() < 0.25:
                self.found["killed while attaching"] += 1
                self._kill(within_s=1.2 * self._attach_s, ends_others=True)
            behind = set(self._ranks.living)
            steps = set()
            while behind - set(self._ranks.ended):
                heard = self._ranks.hear(behind)
                self._check(heard)
                behind -= {rank for rank, what, _, _ in heard if what == "attached"}
                steps |= {step for _, what, step, _ in heard if what == "attached"}
            if not self._ranks.ended:
                assert len(steps) == 1, f"ranks attached at steps {sorted(steps)}"
                self._attach_s = time.monotonic() - begin
                self._may_be_lost = self._memory_is_lost = False
                return
            self._end_of_ranks()
            self._begin_again(self._told())
            self._replace_ranks()

    def _beside_killed(self) -> list[int]:
        """Returns the ranks that live on a node of which a rank was killed or has ended."""
        per_node = self._setting.ranks_per_node
        living = self._ranks.living - set(self._ranks.ended)
        nodes = {rank // per_node for rank in set(range(2 * per_node)) - living}
        return [rank for rank in living if rank // per_node in nodes]

    def _end_of_ranks(self) -> None:
        """Waits until each rank has ended by itself, or waits for the return of a rank of its
        own node, as it is to do: then it is ended, as a launcher would."""
        while self._ranks.living - set(self._ranks.ended):
            try:
                heard = self._ranks.hear(self._ranks.living, _RETURN_AWAITED_S)
            except AssertionError:
                waiting = self._beside_killed()
                if not waiting:
                    heard = self._ranks.hear(self._ranks.living)
                else:
                    self.found["ended while waiting for a rank"] += 1
                    self._ranks.kill(waiting)
                    continue
            self._check(heard)
        for kind, text in self._ranks.ended.values():
            if kind == "error":
                line = text.strip().splitlines()[-1]
                # Errors of torch's own collectives, in backward(), have no type of ours.
                typed = line.startswith("optstate.") or "/optstate/_torch/" not in text
                assert typed, f"a rank ended with an error of no type: {text}"
                self.errors[re.sub(r"[\d:.]*\d", "N", line)[:110]] += 1

    def _replace_ranks(self) -> None:
        self._ranks.close()
        self._ranks = self._start()

    # Killing.

    def _kill(self, within_s: float, *, ends_others: bool = False) -> bool:
        """Kills something within this time; returns whether ranks were started again.

        ends_others: a launcher ends the other ranks, which may not know each other yet.
        """
        victim = self._random.choices(list(VICTIMS), WEIGHTS)[0]
        if "memory" in VICTIMS[victim] and self._memory_is_lost:
            victim = "node"  # the other one has what is left of the job
        parts = VICTIMS[victim]
        nodes = self._random.choice([[0], [1], [0, 1]])
        if "memory" in parts or parts == ("rank",):
            nodes = nodes[:1]
        acts = [(part, node) for node in nodes for part in parts if part != "memory"]
        self._random.shuffle(acts)
        engines = {node: self._engine(node) for node in nodes if "engine" in parts}
        if not ends_others and self._random.random() < 0.6:
            self._await_vote()
            within_s /= 8
        time.sleep(self._random.uniform(0, within_s))  # any moment will do
        for part, node in acts:
            self._kill_part(part, node, engines.get(node))
        self._kills_left -= 1
        where = "all nodes" if len(nodes) > 1 else "one node"
        self.killed[f"{victim} ({where})"] += 1
        for node in nodes:
            if "memory" in parts:
                shutil.rmtree(self._nodes[node].directory / "state")
            if "supervisor" in parts:
                self._nodes[node].start()
        self._memory_is_lost |= "memory" in parts
        self._may_be_lost |= len(parts) == 3 and self._over_shm
        if not set(parts) & {"rank", "ranks"}:
            return False
        if ends_others:
            self._ranks.kill(sorted(self._ranks.living))
        self._end_of_ranks()
        self._note_positions()
        self._replace_ranks()
        return True

    def _await_vote(self) -> None:
        """Waits until some rank's node has prepared a step."""
        timeout_s = 0.0
        while self._ranks.living - set(self._ranks.ended):
            heard = self._ranks.hear(self._ranks.living, timeout_s)
            self._check(heard)
            if timeout_s and any(what == "voting" for _, what, _, _ in heard):
                return
            if not heard:  # what was said before is heard
                timeout_s = RECEIVE_TIMEOUT_S

    def _kill_part(self, part: str, node: int, engine: int | None) -> None:
        per_node = self._setting.ranks_per_node
        on_node = list(range(node * per_node, (node + 1) * per_node))
        if part == "rank":
            self._ranks.kill([self._random.choice(on_node)])
        elif part == "ranks":
            self._ranks.kill(self._random.sample(on_node, per_node))
        elif part == "supervisor":
            self._nodes[node].kill()
        elif engine:
            try:
                os.kill(engine, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it was ended with its job

    def _engine(self, node: int) -> int | None:
        if self._setting.job not in self._nodes[node].jobs():
            return None
        described = self._nodes[node].optctl("describe", "job", str(self._setting.job))
        return int(described["engine_pid"])

    def _address(self, node: int) -> SessionSpec:
        return SessionSpec(
            job=str(self._setting.job),
            optimizer=0,
            group_options=[],
            parameters=[],
            endpoint=self._setting.endpoints[node],
        )

    def _note_positions(self) -> None:
        """Counts where the nodes were when their ranks had ended."""
        try:
            found = [
                find_position(self._address(node)) or _native.JobPosition() for node in range(2)
            ]
        except (optstate.UnavailableError, optstate.DataLossError) as error:
            self.found[f"not asked: {type(error).__name__}"] += 1
            return
        prepared = sum(bool(each.prepared_step) for each in found)
        apart = len({each.committed_step for each in found}) > 1
        self.found[f"prepared on {prepared}{', nodes apart' if apart else ''}"] += 1

    # The answers that ranks get.

    def _told(self) -> bool:
        """Returns whether ranks were told that the job cannot go on; else they may try again."""
        said = {text.strip().splitlines()[-1] for _, text in self._ranks.ended.values()}
        lost = [text for text in said if "DataLossError" in text or "Precondition" in text]
        if not lost:
            return False
        assert len(self._ranks.ended) == self._setting.world_size
        assert len(lost) == len(said), f"ranks were told different things: {said}"
        may_be_told = self._may_be_lost or not self._has_stepped
        if self._setting.across_nodes == "sharded":  # else the other node has the same
            may_be_told |= self._memory_is_lost
        assert may_be_told, f"nothing was lost, but: {said}"
        # All are told the same: each node's step, and from which one on all could go on.
        assert all(re.search(r"step \d+", text) for text in said), said
        steps = {tuple(re.findall(r"step \d+", text)) for text in said}
        assert len(steps) == 1, f"ranks were told of other steps: {said}"
        self.found["could not go on"] += 1
        return True

    def _begin_again(self, told: bool) -> None:
        """Does what an operator is told to: deletes the job on all nodes, and begins from a
        checkpoint."""
        if not told:
            return
        for each in self._nodes:
            if self._setting.job in each.jobs():
                each.run_optctl("delete", "job", str(self._setting.job))
        folder = pathlib.Path(self._setting.folder)
        start = ""
        if (folder / "checkpoint.pt").exists():
            start = str(folder / f"start-{self._generations}.pt")
            shutil.copyfile(folder / "checkpoint.pt", start)
        self._setting = dataclasses.replace(self._setting, start=start)
        self._reached, self._has_stepped = 0, False

    def _check_end(self) -> None:
        self._end_of_ranks()
        results = {text for kind, text in self._ranks.ended.values()}
        assert results == {self._expected_state}, f"other state at the end: {results}"
        ends = []
        for node in range(2):
            found, _ = position_on_node(self._address(node))
            assert found is not None, f"node {node} ends without the job"
            ends.append((found.committed.step, found.committed.digest))
        if self._setting.across_nodes == "sharded":  # each has another part of the state
            ends = [(step, 0) for step, _ in ends]
        assert len(set(ends)) == 1, f"nodes end apart: {ends}"


class Totals:
    """The sums over all jobs of a campaign."""

    def __init__(self) -> None:
        self._of: dict[str, collections.Counter[str]] = {
            name: collections.Counter() for name in ("killed", "found", "errors")
        }

    def add(self, campaign: Campaign) -> None:
        for name, total in self._of.items():
            total.update(getattr(campaign, name))

    @property
    def kills(self) -> int:
        return sum(self._of["killed"].values())

    def table(self) -> str:
        """Returns a table of kills by their kind, where nodes were then, and what ranks said."""
        lines = []
        for name, total in self._of.items():
            lines.append(f"{sum(total.values()):6} {name}")
            lines += [f"{count:10} {what}" for what, count in total.most_common()]
        return "\n".join(lines)


def run(seed: int, kills: int, kills_per_job: int = KILLS_PER_JOB) -> Totals:
    """Kills so often, job after job, each with a seed of its own, which is printed first."""
    totals = Totals()
    for index, begin in enumerate(range(0, kills, kills_per_job)):
        of_job = min(kills_per_job, kills - begin)
        start = time.monotonic()
        print(f"--seed {seed + index} --kills {of_job}", end="", flush=True)
        campaign = Campaign(seed + index, of_job)
        print(f": {campaign.about}", end="", flush=True)
        try:
            campaign.run()
        finally:
            campaign.close()
        print(f": {time.monotonic() - start:.0f} s", flush=True)
        totals.add(campaign)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    print(run(arguments.seed, arguments.kills).table())


if __name__ == "__main__":
    main()
