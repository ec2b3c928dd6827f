"""The runbook of deploy/README.md, from nothing: every command in it is run, or said not to be.

Each test has a daemon of its own and does what a part of the runbook says; those about TCP are in
test_runbook_access.py, those about quotas in test_runbook_quotas.py. A command that the README has,
no test runs and _NOT_EXECUTED does not explain fails here.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tarfile
import threading
import urllib.request
from collections.abc import Iterator

import optstate
import pytest
import test_runbook_access  # noqa: F401 (what it executes counts too)
import test_runbook_quotas  # noqa: F401
from daemon import Daemon, free_port, program
from runbook import EXECUTED, README, attach, commands_of, executes, read_commands, train

_NOT_EXECUTED = {
    "deploy/package deb": "builds for minutes; deploy/package --check is its test",
    "dpkg -i .packages/optstated_*.deb .packages/optstate-client_*.deb": "installs on the machine; "
    "deploy/systemd/test_in_container does so in a container",
    "dpkg -i": "an upgrade of the packages: deploy/systemd/test_in_container",
    "systemctl reload optstated": "takes systemd: deploy/systemd/test_in_container",
    "--ulimit memlock=-1": "an option of container engines",
    "--gpus all": "an option of container engines",
    "nvidia-smi ...": "changes how a node's GPU is used; `-L` lists the GPUs, and takes one",
    "optctl verify": "names the verb; `optctl verify NAME` is run",
}
# The tests' job, where the README says NAME.
_JOB = {"NAME": "gpt"}


def test_every_command_is_run_or_explained():
    known = [*EXECUTED, *_NOT_EXECUTED]
    commands = read_commands()
    for command in commands:
        names = [name for name in dict.fromkeys(known) if command.is_named(name)]
        assert len(names) == 1, (
            f"deploy/README.md:{command.line}: {command.text!r} is in {len(names)} entries: run it "
            "in a test with @executes, or say in _NOT_EXECUTED why not"
        )
    gone = [name for name in known if not any(each.is_named(name) for each in commands)]
    assert not gone, f"deploy/README.md does not have {gone} any more"
    assert all(_NOT_EXECUTED.values())


def test_commands_are_found():
    text = (
        "Run `optctl new NAME`, `--flag` or `deploy/it`, not `a: b`, `x=1 2`, `word`.\n"
        "\n  ```sh\n  one \\\n    --two   # why\n\n  # alone\n  call() {  # A\n    echo $1\n  }\n"
        "  call 1\n  ```\n```yaml\nno: command\n```\n`optctl new NAME` again, `and this`\n"
    )
    assert [(each.line, each.text) for each in commands_of(text)] == [
        (3, "one --two"),
        (3, "call() {\n  echo $1\n}"),
        (3, "call 1"),
        (1, "optctl new NAME"),
        (1, "--flag"),
        (1, "deploy/it"),
        (16, "and this"),
    ]


@executes(
    "optstated --config deploy/config/optstated.yaml --check-config",
    "optstated --config deploy/config/optstated.yaml",
    "optctl status",
)
def test_start_with_the_configuration(operator):
    """The shipped file, but for the places that belong to the machine's one daemon."""
    text = (README.parent / "config/optstated.yaml").read_text()
    socket = f"{operator.folder}/run/optstated.sock"
    places = {
        "state_dir: /dev/shm/optstate": f"state_dir: {operator.folder}/state",
        "socket: /run/optstate/optstated.sock": f"socket: {socket}",
    }
    for old, new in places.items():
        assert old in text
        text = text.replace(old, new)
    file = operator.folder / "deploy/config/optstated.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text + "sockets: 1\n")
    check = "optstated --config deploy/config/optstated.yaml --check-config"
    assert "sockets" in operator.run(check, exit_status=1)
    file.write_text(text)
    operator.run(check)
    operator.environment["OPTSTATE_ENDPOINT"] = f"unix:{socket}"
    with operator.started(operator.words("optstated --config deploy/config/optstated.yaml")):
        assert socket in operator.run("optctl status")


