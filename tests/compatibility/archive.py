"""The jobs of which each release leaves an archive; how one is made, unpacked and compared.

An archive is a folder tests/compatibility/VERSION:

  state.tar.xz   the daemon's jobs at step 3: state/jobs and disk/jobs
  expected.npz   bytes of parameters and optimizer state at step 3, and after one further step
  session.npz    what that release's client sent to register: Hello and RegisterRequest, as frames
  about.json     the versions that the daemon names, and what the machine was

Gradients are made of integers and no model is run, so that they are the same on every machine and
with every torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client/python/tests"))

import numpy
import optstate
import torch
from daemon import Daemon
from older_daemon import OlderDaemon

FOLDER = pathlib.Path(__file__).resolve().parent
STEPS = 3
# The versions that have an archive, a line each; not there before the first one.
RELEASES = FOLDER / "releases"
STATE, EXPECTED, SESSION, ABOUT = "state.tar.xz", "expected.npz", "session.npz", "about.json"
# Moments of an archive: as it was packed, and a step later.
PACKED, FURTHER = "packed", "further"

# Files that tie a job to a machine, its start or a user: left out, and made anew where needed.
_LEFT_OUT = {"boot", "engine.sock", "lock", "memory", "owner"}
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


class Model(torch.nn.Module):
    """Some hundred parameters of three dtypes; two of them end inside a block and a tile."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"weight": (16, 20), "bias": (20,), "scale": (7,)}
        dtypes = {"weight": torch.bfloat16, "bias": torch.float32, "scale": torch.float16}
        for number, (name, shape) in enumerate(shapes.items()):
            values = _pattern(shape, number, 1 / 64).to(dtypes[name])
            self.register_parameter(name, torch.nn.Parameter(values))

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [self.weight, self.bias]}, {"params": [self.scale], "lr": 0.02}]


@dataclasses.dataclass(frozen=True)
class Job:
    """One job of an archive: an optimizer of this library, and where its state lies."""

    make: str
    options: dict[str, Any]
    model: Callable[[], torch.nn.Module] = Model


