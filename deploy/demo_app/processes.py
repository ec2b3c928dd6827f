"""The daemon and the trainers of the demo: started, watched, killed, cleaned up."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

_HERE = pathlib.Path(__file__).resolve().parent
# Where the programs are; tests have them elsewhere.
BIN = pathlib.Path(sys.executable).parent
# Between two looks at a process and what it wrote.
_LOOK_S = 0.02


class Daemon:
    """optstated with a state directory of its own, which goes when it ends.

    disk: its directory for swapped and durable state, or None. devices: as `optstated --devices`
    has them, or None.
    """

    def __init__(
        self, log: pathlib.Path, disk: pathlib.Path | None = None, devices: str | None = None
    ) -> None:
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._directory = pathlib.Path(tempfile.mkdtemp(prefix="optstate-demo-", dir=shm))
        self._socket = self._directory / "optstated.sock"
        self._log = log
        self._disk = disk
        self._devices = devices
        self._start()

    def _start(self) -> None:
        command = [BIN / "optstated", "--state-dir", self._directory / "state"]
        command += ["--socket", self._socket]
        if self._disk is not None:
            self._disk.mkdir(mode=0o700, parents=True, exist_ok=True)
            command += ["--nvme-dir", self._disk]
        if self._devices is not None:
            command += ["--devices", self._devices]
        self._process = subprocess.Popen(
            command,
            stdout=open(self._log, "ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while not self._socket.exists():
            self.check()

    @property
    def endpoint(self) -> str:
        return f"unix:{self._socket}"

    def kill_engine(self, job: str) -> None:
        """Kills the job's engine; the daemon starts the next one."""
        described = json.loads(self.optctl("-o", "json", "describe", "job", job))
        os.kill(int(described["engine_pid"]), signal.SIGKILL)

    def lose_power(self, job: str) -> None:
        """Kills the daemon and the job's engine, and drops all that lay in memory."""
        described = json.loads(self.optctl("-o", "json", "describe", "job", job))
        self._process.kill()
        self._process.wait()
        os.kill(int(described["engine_pid"]), signal.SIGKILL)
        shutil.rmtree(self._directory)
        self._directory.mkdir(mode=0o700)
        self._start()

    def check(self) -> None:
        """Waits a moment; raises when the daemon has ended."""
        try:
            status = self._process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            return
        raise RuntimeError(f"optstated ended with {status}:\n{self._log.read_text()}")

    def optctl(self, *arguments: str) -> str:
        command = [BIN / "optctl", "--endpoint", self.endpoint, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


class Trainers:
    """Two ranks of one run under torchrun."""

    def __init__(self, output: pathlib.Path, name: str, arguments: list[str]) -> None:
        self._log = output / f"{name}.jsonl"
        self._output = output / f"{name}.log"
        self._pids = output / f"{name}.pids"
        shutil.rmtree(self._pids, ignore_errors=True)
        self._pids.mkdir()
        self._log.touch()
        self._position = self._log.stat().st_size
        command = [BIN / "torchrun", "--standalone", "--nproc-per-node=2", _HERE / "train.py"]
        command += ["--events", self._log, "--pids", self._pids, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        with open(self._output, "ab") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, start_new_session=True
            )

    def events(self) -> Iterator[dict]:
        """Yields the events that rank 0 writes, as it does; ends with the trainers.

        Raises when they fail.
        """
        with open(self._log) as log:
            log.seek(self._position)
            pending, status = "", None
            while True:
                pending += log.readline()
                if pending.endswith("\n"):
                    yield json.loads(pending)
                    pending = ""
                elif status is not None:
                    break
                else:
                    status = self._wait()
        if status != 0:
            raise RuntimeError(f"the trainers ended with {status}:\n{self._last_words()}")

    def _wait(self) -> int | None:
        try:
            return self._process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            return None

    def _last_words(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-30:])

    def kill(self) -> list[int]:
        """SIGKILL to every rank; returns who they were when torchrun has noticed."""
        pids = [int(file.read_text()) for file in sorted(self._pids.iterdir())]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        return pids

    def close(self) -> None:
        """Ends whatever still runs of them."""
        if self._process.poll() is None:
            self._process.terminate()  # torchrun ends its ranks then
            try:
                self._process.wait(40)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self.kill()