@executes("optstated", "optctl status")
def test_start_as_any_user(operator):
    if os.geteuid() != 0:
        pytest.skip("this user's own daemon may be at the default places: root tries another user")
    uid = next(
        uid
        for uid in range(61000, 65000)
        if not any(os.path.lexists(f"{place}/optstate-{uid}") for place in ("/tmp", "/dev/shm"))
    )
    # The wheel may lie where root alone looks.
    for name in ("optstated", "optctl"):
        (operator.folder / "bin" / name).unlink()
        shutil.copy(program(name), operator.folder / "bin")
    operator.folder.chmod(0o755)
    socket = f"/tmp/optstate-{uid}/optstated.sock"
    operator.environment = {
        "PATH": operator.environment["PATH"],
        "HOME": "/",
        "OPTSTATE_ENDPOINT": f"unix:{socket}",
    }
    user = {"user": uid, "group": uid, "extra_groups": []}
    try:
        with operator.started(operator.words("optstated"), **user):
            said = operator.execute(operator.words("optctl status"), **user).stdout
            assert socket in said and f"/dev/shm/optstate-{uid}" in said
    finally:
        for place in ("/tmp", "/dev/shm"):
            shutil.rmtree(f"{place}/optstate-{uid}", ignore_errors=True)


@executes("chmod +t")
def test_a_folder_that_others_may_write_to_has_to_be_sticky(operator):
    folder = operator.folder / "open"
    folder.mkdir()
    folder.chmod(0o777)
    command = ["optstated", "--state-dir", f"{operator.folder}/state", "--socket", f"{folder}/s"]
    refused = operator.execute(command)
    assert refused.returncode != 0 and "+t, if all are to use it" in refused.stderr
    operator.run("chmod +t", then=f" {folder}")
    operator.environment["OPTSTATE_ENDPOINT"] = f"unix:{folder}/s"
    with operator.started(command):
        pass


@executes("optctl drain", "optctl upgrade --binary PATH")
def test_stop_restart_and_upgrade(operator, start_daemon):
    daemon = start_daemon()
    model, optimizer = attach(daemon.shm)
    train(model, optimizer)
    pid = daemon.process.pid
    operator.run("optctl upgrade --binary PATH", replaced={"PATH": program("optstated")})
    train(model, optimizer)
    assert daemon.process.pid == pid and daemon.process.poll() is None
    operator.run("optctl drain")
    with pytest.raises(optstate.UnavailableError, match="drain"):
        train(model, optimizer)
    optimizer.close()
    daemon.stop_gently()
    assert daemon.process.returncode == 0


@executes(
    "--lock-memory",
    "optctl status",
    "optctl get jobs",
    "optctl delete job NAME",
)
def test_memory(operator, start_daemon):
    daemon = start_daemon(*operator.words("--lock-memory"), "auto")
    model, optimizer = attach(daemon.shm)
    train(model, optimizer)
    optimizer.close()
    status = operator.run("optctl status")
    assert re.search(r"^state .* left in ", status, re.MULTILINE)
    assert re.search(r"^pages ", status, re.MULTILINE)
    assert re.search(r"^locked ", status, re.MULTILINE)
    assert re.search(r"^gpt ", operator.run("optctl get jobs"), re.MULTILINE)
    operator.run("optctl delete job NAME", replaced=_JOB)
    assert "gpt" not in operator.run("optctl get jobs")


@executes("--log-format json", "--raw", "optctl logs NAME")
def test_the_log_as_json(operator, start_daemon):
    daemon = start_daemon(*operator.words("--log-format json"))
    model, optimizer = attach(daemon.shm)
    train(model, optimizer)
    optimizer.close()
    # No service of systemd: it says where the log is, in either form.
    raw = " ".join(operator.words("--raw"))
    for then in ("", f" {raw}"):
        logs = operator.run("optctl logs NAME", replaced=_JOB, then=then, exit_status=4)
        assert str(daemon.directory / "log") in logs
    daemon.stop_gently()
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    assert {line["process"] for line in lines} == {"supervisor", "engine"}
    assert all(line["job"] == "gpt" for line in lines if line["process"] == "engine")
    created = [line for line in lines if line["message"].startswith("job gpt: created")]
    assert [line["job"] for line in created] == ["gpt"]
    ends = [line for line in lines if line["message"].startswith("engine ends")]
    assert [line["fields"]["step"] for line in ends] == ["1"]
    assert all(
        re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"]) for line in lines
    )


