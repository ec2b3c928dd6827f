"""The runbook of deploy/README.md, from nothing: who may do what, TCP, certificates and tokens."""

from __future__ import annotations

import getpass
import grp
import os

import optstate
import pytest
from daemon import free_port
from runbook import Operator, attach, executes, read_yaml, train

_CA = "openssl req -x509..."
_ISSUE = "issue() {..."
_NODE = "issue node7 DNS:node7,IP:10.0.0.7"
_ALICE = "issue alice URI:spiffe://cluster/trainer/alice"
_ADMIN = "issue admin URI:spiffe://cluster/admin"
_EXPORT = "export OPTSTATE_TLS_CA=ca.crt..."
_LIST = "optctl --endpoint grpcs:node7:7600 get jobs"
# The tests' job, where the README says NAME.
_JOB = {"NAME": "gpt"}


def write_replaced(path: os.PathLike, text: str, replaced: dict[str, str]) -> None:
    for old, new in replaced.items():
        assert old in text, f"the README has no {old} in {text}"
        text = text.replace(old, new)
    path.write_text(text)


def write_configuration(operator: Operator, port: int) -> list[str]:
    """Writes the README's files with names of this machine; returns the daemon's command."""
    folder = operator.folder
    write_replaced(
        folder / "optstated.yaml",
        read_yaml("# /etc/optstate/optstated.yaml\n"),
        {
            "10.0.0.7:7600": f"127.0.0.1:{port}",
            "/etc/optstate/tls": str(folder),
            "/etc/optstate": str(folder),
            "optstate-admins": grp.getgrgid(os.getgid()).gr_name,
        },
    )
    write_replaced(
        folder / "identities.yaml",
        read_yaml("# /etc/optstate/identities.yaml"),
        {"user: alice": f"user: {getpass.getuser()}"},
    )
    places = ["--socket", f"{folder}/s", "--state-dir", f"{folder}/state"]
    return ["optstated", "--config", f"{folder}/optstated.yaml", *places]


def set_client(monkeypatch: pytest.MonkeyPatch, operator: Operator, **names: str) -> None:
    """Gives this process's sessions what the README's commands export."""
    for name, value in names.items():
        monkeypatch.setenv(f"OPTSTATE_{name}", value)
    # The name in the certificate, which this machine does not resolve.
    monkeypatch.setenv("OPTSTATE_TLS_SERVER_NAME", "node7")
    operator.environment["OPTSTATE_TLS_SERVER_NAME"] = "node7"


@executes(
    "optctl set job NAME group=research",
    "optctl set job NAME private=true readers=alice,@ops",
    "optctl set job NAME private=false group=",
    "optctl describe job NAME",
)
def test_who_may_use_a_job(operator, start_daemon):
    daemon = start_daemon()
    _, optimizer = attach(daemon.shm)
    # The README's names stand for those of this machine.
    user, group = getpass.getuser(), grp.getgrgid(os.getgid()).gr_name
    said = operator.run("optctl set job NAME group=research", replaced={**_JOB, "research": group})
    assert f"not private; group {group}" in said
    said = operator.run(
        "optctl set job NAME private=true readers=alice,@ops",
        replaced={**_JOB, "alice": user, "@ops": f"@{group}"},
    )
    assert f"private; group {group}; readers {user}, @{group}" in said
    described = operator.run("optctl describe job NAME", replaced=_JOB)
    assert "owner uid" in described and f"{user}, @{group}" in described
    said = operator.run("optctl set job NAME private=false group=", replaced=_JOB)
    assert said.endswith("job gpt: not private\n")
    optimizer.close()


@executes("--insecure")
def test_tcp_without_tls(operator, start_daemon):
    command = ["optstated", "--socket", f"{operator.folder}/s"]
    command += ["--state-dir", f"{operator.folder}/state", "--listen", f"127.0.0.1:{free_port()}"]
    refused = operator.execute(command)
    assert refused.returncode != 0 and "--insecure" in refused.stderr
    # The tests' daemons have the flag.
    daemon = start_daemon()
    assert operator.words("--insecure")[0] in daemon.process.args
    _, optimizer = attach(daemon.grpc_tcp)
    optimizer.close()


