"""Quotas of users and groups, with trainers of several users.

A test cannot be another user without root, but a token can: each user here is one over TLS.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple

import optstate
import pytest
import torch
from daemon import free_port, program
from runbook import Operator

# Users who have no name on most machines, and certainly not root or this one.
ADA, BOB = 61711, 61712
# A record of 4096 elements has three arrays of float32 at most; three records are the least.
FRAME_BYTES = 4096 * 12
ATTEMPTS = 2000
SWAPPED = {"placement": "nvme", "sub_group_size": 4096, "host_budget": 4 * FRAME_BYTES}

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl for the daemon's certificate"
)


class Site(NamedTuple):
    """A daemon with quotas, and its users."""

    operator: Operator
    endpoint: str
    monkeypatch: pytest.MonkeyPatch

    def attach(
        self, user: int, job: str, width: int = 64, **options: object
    ) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        """A trainer of this user's, with as many inputs as outputs."""
        self.monkeypatch.setenv("OPTSTATE_TOKEN", token_of(user))
        model = torch.nn.Linear(width, width)
        optimizer = optstate.AdamW(
            model.parameters(), lr=1e-3, job=job, model=model, endpoint=self.endpoint, **options
        )
        return model, optimizer

    def optctl(self, *words: str, user: int | None = None) -> subprocess.CompletedProcess:
        """Runs optctl as this user, or as the operator at the unix socket."""
        environment = dict(self.operator.environment)
        if user is not None:
            environment["OPTSTATE_TOKEN"] = token_of(user)
            environment["OPTSTATE_ENDPOINT"] = self.endpoint
        return self.operator.execute(["optctl", *words], env=environment)

    def users(self, *words: str, user: int | None = None) -> dict:
        done = self.optctl("get", "users", "-o", "json", *words, user=user)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def delete(self, job: str) -> None:
        done = self.optctl("delete", "job", job)
        assert done.returncode == 0, done.stderr


def train(model: torch.nn.Linear, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, model.in_features)).square().mean().backward()
        optimizer.step()


def token_of(user: int) -> str:
    return hashlib.sha256(f"token of {user}".encode()).hexdigest()


def write_certificate(folder: pathlib.Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-noenc", "-days", "2", "-subj", "/CN=optstate", "-keyout", "tls.key"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", "tls.crt"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    (folder / "tls.key").chmod(0o600)


def write_tokens(path: pathlib.Path, users: tuple[int, ...]) -> None:
    lines = ["tokens:"]
    for user in users:
        digest = hashlib.sha256(token_of(user).encode()).hexdigest()
        lines.append(f'  - {{name: t{user}, sha256: "{digest}", user: "{user}", role: trainer}}')
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)