@executes(
    "--nvme-dir DIR",
    "optctl set job NAME directory_weights=3,1",
    "optctl set job NAME host_budget=8GiB",
    "optctl describe job NAME",
    "optctl describe tier",
    "--measure",
    "--bytes 64GiB",
    "optctl verify NAME",
)
def test_disks(operator, start_daemon, tmp_path):
    missing = operator.words("--nvme-dir DIR", {"DIR": f"{tmp_path}/missing"})
    alone = ["--state-dir", f"{operator.folder}/state", "--socket", f"{operator.folder}/s"]
    refused = operator.execute(["optstated", *alone, *missing])
    assert refused.returncode != 0 and f"{tmp_path}/missing" in refused.stderr
    flags = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir(mode=0o700)
        flags += operator.words("--nvme-dir DIR", {"DIR": f"{tmp_path}/{name}"})
    daemon = start_daemon(*flags)
    model, optimizer = attach(daemon.shm, placement="nvme", durability="step")
    train(model, optimizer)
    assert "weights 3,1" in operator.run("optctl set job NAME directory_weights=3,1", replaced=_JOB)
    assert "8.0 GiB" in operator.run("optctl set job NAME host_budget=8GiB", replaced=_JOB)
    train(model, optimizer)
    assert "no damage" in operator.run("optctl verify NAME", replaced=_JOB)
    said = operator.run("optctl describe job NAME", replaced=_JOB)
    assert f"{tmp_path}/one/jobs/gpt, weight 3" in said and "verified" in said
    size = " ".join(operator.words("--bytes 64GiB"))
    assert "auto, 64GiB" in operator.run("optctl describe tier", then=f" {size}")
    measure = " ".join(operator.words("--measure"))
    measured = operator.run("optctl describe tier", then=f" {measure} --timeout 50")
    assert measured.count("bandwidth") >= 2
    optimizer.close()


@pytest.fixture
def block_device(tmp_path: pathlib.Path) -> Iterator[str]:
    """An empty loop device of 256 MiB."""
    if os.geteuid() != 0 or not shutil.which("losetup"):
        pytest.skip("a block device for the test takes root and losetup")
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(256 << 20)
    made = subprocess.run(
        ["losetup", "--find", "--show", image], capture_output=True, text=True, timeout=60
    )
    if made.returncode != 0:
        pytest.skip(f"this machine makes no loop device: {made.stderr}")
    device = made.stdout.strip()
    yield device
    subprocess.run(["losetup", "--detach", device], check=True)


@executes(
    "lsblk -o NAME,SIZE,FSTYPE,MOUNTPOINTS",
    "mkdir -m 0700 /var/lib/optstate",
    "optstated --format-device /var/lib/optstate,device=/dev/disk/by-id/nvme-EXAMPLE",
    "optstated --nvme-dir /var/lib/optstate,device=/dev/disk/by-id/nvme-EXAMPLE",
    "--force",
)
def test_a_block_device(block_device, operator, start_daemon, tmp_path):
    places = {"/var/lib/optstate": f"{tmp_path}/optstate"}
    named = {**places, "/dev/disk/by-id/nvme-EXAMPLE": block_device}
    name = pathlib.Path(block_device).name
    listed = operator.run("lsblk -o NAME,SIZE,FSTYPE,MOUNTPOINTS")
    assert re.search(rf"^{name} ", listed, re.MULTILINE)
    operator.run("mkdir -m 0700 /var/lib/optstate", replaced=places)
    with open(block_device, "r+b") as device:
        device.write(b"content of somebody else")
    form = "optstated --format-device /var/lib/optstate,device=/dev/disk/by-id/nvme-EXAMPLE"
    assert "is not empty" in operator.run(form, replaced=named, exit_status=1)
    operator.run(form, replaced=named, then=" " + " ".join(operator.words("--force")))
    started = "optstated --nvme-dir /var/lib/optstate,device=/dev/disk/by-id/nvme-EXAMPLE"
    daemon = start_daemon(*operator.words(started, named)[1:])
    model, optimizer = attach(daemon.shm, placement="nvme", durability="step")
    train(model, optimizer)
    assert block_device in daemon.run_optctl("describe", "job", "gpt")
    optimizer.close()


@executes(
    "--sleep-dir",
    "optctl sleep NAME",
    "optctl wake NAME",
    "optctl describe job NAME",
    "optctl delete job NAME",
)
def test_sleeping_jobs(operator, start_daemon, tmp_path):
    (tmp_path / "asleep").mkdir(mode=0o700)
    daemon = start_daemon(*operator.words("--sleep-dir"), str(tmp_path / "asleep"))
    model, optimizer = attach(daemon.shm)
    train(model, optimizer)
    assert "End them first" in operator.run("optctl sleep NAME", replaced=_JOB, exit_status=4)
    optimizer.close()
    operator.run("optctl sleep NAME", replaced=_JOB)
    with pytest.raises(optstate.FailedPreconditionError, match="optctl wake gpt"):
        attach(daemon.shm)
    assert f"{tmp_path}/asleep" in operator.run("optctl describe job NAME", replaced=_JOB)
    operator.run("optctl wake NAME", replaced=_JOB)
    _, again = attach(daemon.shm)
    assert again.committed_step == 1
    again.close()
    operator.run("optctl delete job NAME", replaced=_JOB)
    assert daemon.jobs() == []


