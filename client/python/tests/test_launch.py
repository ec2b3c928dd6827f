"""Runs the scripts of deploy/launch, each as on one node of two ranks."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess

import pytest
from daemon import Daemon
from documented_programs import add_command, commands, free_port

LAUNCH = pathlib.Path(__file__).resolve().parents[3] / "deploy" / "launch"
KUBERNETES = LAUNCH.parent / "kubernetes" / "example" / "train.py"
SYSTEM_SOCKET = pathlib.Path("/run/optstate/optstated.sock")
RUN_TIMEOUT_S = 300
AGENT_ENDS_WITHIN_S = 45  # torchrun gives ranks 30 s
# Runs a program whose rank 1 dies as it takes its fifth step, once.
DIES_ONCE = """
import os, pathlib, runpy, signal, sys
import optstate
from optstate._torch.stepping import Stepping

step, mark, taken = Stepping.step, pathlib.Path(os.environ["MARK"]), 0

def dying(self, *args, **kwargs):
    global taken
    taken += 1
    if taken == 5 and os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)

Stepping.step = dying
runpy.run_path(sys.argv[1], run_name="__main__")
"""
# Runs a program whose ranks meet, and then fail, once.
MEETS_TWICE = """
import os, sys
from torch.distributed.rendezvous import rendezvous

store, rank, _ = next(rendezvous("env://"))
is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if is_first_attempt and rank == 0:
    store.set("address", "of a rank that is gone")
    sys.exit(1)
if is_first_attempt:
    store.wait(["never"])
if rank == 0:
    print("the former address is there:", store.check(["address"]), flush=True)