class HalfModel(Model):
    """The same, all in bfloat16, as split masters ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


# Added to, and never changed: archives of former releases have these.
JOBS = {
    "in-memory": Job("AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "numbers": Job("NAdam", {"lr": 0.01, "state_dtype": torch.bfloat16}),
    "small": Job("Adam", {"lr": 0.01, "state_dtype": "dynamic8", "master": "split"}, HalfModel),
    "whole": Job("Adafactor", {"lr": 0.01}),
    "on-disk": Job(
        "AdamW",
        {"lr": 0.01, "placement": "nvme", "durability": "step", "sub_group_size": 4096},
    ),
}


def _pattern(shape: tuple[int, ...], seed: int, unit: float) -> torch.Tensor:
    """Multiples of `unit`, exact in every dtype, that look nothing like each other."""
    numel = int(numpy.prod(shape))
    numbers = [((i * 37 + seed * 101 + 11) % 61) - 30 for i in range(numel)]
    return (torch.tensor(numbers, dtype=torch.float64) * unit).to(torch.float32).reshape(shape)


def attach(daemon: Daemon, name: str, endpoint: str | None = None):
    """Returns a model and the optimizer that attaches it to the job, or makes that."""
    job = JOBS[name]
    model = job.model()
    optimizer = getattr(optstate, job.make)(
        model.groups(), job=name, model=model, endpoint=endpoint or daemon.shm, **job.options
    )
    return model, optimizer


def take_step(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        gradient = _pattern(tuple(parameter.shape), 7 * step + number, 1 / 128)
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


def _bytes_of(value: Any) -> numpy.ndarray:
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().copy()


def contents(model: torch.nn.Module, optimizer: Any) -> dict[str, numpy.ndarray]:
    """Returns the bytes of each parameter and of all that is kept for it."""
    found = {f"parameters/{n}": _bytes_of(p) for n, p in model.named_parameters()}
    for number, arrays in optimizer.state_dict()["state"].items():
        for array, value in arrays.items():
            if array == "step":
                value = float(value)
            if isinstance(value, (torch.Tensor, int, float)):
                found[f"state/{number}/{array}"] = _bytes_of(value)
    return found


def keyed(job: str, moment: str, found: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    return {f"{job}/{moment}/{key}": value for key, value in found.items()}


def differences(
    expected: dict[str, numpy.ndarray], job: str, moment: str, found: dict[str, numpy.ndarray]
) -> list[str]:
    """Returns what is not as it was recorded, bit for bit; arrays that are new do not count."""
    prefix = f"{job}/{moment}/"
    wrong = []
    for key, value in expected.items():
        if not key.startswith(prefix):
            continue
        ours = found.get(key.removeprefix(prefix))
        if ours is None or not numpy.array_equal(ours, value):
            wrong.append(key)
    assert any(key.startswith(prefix) for key in expected), f"nothing was recorded of {prefix}"
    return wrong


def releases() -> list[str]:
    """Returns the versions of which there must be an archive, in the order of their release."""
    return RELEASES.read_text().split() if RELEASES.is_file() else []


def problems() -> list[str]:
    """Says of which release files are missing, and which folder no release has."""
    versions = releases()
    found = [
        str((FOLDER / version / name).relative_to(FOLDER)) + " is missing"
        for version in versions
        for name in (STATE, EXPECTED, SESSION, ABOUT)
        if not (FOLDER / version / name).is_file()
    ]
    folders = {each.name for each in FOLDER.iterdir() if each.is_dir() and each.name[0].isdigit()}
    return found + [f"{name} is not in {RELEASES.name}" for name in sorted(folders - set(versions))]


def load(path: pathlib.Path) -> dict[str, numpy.ndarray]:
    with numpy.load(path, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}


# Packing.


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (member.isfile() or member.isdir()):
        return None
    if pathlib.PurePath(member.name).name in _LEFT_OUT:
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member


def pack(target: pathlib.Path, state: pathlib.Path, disk: pathlib.Path) -> None:
    """Packs the jobs of a daemon that has stopped."""
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for name, root in (("state", state), ("disk", disk)):
            paths = [root / "jobs", *sorted((root / "jobs").rglob("*"))]
            for path in paths:
                member = f"{name}/{path.relative_to(root)}"
                archive.add(path, member, recursive=False, filter=_without_owner)


def unpack(source: pathlib.Path, state: pathlib.Path, disk: pathlib.Path) -> None:
    """Unpacks jobs for a daemon that does not run, as jobs of this machine and of this user."""
    roots = {"state": state, "disk": disk}
    with tarfile.open(source, "r:xz") as archive:
        for member in archive.getmembers():
            top, *rest = pathlib.PurePosixPath(member.name).parts
            path = roots[top].joinpath(*rest)
            if ".." in rest or not (member.isdir() or member.isfile()):
                raise ValueError(f"{source}: {member.name} is no part of an archive")
            if member.isdir():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            else:
                content = archive.extractfile(member)
                assert content is not None
                path.write_bytes(content.read())
                path.chmod(member.mode & 0o700)
    for job in (state / "jobs").iterdir():
        adopt(job, disk / "jobs" / job.name)


def adopt(job: pathlib.Path, on_disk: pathlib.Path) -> None:
    """Gives a job's folders the files that were left out; see _LEFT_OUT."""
    boot = _BOOT_ID.read_text()
    for folder in (job, on_disk):
        if folder.is_dir():
            (folder / "owner").write_text(f"{os.getuid()}\n")
    (job / "boot").write_text(boot)
    if on_disk.is_dir():
        (on_disk / "memory").write_text(f"{boot}{job}\n")


# Recorded sessions.

_HEADER = struct.Struct("<4sI")  # of a frame: proto/shm/frame.h


def receive_frame(connection: socket.socket) -> bytes:
    """Returns a frame, its header included."""
    frame = b""
    wanted = _HEADER.size
    while len(frame) < wanted:
        more = connection.recv(wanted - len(frame))
        if not more:
            raise EOFError(f"the connection ended within a frame, after {len(frame)} bytes")
        frame += more
        if len(frame) == _HEADER.size:
            wanted += _HEADER.unpack(frame)[1]
    return frame


class SessionRecorder(OlderDaemon):
    """A socket before a daemon that keeps the first two frames of each client."""

    def __init__(self, path: pathlib.Path, daemon: pathlib.Path) -> None:
        super().__init__(path, daemon)
        self.is_older = False
        self.sessions: list[tuple[bytes, bytes]] = []

    def _greet(self, client: socket.socket, server: socket.socket) -> None:
        hello = receive_frame(client)
        server.sendall(hello)
        client.sendall(receive_frame(server))
        register = receive_frame(client)
        self.sessions.append((hello, register))
        server.sendall(register)


def replay(path: pathlib.Path, hello: bytes, register: bytes) -> Iterator[bytes]:
    """Sends what a client sent, and yields the replies' payloads."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(path))
        for frame in (hello, register):
            connection.sendall(frame)
            yield receive_frame(connection)[_HEADER.size :]


def layout_hash(state: pathlib.Path, job: str) -> bytes:
    """Returns the hash in a job's job.binpb (storage/format/FORMAT.md)."""
    return (state / "jobs" / job / "state/job.binpb").read_bytes()[32:64]


def read_about(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / ABOUT).read_text())