@executes("--metrics 127.0.0.1:9464")
def test_metrics(operator, start_daemon):
    # The machine's own daemon may have the README's port.
    port = str(free_port())
    daemon = start_daemon(*operator.words("--metrics 127.0.0.1:9464", {"9464": port}))
    model, optimizer = attach(daemon.shm)
    train(model, optimizer)

    def read(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.read().decode()

    assert 'job_name="gpt"' in read("/metrics")
    assert "<html" in read("/")
    assert "gpt" in json.dumps(json.loads(read("/status.json")))
    optimizer.close()


@executes(
    "--devices",
    "optctl set job NAME device_budget=8GiB",
    "optctl describe job NAME",
    "optctl describe device",
)
def test_devices(operator, start_daemon):
    daemon = start_daemon(*operator.words("--devices"), "emulated:1")
    model, optimizer = attach(daemon.shm, offload_fraction=0.5)
    train(model, optimizer)
    budget = operator.run("optctl set job NAME device_budget=8GiB", replaced=_JOB)
    assert "device_budget 8.0 GiB" in budget
    train(model, optimizer)
    assert "emulated device 0" in operator.run("optctl describe job NAME", replaced=_JOB)
    assert "job gpt" in operator.run("optctl describe device")
    optimizer.close()


def fail(daemon: Daemon) -> None:
    """Kills the job's engines until the daemon starts no more."""
    phase = ""
    while phase != "JOB_PHASE_FAILED":
        # The exit status says that a killed engine gives no answer.
        command = [program("optctl"), "--endpoint", daemon.shm, "-o", "json", "get", "jobs"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        (job,) = json.loads(done.stdout)["jobs"]
        phase = job["phase"]
        if int(job["engine_pid"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(job["engine_pid"]), signal.SIGKILL)


@executes("optctl top", "optctl trace NAME --steps 20 > trace.json")
def test_a_step_is_slow(operator, start_daemon):
    model, optimizer = attach(start_daemon().shm)
    train(model, optimizer)
    assert "gpt" in operator.run("optctl top", then=" --count 1")
    is_over = threading.Event()

    def train_on() -> None:
        while not is_over.is_set():
            train(model, optimizer)

    trainer = threading.Thread(target=train_on)
    trainer.start()
    try:
        said = operator.run("optctl trace NAME --steps 20 > trace.json", replaced=_JOB)
    finally:
        is_over.set()
        trainer.join()
    assert "20 of 20 steps" in said
    trace = json.loads((operator.folder / "trace.json").read_text())
    assert trace["otherData"]["complete"] is True
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"push", "staging", "waiting", "decide", "update", "publish"} <= names


@executes(
    "optctl describe job NAME",
    "optctl events NAME",
    "optctl events",
    "optctl logs NAME",
    "optctl bugreport",
    "optctl recover NAME",
    "optctl recover NAME --to-durable",
)
def test_a_job_does_not_go_on(operator, start_daemon, tmp_path):
    (tmp_path / "disk").mkdir(mode=0o700)
    config = tmp_path / "optstated.yaml"
    config.write_text("engine: {restarts_max: 1}\n")
    daemon = start_daemon("--config", str(config), "--nvme-dir", str(tmp_path / "disk"))
    model, optimizer = attach(daemon.shm, placement="nvme", durability="step")
    train(model, optimizer, 3)
    optimizer.close()

    fail(daemon)
    assert "failed" in operator.run("optctl describe job NAME", replaced=_JOB)
    for command in ("optctl events NAME", "optctl events"):
        said = operator.run(command, replaced=_JOB if "NAME" in command else None)
        assert "engine_died" in said and "job_failed" in said
    # No service of systemd: it says where the log is.
    logs = operator.run("optctl logs NAME", replaced=_JOB, exit_status=4)
    assert str(daemon.directory / "log") in logs
    operator.run("optctl recover NAME", replaced=_JOB)
    fail(daemon)
    operator.run("optctl recover NAME --to-durable", replaced=_JOB)
    _, again = attach(daemon.shm, placement="nvme", durability="step")
    assert again.committed_step == 3
    again.close()
    operator.run("optctl bugreport")
    (report,) = operator.folder.glob("optstate-bugreport-*.tar.gz")
    with tarfile.open(report) as archive:
        assert "optstate-bugreport/jobs.json" in archive.getnames()