@pytest.fixture
def serve(operator: Operator, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    """Starts a daemon with these quotas for the time of a block."""

    @contextlib.contextmanager
    def start(quotas: str, users: tuple[int, ...] = (ADA, BOB)) -> Iterator[Site]:
        folder, port = operator.folder, free_port()
        write_certificate(folder)
        write_tokens(folder / "tokens.yaml", users)
        (tmp_path / "disk").mkdir(mode=0o700)
        (folder / "optstated.yaml").write_text(
            f"listen: ['127.0.0.1:{port}']\n"
            f"tls: {{certificate_file: {folder}/tls.crt, key_file: {folder}/tls.key}}\n"
            f"access: {{tokens_file: {folder}/tokens.yaml}}\n"
            f"nvme: {{directories: ['{tmp_path}/disk']}}\n"
            "engine: {workers: 2}\n"
            f"quotas: {quotas}\n"
        )
        monkeypatch.setenv("OPTSTATE_TLS_CA", str(folder / "tls.crt"))
        operator.environment["OPTSTATE_TLS_CA"] = str(folder / "tls.crt")
        operator.environment["OPTSTATE_ENDPOINT"] = f"unix:{folder}/s"
        command = [program("optstated"), "--config", f"{folder}/optstated.yaml"]
        command += ["--socket", f"{folder}/s", "--state-dir", f"{folder}/state"]
        with operator.started(command):
            yield Site(operator, f"grpcs:127.0.0.1:{port}", monkeypatch)

    return start


def find_colleagues() -> tuple[int, int, int]:
    """Two users of this machine in one group, neither of them an operator, and that group."""
    first: dict[int, int] = {}
    for entry in pwd.getpwall():
        if entry.pw_uid in (0, os.geteuid()):
            continue
        other = first.setdefault(entry.pw_gid, entry.pw_uid)
        if other != entry.pw_uid:
            return other, entry.pw_uid, entry.pw_gid
    pytest.skip("this machine has no two users in one group")


def test_a_user_has_its_own_number_of_jobs(serve):
    with serve(f"[{{user: {ADA}, jobs_max: 1, weight: 200}}]") as site:
        model, optimizer = site.attach(ADA, "a")
        with pytest.raises(
            optstate.ResourceExhaustedError, match=f"quota of user {ADA}: jobs_max is 1"
        ):
            site.attach(ADA, "b")
        train(model, optimizer, 2)
        # It does not concern others.
        for job in ("c", "d"):
            other, with_other = site.attach(BOB, job)
            train(other, with_other)
            with_other.close()
        assert optimizer.committed_step == 2
        optimizer.close()


def test_a_user_has_its_own_number_of_sessions(serve):
    with serve(f"[{{user: {ADA}, sessions_max: 1}}]") as site:
        _, optimizer = site.attach(ADA, "a")
        with pytest.raises(
            optstate.ResourceExhaustedError, match=f"quota of user {ADA}: sessions_max is 1"
        ):
            site.attach(ADA, "b")
        optimizer.close()
        # The engine sees the end of the session in its own time.
        for attempt in range(ATTEMPTS):
            try:
                _, again = site.attach(ADA, "a")
            except optstate.ResourceExhaustedError:
                assert attempt + 1 < ATTEMPTS
            else:
                again.close()
                break


def test_a_user_sees_itself_and_an_operator_all(serve):
    with serve(f"[{{user: {ADA}, jobs_max: 3}}]") as site:
        model, optimizer = site.attach(ADA, "a")
        train(model, optimizer)
        _, other = site.attach(BOB, "b")
        shown = site.users()
        assert [int(user["uid"]) for user in shown["users"]] == [ADA, BOB]
        ada = shown["users"][0]
        assert int(ada["use"]["jobs"]) == 1 and int(ada["use"]["sessions"]) == 1
        assert int(ada["use"]["state_bytes"]) > 64 * 64 * 12
        assert int(ada["quota"]["jobs_max"]) == 3
        for words in ((), (str(ADA),)):
            own = site.users(*words, user=ADA)
            assert [int(user["uid"]) for user in own["users"]] == [ADA]
        refused = site.optctl("get", "users", str(BOB), user=ADA)
        assert refused.returncode == 4 and "its own user alone" in refused.stderr
        optimizer.close()
        other.close()


def test_the_members_of_a_group_have_state_together(serve):
    first, second, group = find_colleagues()
    quotas = f"[{{group: {group}, state_bytes_max: 3 MiB}}]"
    with serve(quotas, users=(first, second, ADA)) as site:
        refused: optstate.ResourceExhaustedError | None = None
        jobs: list[str] = []
        while refused is None and len(jobs) < 40:
            job = f"small{len(jobs)}"
            try:
                _, optimizer = site.attach((first, second)[len(jobs) % 2], job)
            except optstate.ResourceExhaustedError as error:
                refused = error
                # It has been made, if it is its gradients that were too much.
                site.optctl("delete", "job", job)
            else:
                jobs.append(job)
                optimizer.close()
        assert refused is not None and 2 <= len(jobs) < 40
        assert f"quota of group {group}: state_bytes_max is 3145728 bytes" in str(refused)
        # The job that was refused goes with its engine.
        deadline_s = time.monotonic() + 60
        while int(site.users()["groups"][0]["use"]["jobs"]) != len(jobs):
            assert time.monotonic() < deadline_s, site.users()
            time.sleep(0.02)
        (shown,) = site.users()["groups"]
        assert shown["group"] == str(group)
        # Small files, which no admission counts, may go a little beyond.
        assert 0 < int(shown["use"]["state_bytes"]) < 4 << 20
        # A user who is in no such group may have more.
        _, larger = site.attach(ADA, "larger", width=512)
        larger.close()
        # Another member has what a job gives back.
        site.delete(jobs[0])
        _, optimizer = site.attach(second, "next")
        optimizer.close()


def test_gradients_over_grpc_count_as_state(serve):
    """The state of 512 x 512 parameters has room, and their gradients beside it have none."""
    with serve(f"[{{user: {ADA}, state_bytes_max: 4 MiB}}]") as site:
        with pytest.raises(optstate.ResourceExhaustedError) as refused:
            site.attach(ADA, "a", width=512)
        assert "staging area for the gradients of rank 0" in str(refused.value)
        assert f"quota of user {ADA}: state_bytes_max is 4194304 bytes" in str(refused.value)
        assert int(site.users(str(ADA))["users"][0]["use"]["state_bytes"]) < 4 << 20
        site.delete("a")
        model, optimizer = site.attach(ADA, "b", width=256)
        train(model, optimizer)
        optimizer.close()


def test_frames_and_disks_have_quotas(serve):
    quotas = (
        f"[{{user: {ADA}, frames_bytes_max: {6 * FRAME_BYTES}}}, "
        f"{{user: {BOB}, disk_bytes_max: 1 MiB}}]"
    )
    with serve(quotas) as site:
        model, optimizer = site.attach(ADA, "a", width=256, **SWAPPED)
        train(model, optimizer)
        frames = f"quota of user {ADA}: frames_bytes_max is {6 * FRAME_BYTES} bytes"
        with pytest.raises(optstate.ResourceExhaustedError, match=frames):
            site.attach(ADA, "b", width=256, **SWAPPED)
        # Nor does it grow while it trains, whoever asks for that.
        grown = site.optctl("set", "job", "a", "host_budget=1MiB")
        assert grown.returncode != 0 and frames in grown.stderr
        train(model, optimizer)
        smaller = site.optctl("set", "job", "a", f"host_budget={3 * FRAME_BYTES}")
        assert smaller.returncode == 0, smaller.stderr
        train(model, optimizer)
        optimizer.close()
        with pytest.raises(
            optstate.ResourceExhaustedError,
            match=f"quota of user {BOB}: disk_bytes_max is 1048576 bytes",
        ):
            site.attach(BOB, "c", width=512, **SWAPPED)
        use = site.users(str(ADA))["users"][0]["use"]
        assert int(use["disk_bytes"]) > 256 * 256 * 8
        assert 0 < int(use["frames_bytes"]) <= 6 * FRAME_BYTES
