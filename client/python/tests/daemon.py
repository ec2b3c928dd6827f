"""Starts optstated from the installed wheel for a test."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile

from optstate import _native

START_TIMEOUT_S = 30


def program(name: str) -> str:
    """Path of a binary of the wheel; $OPTSTATE_DAEMON replaces the daemon's."""
    if name == "optstated" and os.environ.get("OPTSTATE_DAEMON"):
        return os.environ["OPTSTATE_DAEMON"]
    return str(_native.PACKAGE_DIRECTORY / name)


def free_port() -> int:
    """A TCP port of the loopback address that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _accepts(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
        return True


class Daemon:
    """A daemon with its own state directory and socket; stop() removes both."""

    def __init__(self, *arguments: str) -> None:
        """arguments: further ones of optstated."""
        self._arguments = arguments
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="optstate-test-", dir=shm))
        self.socket = self.directory / "optstated.sock"
        self._tcp = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen | None = None
        self.start()

    @property
    def shm(self) -> str:
        return f"unix:{self.socket}"

    @property
    def grpc_unix(self) -> str:
        return f"grpc:unix:{self.socket}"

    @property
    def grpc_tcp(self) -> str:
        return f"grpc:{self._tcp}"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def start(self) -> None:
        """Starts it (again) and returns when it accepts on both addresses."""
        command = [program("optstated"), "--state-dir", str(self.directory / "state")]
        command += ["--socket", str(self.socket), "--listen", self._tcp, "--insecure"]
        command += self._arguments
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(START_TIMEOUT_S * 200):
            if self._accepts():
                return
            try:  # also the pause between two attempts
                status = self.process.wait(timeout=0.005)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError(f"optstated ended with {status}:\n{self.log}")
        raise RuntimeError(f"optstated does not accept:\n{self.log}")

    def _accepts(self) -> bool:
        host, port = self._tcp.split(":")
        on_tcp = _accepts(socket.AF_INET, (host, int(port)))
        return on_tcp and _accepts(socket.AF_UNIX, str(self.socket))

    def run_optctl(self, *arguments: str) -> str:
        """Runs optctl; returns what it prints."""
        command = [program("optctl"), "--endpoint", self.shm, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def optctl(self, *arguments: str) -> dict:
        """Returns the output of a verb of optctl, from JSON."""
        return json.loads(self.run_optctl("-o", "json", *arguments))

    def parameters(self, job: str) -> list[dict]:
        """Returns a job's parameters in the order of its layout: name, shape, group, ..."""
        found = self.optctl("get", "params", job)["parameters"]
        return [each["parameter"] for each in found]

    def jobs(self) -> list[str]:
        """Names of all jobs."""
        return [job["name"] for job in self.optctl("get", "jobs")["jobs"]]

    def kill(self) -> None:
        """SIGKILL: of the supervisor alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop_gently(self) -> None:
        """SIGTERM; start() finds all jobs again."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.kill()

    def stop(self) -> None:
        self.stop_gently()
        shutil.rmtree(self.directory, ignore_errors=True)


def start_daemon_with_disks(
    folder: pathlib.Path, *names: str, devices: str = "none", **limits: int
) -> Daemon:
    """A daemon with these directories whose jobs have as few frames as can be by default."""
    lines = ["engine: {workers: 2}", "nvme: {job_host_budget_bytes: 1}"]
    lines += ["limits:", "  operator_reserve_percent: 0"]
    lines += [f"  {name}: {value}" for name, value in limits.items()]
    (folder / "optstated.yaml").write_text("\n".join(lines) + "\n")
    arguments = ["--config", str(folder / "optstated.yaml"), "--devices", devices]
    for name in names:
        (folder / name).mkdir(mode=0o700)
        arguments += ["--nvme-dir", str(folder / name)]
    return Daemon(*arguments)