@executes(_CA, _ISSUE, _NODE, _ALICE, _ADMIN, "chmod o= node7.key", _EXPORT, _LIST, "optctl drain")
def test_certificates(operator, monkeypatch):
    folder, port = operator.folder, free_port()
    operator.run(_CA, _ISSUE, _NODE, _ALICE, _ADMIN)
    command = write_configuration(operator, port)
    (folder / "node7.key").chmod(0o644)
    refused = operator.execute(command)
    assert refused.returncode != 0 and "chmod o=" in refused.stderr
    operator.run("chmod o= node7.key")
    operator.environment["OPTSTATE_ENDPOINT"] = f"unix:{folder}/s"
    with operator.started(command):
        endpoint = f"grpcs:127.0.0.1:{port}"
        operator.environment["OPTSTATE_ENDPOINT"] = endpoint
        files = {"CA": "ca.crt", "CERTIFICATE": "alice.crt", "KEY": "alice.key"}
        files = {f"TLS_{name}": str(folder / file) for name, file in files.items()}
        set_client(monkeypatch, operator, **files)
        model, optimizer = attach(endpoint)
        train(model, optimizer)
        optimizer.close()
        address = {"grpcs:node7:7600": endpoint}
        assert "gpt" in operator.run(_EXPORT, _LIST, replaced=address)
        assert "certificate" in operator.run(_LIST, replaced=address, exit_status=4)
        assert "operator" in operator.run(_EXPORT, "optctl drain", exit_status=4)
        operator.run(_EXPORT, "optctl drain", replaced={"alice": "admin"})
        # An identity that is removed, by renaming, is refused from then on.
        write_replaced(
            folder / "next.yaml",
            (folder / "identities.yaml").read_text(),
            {"cluster/trainer/alice": "cluster/nobody", "cluster/trainer/*": "cluster/none"},
        )
        os.replace(folder / "next.yaml", folder / "identities.yaml")
        list_jobs = ["optctl", "get", "jobs"]
        tls = {f"OPTSTATE_{name}": value for name, value in files.items()}
        # 5: the connection was let in before, and was closed for it.
        for _ in range(1000):
            answer = operator.execute(list_jobs, env={**operator.environment, **tls})
            if answer.returncode not in (0, 5):
                break
        assert answer.returncode == 4 and "no identity" in answer.stderr


@executes(
    _CA,
    _ISSUE,
    _NODE,
    "openssl rand -hex 32",
    'printf %s "$TOKEN" | sha256sum',
    "chmod o= node7.key",
)
def test_tokens(operator, monkeypatch):
    folder, port = operator.folder, free_port()
    operator.run(_CA, _ISSUE, _NODE)
    operator.run("chmod o= node7.key")
    token = operator.run("openssl rand -hex 32", then=" 2>/dev/null").strip()
    assert len(token) == 64
    operator.environment["TOKEN"] = token
    digest = operator.run('printf %s "$TOKEN" | sha256sum').split()[0]
    command = write_configuration(operator, port)
    write_replaced(
        folder / "optstated.yaml",
        (folder / "optstated.yaml").read_text(),
        {
            f"  client_ca_file: {folder}/ca.crt\n": "",
            f"identities_file: {folder}/identities.yaml": f"tokens_file: {folder}/tokens.yaml",
        },
    )
    user = getpass.getuser()
    (folder / "tokens.yaml").write_text(
        f'tokens: [{{name: ci, sha256: "{digest}", user: "{user}", role: trainer}}]\n'
    )
    (folder / "tokens.yaml").chmod(0o600)
    operator.environment["OPTSTATE_ENDPOINT"] = f"unix:{folder}/s"
    with operator.started(command):
        endpoint = f"grpcs:127.0.0.1:{port}"
        set_client(monkeypatch, operator, TLS_CA=str(folder / "ca.crt"), TOKEN=token)
        model, optimizer = attach(endpoint)
        train(model, optimizer)
        optimizer.close()
        monkeypatch.setenv("OPTSTATE_TOKEN", token[::-1])
        with pytest.raises(optstate.UnauthenticatedError, match="token"):
            attach(endpoint)
