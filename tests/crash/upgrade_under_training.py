"""Upgrades a daemon of an earlier build to this one while jobs train, and compares every step.

upgrade_under_training.py --from OLD.whl --to NEW.whl

The earlier build's daemon serves trainers of the earlier build. In the middle `optctl upgrade` puts
this build in its place; the trainers go on with their old client. Then a trainer of this build
attaches to the same job. After each step the parameters are equal, bit for bit, to those of an
undisturbed run of this build. Every placement is taken over every wire.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

STEPS_BEFORE = 10
STEPS_AFTER = 10
TIMEOUT_S = 120


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    wire: str  # "unix" or "grpc:unix"
    options: dict


CASES = [
    Case("memory-shm", 1, "unix", {}),
    Case("memory-shm-2-ranks", 2, "unix", {"reduction": "daemon", "max_norm": 1.0}),
    Case("memory-grpc", 1, "grpc:unix", {"max_norm": 1.0}),
    Case("memory-grpc-2-ranks", 2, "grpc:unix", {"reduction": "daemon"}),
    Case("nvme-shm", 1, "unix", {"placement": "nvme", "durability": "step"}),
    Case("nvme-grpc", 1, "grpc:unix", {"placement": "nvme", "max_norm": 1.0}),
    Case("nvme-shm-2-ranks", 2, "unix", {"placement": "nvme", "reduction": "daemon"}),
]


def train(arguments: argparse.Namespace) -> None:
    """A rank: takes a step for each line of its input, and prints its number and a digest."""
    import optstate
    import torch

    generator = torch.Generator().manual_seed(1)
    sizes = (300_001, 70_000, 33, 120_000)
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    parameters = [
        torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype))
        for size, dtype in zip(sizes, dtypes)
    ]
    if arguments.ranks > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{arguments.store}",
            rank=arguments.rank,
            world_size=arguments.ranks,
        )
    optimizer = optstate.AdamW(
        parameters,
        lr=0.01,
        job="upgraded",
        endpoint=arguments.endpoint,
        **json.loads(arguments.options),
    )
    print(json.dumps({"attached": optimizer.committed_step}), flush=True)
    for _ in sys.stdin:
        step = optimizer.committed_step
        noise = torch.Generator().manual_seed(1000 * step + arguments.rank)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.numel(), generator=noise).to(parameter.dtype)
        optimizer.step()
        digest = hashlib.blake2b(digest_size=12)
        for parameter in parameters:
            digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
        said = {"step": optimizer.committed_step, "digest": digest.hexdigest()}
        print(json.dumps(said), flush=True)
    optimizer.close()


class Build:
    """An installed wheel."""

    def __init__(self, wheel: pathlib.Path, folder: pathlib.Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), str(wheel)], check=True)
        self.folder = folder

    def program(self, name: str) -> str:
        return str(self.folder / "optstate" / name)


class Daemon:
    def __init__(self, build: Build, folder: pathlib.Path) -> None:
        self._build = build
        self.socket = folder / "optstated.sock"
        self.log = folder / "log"
        disk = folder / "disk"
        disk.mkdir(mode=0o700, parents=True)
        config = folder / "optstated.yaml"
        config.write_text(
            "engine: {workers: 2}\nnvme: {job_host_budget_bytes: 1}\n"
            "limits: {operator_reserve_percent: 0}\n"
        )
        command = [build.program("optstated"), "--config", str(config)]
        command += ["--state-dir", str(folder / "state"), "--socket", str(self.socket)]
        command += ["--nvme-dir", str(disk)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self._await_start()

    def _await_start(self) -> None:
        while True:
            try:
                self.optctl("status")
                return
            except RuntimeError:
                try:  # also the pause between two attempts
                    status = self.process.wait(timeout=0.05)
                except subprocess.TimeoutExpired:
                    continue
                raise RuntimeError(
                    f"optstated ended with {status}: {self.log.read_text()}"
                ) from None

    def optctl(self, *arguments: str) -> str:
        endpoint = f"unix:{self.socket}"
        command = [self._build.program("optctl"), "--endpoint", endpoint, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise RuntimeError(f"optctl {' '.join(arguments)}: {done.stderr}{done.stdout}")
        return done.stdout

    def check_runs(self, build: Build) -> None:
        running = os.readlink(f"/proc/{self.process.pid}/exe")
        if running != build.program("optstated"):
            raise RuntimeError(f"the daemon runs {running}")

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=TIMEOUT_S)
        if failed:
            print(self.log.read_text(errors="replace")[-4000:], file=sys.stderr)


class Trainer:
    """The ranks of a case, run with the client of a build."""

    def __init__(self, build: Build, case: Case, daemon: Daemon, folder: pathlib.Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(build.folder), "OMP_NUM_THREADS": "1"}
        descriptor, store = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
        os.unlink(store)
        endpoint = f"{case.wire}:{daemon.socket}"
        command = [sys.executable, __file__, "--endpoint", endpoint, "--store", store]
        command += ["--ranks", str(case.ranks), "--options", json.dumps(case.options)]
        self._ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(case.ranks)
        ]
        self.attached_at = self._hear("attached")

    def _hear(self, what: str) -> object:
        lines = [rank.stdout.readline() for rank in self._ranks]
        if not all(lines):
            raise RuntimeError(f"a rank has ended: {lines}")
        if len(set(lines)) != 1:
            raise RuntimeError(f"the ranks differ: {lines}")
        return json.loads(lines[0])[what]

    def step(self) -> str:
        """Takes one step; returns the digest of the parameters after it."""
        for rank in self._ranks:
            rank.stdin.write("step\n")
            rank.stdin.flush()
        return self._hear("digest")

    def end(self) -> None:
        for rank in self._ranks:
            rank.stdin.close()
        for rank in self._ranks:
            if rank.wait(timeout=TIMEOUT_S) != 0:
                raise RuntimeError("a rank has failed")

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def upgrade_under(daemon: Daemon, binary: str, trainer: Trainer, digests: list[str]) -> None:
    """Upgrades while the trainer steps, and lets it take some steps more."""
    failures: list[Exception] = []

    def upgrade() -> None:
        try:
            print(daemon.optctl("upgrade", "--binary", binary).strip())
        except Exception as error:  # told to the thread that waits
            failures.append(error)

    thread = threading.Thread(target=upgrade)
    thread.start()
    while thread.is_alive():
        digests.append(trainer.step())
    thread.join()
    if failures:
        raise failures[0]
    for _ in range(STEPS_AFTER):
        digests.append(trainer.step())


def train_through_upgrade(case: Case, old: Build, new: Build, folder: pathlib.Path) -> list[str]:
    """Returns the digests of all steps."""
    digests: list[str] = []
    trainers = []
    with Daemon(old, folder) as daemon:
        try:
            trainers.append(Trainer(old, case, daemon, folder))
            for _ in range(STEPS_BEFORE):
                digests.append(trainers[-1].step())
            upgrade_under(daemon, new.program("optstated"), trainers[-1], digests)
            daemon.check_runs(new)
            trainers[-1].end()
            trainers.append(Trainer(new, case, daemon, folder))
            if trainers[-1].attached_at != len(digests):
                raise RuntimeError(f"attached at {trainers[-1].attached_at}, not {len(digests)}")
            for _ in range(STEPS_AFTER):
                digests.append(trainers[-1].step())
            trainers[-1].end()
        finally:
            for trainer in trainers:
                trainer.kill()
    return digests


def compare(case: Case, build: Build, folder: pathlib.Path, digests: list[str]) -> None:
    """Takes the same steps undisturbed."""
    with Daemon(build, folder) as daemon:
        trainer = Trainer(build, case, daemon, folder)
        try:
            for step, digest in enumerate(digests):
                if trainer.step() != digest:
                    raise RuntimeError(f"step {step + 1} of {len(digests)} differs")
            trainer.end()
        finally:
            trainer.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="old", type=pathlib.Path, help="the earlier build's wheel")
    parser.add_argument("--to", dest="new", type=pathlib.Path, help="this build's wheel")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="this one alone")
    for name in ("rank", "ranks"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    for name in ("endpoint", "store", "options"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        train(arguments)
        return 0
    failed = 0
    with tempfile.TemporaryDirectory(prefix="optstate-test-") as name:
        folder = pathlib.Path(name)
        old = Build(arguments.old, folder / "old")
        new = Build(arguments.new, folder / "new")
        cases = [case for case in CASES if arguments.case in (None, case.name)]
        for case in cases:
            try:
                through, alone = folder / case.name, folder / f"{case.name}-alone"
                digests = train_through_upgrade(case, old, new, through)
                compare(case, new, alone, digests)
                print(f"{case.name}: {len(digests)} steps equal", flush=True)
            except Exception as error:
                failed += 1
                print(f"{case.name}: {error}", flush=True)
    print(f"{len(cases) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