"""


@pytest.fixture
def environment(tmp_path, daemon, job) -> dict[str, str]:
    return {
        **os.environ,
        "OPTSTATE_ENDPOINT": daemon.shm,
        "OMP_NUM_THREADS": "1",
        "RUN": job,
        "LAST_CALL": "1",
        "MARK": str(tmp_path / "mark"),
        "PATH": f"{commands(tmp_path / 'bin')}:{os.environ.get('PATH', '')}",
    }


def _run(command, environment, **more) -> str:
    done = subprocess.run(
        list(map(str, command)),
        env={**environment, "HEAD": f"127.0.0.1:{free_port()}", "PORT": str(free_port()), **more},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _said(output: str) -> dict[int, tuple[int, int, str]]:
    """Returns by rank the steps and the sum of parameters that it has printed last."""
    pattern = r"rank (\d): from step (\d+) to (\d+), parameters sum to (-?\d+\.\d+)"
    found = re.findall(pattern, output)
    return {int(rank): (int(first), int(last), total) for rank, first, last, total in found}


def test_torchrun_goes_on_where_the_job_is(environment):
    start = LAUNCH / "torchrun" / "start"
    ten = _said(_run([start], environment, STEPS="10"))
    assert {rank: said[:2] for rank, said in ten.items()} == {0: (0, 10), 1: (0, 10)}
    twenty = _said(_run([start], environment, STEPS="20"))
    assert {rank: said[:2] for rank, said in twenty.items()} == {0: (10, 20), 1: (10, 20)}
    assert len({total for _, _, total in twenty.values()}) == 1
    whole = _said(_run([start], environment, STEPS="20", RUN=f"{environment['RUN']}-whole"))
    assert whole[0] == (0, 20, twenty[0][2])


def test_ranks_that_are_started_again_meet_in_a_new_store(environment, tmp_path):
    """In one that a former attempt has used they find addresses of ranks that are gone."""
    program = tmp_path / "meets.py"
    program.write_text(MEETS_TWICE)
    said = _run([LAUNCH / "torchrun" / "start-elastic", program], environment)
    assert "the former address is there: False" in said


def test_torchrun_starts_ranks_again(environment, tmp_path):
    dies = tmp_path / "dies.py"
    dies.write_text(DIES_ONCE)
    start = LAUNCH / "torchrun" / "start-elastic"
    said = _said(_run([start, dies, KUBERNETES], environment, STEPS="10"))
    assert {rank: each[:2] for rank, each in said.items()} == {0: (4, 10), 1: (4, 10)}
    assert pathlib.Path(environment["MARK"]).exists()


def _agent(environment, node, daemon, *program, **more):
    """Starts torchrun for one of two nodes on this machine."""
    return subprocess.Popen(
        [str(LAUNCH / "torchrun" / "start-elastic"), *map(str, program)],
        env={**environment, "OPTSTATE_NODE": node, "OPTSTATE_ENDPOINT": daemon.shm, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _read_until(agent, pattern) -> re.Match:
    """Reads what an agent prints until a line has the pattern."""
    said = []
    for line in agent.stdout:
        said.append(line)
        found = re.search(pattern, line)
        if found:
            return found
    raise AssertionError("".join(said))


def _run_on_two_nodes(environment, daemons, *program, **more) -> dict[int, tuple[int, int, str]]:
    """Runs start-elastic as two nodes of a rank each, to the end."""
    how = {"NODES": "2", "RANKS": "1", "HEAD": f"127.0.0.1:{free_port()}", **more}
    agents = [
        _agent(environment, f"node{i}", each, *program, **how) for i, each in enumerate(daemons)
    ]
    said = ""
    try:
        for agent in agents:
            said += agent.communicate(timeout=RUN_TIMEOUT_S)[0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], said
    return _said(said)


@pytest.mark.parametrize("program", [(), (KUBERNETES,)], ids=["its own", "of Kubernetes"])
def test_nodes_have_one_job_and_a_new_node_gets_it(program, environment, daemon, job):
    """Every node takes the same steps of a job of one name, and what one has lost it gets back."""
    other = Daemon()
    try:
        daemons = [daemon, other]
        said = _run_on_two_nodes(environment, daemons, *program, STEPS="6")
        assert {rank: each[:2] for rank, each in said.items()} == {0: (0, 6), 1: (0, 6)}
        assert other.jobs() == [job] and job in daemon.jobs()
        other.run_optctl("delete", "job", job)
        said = _run_on_two_nodes(environment, daemons, *program, STEPS="12")
        assert {rank: each[:2] for rank, each in said.items()} == {0: (6, 12), 1: (6, 12)}
        assert said[0][2] == said[1][2]
        steps = [each.optctl("describe", "job", job)["committed_step"] for each in daemons]
        assert len(set(steps)) == 1
    finally:
        other.stop()


def test_a_node_leaves_and_the_state_moves(environment, daemon, job):
    """One of two nodes hands its part over, and torchrun starts the other one's rank again."""
    other = Daemon()
    how = {"NODES": "1:2", "RANKS": "1", "STEPS": "40", "HEAD": f"127.0.0.1:{free_port()}"}
    how["LAST_CALL"] = "15"  # torchrun begins with one node when the other one is not there by then
    program = LAUNCH / "train_sharded.py"
    stays = _agent(environment, "stays", daemon, program, **how)
    leaves = _agent(environment, "leaves", other, program, **how)
    try:
        goes_on = r"rank \d of (\d), process (\d+): goes on at step (\d+)"
        count, process, _ = _read_until(leaves, goes_on).groups()
        assert count == "2"
        os.kill(int(process), signal.SIGUSR1)
        taken = _read_until(leaves, r"handed over at step (\d+)")[1]
        _read_until(stays, rf"rank 0 of 1, process \d+: goes on at step {taken}\b")
        _read_until(stays, rf"rank 0: from step {taken} to 40")
        assert stays.wait(timeout=RUN_TIMEOUT_S) == 0
        # The daemon is shared with other tests, and no parcel of the job is left.
        assert [each for each in daemon.jobs() if f"{each}.".startswith(f"{job}.")] == [job]
        assert other.jobs() == []
        leaves.kill()  # its ranks have ended, and it waits for the other one
    finally:
        for each in (stays, leaves):
            each.terminate()
            try:
                each.wait(timeout=AGENT_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:  # it waits for the other one, and has no ranks
                each.kill()
                each.wait()
            each.stdout.close()
        other.stop()


@pytest.mark.parametrize("script", ["torchrun/start", "torchrun/start-elastic", "with-daemon"])
def test_what_is_lacking_is_said(script, environment):
    environment = {name: value for name, value in environment.items() if name != "RUN"}
    command = [LAUNCH / script, *(["true"] if script == "with-daemon" else [])]
    for name in ("OPTSTATE_ENDPOINT", "SLURM_JOB_ID"):
        environment.pop(name, None)
    if script == "with-daemon" and SYSTEM_SOCKET.exists():
        pytest.skip(f"this machine has a daemon at {SYSTEM_SOCKET}, which is used then")
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "RUN" in done.stderr
    _run([LAUNCH / script, "--help"], environment)


def test_slurm(environment, tmp_path):
    """With stand-ins for Slurm's programs: the daemon's state stays when the trainers fail."""
    if SYSTEM_SOCKET.exists():
        pytest.skip(f"this machine has a daemon at {SYSTEM_SOCKET}, which is used then")
    folder = tmp_path / "bin"
    add_command(folder, "scontrol", '[ "$*" = "show hostnames nodes" ] && echo 127.0.0.1')
    add_command(folder, "srun", '[ "$1" = --kill-on-bad-exit=1 ] && shift\nSLURM_NODEID=0 "$@"')
    del environment["OPTSTATE_ENDPOINT"]
    state = pathlib.Path(f"/dev/shm/optstate-{os.getuid()}-{environment['RUN']}")
    slurm = {
        "SLURM_SUBMIT_DIR": str(LAUNCH.parents[1]),
        "SLURM_JOB_NODELIST": "nodes",
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "7",
        "TMPDIR": str(tmp_path),
    }
    batch = LAUNCH / "slurm" / "train.sbatch"
    fails = tmp_path / "fails.py"
    # It trains, and then fails.
    fails.write_text(
        "import runpy, sys\n"
        f"runpy.run_path({str(LAUNCH / 'train.py')!r}, run_name='__main__')\n"
        "sys.exit(3)\n"
    )
    try:
        done = subprocess.run(
            [str(batch), str(fails)],
            env={**environment, **slurm, "PORT": str(free_port()), "STEPS": "5", "RESTARTS": "0"},
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        assert done.returncode != 0 and state.is_dir(), done.stdout + done.stderr
        assert str(state) in done.stderr
        said = _said(_run([batch], environment, **slurm, STEPS="10"))
        assert {rank: each[:2] for rank, each in said.items()} == {0: (5, 10), 1: (5, 10)}
        assert not state.exists()
    finally:
        shutil.rmtree(state, ignore_errors=True)
