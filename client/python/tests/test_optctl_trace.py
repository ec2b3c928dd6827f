"""optctl trace: what the traces of real jobs show, read by Python's own parser of JSON."""

from __future__ import annotations

import decimal
import json
import pathlib
import signal
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import optstate
import pytest
import torch
from daemon import Daemon, program, start_daemon_with_disks
from training import bits, small_model, train

PATIENCE_S = 60


class Span(NamedTuple):
    """A span of a trace; times are in nanoseconds."""

    group: str
    lane: str
    name: str
    begin: int
    duration: int
    step: int
    bytes: int


class Trace:
    """A trace file. Reading it fails unless it is JSON of the right form."""

    def __init__(self, path: pathlib.Path) -> None:
        trace = json.loads(path.read_text(), parse_float=decimal.Decimal)
        self.other = trace["otherData"]
        self.spans: list[Span] = []
        groups: dict[int, str] = {}
        lanes: dict[tuple[int, int], str] = {}
        for event in trace["traceEvents"]:
            place = (event["pid"], event["tid"])
            if event["ph"] == "M":
                if event["name"] == "process_name":
                    groups[event["pid"]] = event["args"]["name"]
                elif event["name"] == "thread_name":
                    lanes[place] = event["args"]["name"]
                continue
            assert event["ph"] == "X" and event["cat"] == groups[event["pid"]]
            self.spans.append(
                Span(
                    group=event["cat"],
                    lane=lanes[place],
                    name=event["name"],
                    begin=int(event["ts"] * 1000),
                    duration=int(event["dur"] * 1000),
                    step=event["args"].get("step", 0),
                    bytes=event["args"].get("bytes", 0),
                )
            )

    def of(self, group: str, name: str) -> list[Span]:
        return [span for span in self.spans if span.group == group and span.name == name]

    def lanes(self, group: str) -> set[str]:
        return {span.lane for span in self.spans if span.group == group}

    def check_lanes(self) -> None:
        """No two spans of a lane overlap, and nothing was lost."""
        assert self.other["lost_spans"] == 0
        by_lane: dict[tuple[str, str], list[Span]] = {}
        for span in self.spans:
            by_lane.setdefault((span.group, span.lane), []).append(span)
        for spans in by_lane.values():
            spans.sort(key=lambda span: (span.begin, span.duration))
            for one, other in zip(spans, spans[1:]):
                assert one.begin + one.duration <= other.begin, (one, other)


class Tracing:
    """optctl trace in a process of its own."""

    def __init__(self, daemon: Daemon, job: str, path: pathlib.Path, steps: int) -> None:
        command = [program("optctl"), "--endpoint", daemon.shm, "trace", job]
        command += ["--steps", str(steps), "-o", str(path)]
        self.path = path
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def has_begun(self) -> bool:
        return self.path.exists() and "traceEvents" in self.path.read_text()

    def end(self) -> tuple[int, str]:
        """Waits for the end; returns the exit status and what was said."""
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said


def trace_of(
    daemon: Daemon, job: str, path: pathlib.Path, step: Callable[[], None], steps: int
) -> Trace:
    """Takes steps until a trace of so many of them is over."""
    tracing = Tracing(daemon, job, path, steps)
    try:
        while tracing.process.poll() is None:
            step()
    finally:
        tracing.process.kill()
    status, said = tracing.end()
    assert status == 0, said
    assert f"traced job {job}: {steps} of {steps} steps" in said
    return Trace(path)


class Trainer:
    """A model that takes one step after the other."""

    def __init__(self, model: torch.nn.Module, daemon: Daemon, job: str, **options: object) -> None:
        self.model = model
        self.optimizer = optstate.AdamW(
            model.parameters(), lr=1e-2, job=job, model=model, endpoint=daemon.shm, **options
        )
        self.steps = 0

    def step(self) -> None:
        train(self.model, self.optimizer, [self.steps])
        self.steps += 1


def test_a_job_in_memory(own_daemon, job, tmp_path):
    trainer = Trainer(small_model(), own_daemon, job)
    trace = trace_of(own_daemon, job, tmp_path / "trace.json", trainer.step, steps=5)
    trace.check_lanes()
    assert trace.other["job"] == job and trace.other["complete"] is True
    steps = {span.step for span in trace.of("steps", "update")}
    assert len(steps) == 5 and steps == set(range(min(steps), min(steps) + 5))
    for name in ("staging", "decide", "update", "publish"):
        assert {span.step for span in trace.of("steps", name)} == steps, name
    assert trace.lanes("ranks") == {"rank 0"}
    assert {span.step for span in trace.of("ranks", "push")} == steps
    pushed = sum(parameter.numel() for parameter in trainer.model.parameters()) * 4
    assert sum(span.bytes for span in trace.of("ranks", "push")) == 5 * pushed
    assert "worker 0" in trace.lanes("workers")
    # Spans of workers in an update lie within it.
    for span in trace.of("workers", "update"):
        (update,) = [each for each in trace.of("steps", "update") if each.step == span.step]
        assert update.begin <= span.begin
        assert span.begin + span.duration <= update.begin + update.duration

    plain = Trainer(small_model(), own_daemon, f"{job}-plain")
    while plain.steps < trainer.steps:
        plain.step()
    assert bits(plain.model.parameters()) == bits(trainer.model.parameters())


def test_the_update_takes_what_the_daemon_says(own_daemon, job, tmp_path):
    """The daemon's times are means of the last 16 steps, which the trace has all."""
    trainer = Trainer(small_model(), own_daemon, job)
    tracing = Tracing(own_daemon, job, tmp_path / "trace.json", 16)
    try:
        while not tracing.has_begun():
            assert tracing.process.poll() is None, tracing.end()
        for _ in range(16):
            trainer.step()
        assert tracing.end()[0] == 0
    finally:
        tracing.process.kill()
    trace = Trace(tracing.path)
    mean = own_daemon.optctl("describe", "job", job)["mean_step_times"]
    assert mean["steps"] == 16
    for phase in ("update", "decide", "publish"):
        total = sum(span.duration for span in trace.of("steps", phase))
        assert 0 <= total - 16 * int(mean[f"{phase}_ns"]) < 16, phase


def test_a_job_on_disks(job, tmp_path):
    daemon = start_daemon_with_disks(tmp_path, "fast", "slow")
    try:
        options = {"placement": "nvme", "sub_group_size": 4096, "durability": "step"}
        model = torch.nn.Sequential(torch.nn.Linear(8, 4000), torch.nn.Linear(4000, 4))
        trainer = Trainer(model, daemon, job, **options)
        trainer.step()
        trace = trace_of(daemon, job, tmp_path / "trace.json", trainer.step, steps=4)
    finally:
        daemon.stop()
    trace.check_lanes()
    for kind, name in (("reads", "read"), ("writes", "write"), ("syncs", "sync")):
        for directory in ("fast", "slow"):
            lane = f"{kind} of {tmp_path / directory}"
            # Requests that were under way at the same time have lanes beside it.
            spans = [span for span in trace.of("disks", name) if span.lane.startswith(lane)]
            assert spans, lane
            assert all((span.bytes > 0) == (name != "sync") for span in spans), lane
    assert all(" of " in lane for lane in trace.lanes("disks"))


def test_a_job_on_devices(job, tmp_path):
    daemon = Daemon("--devices", "emulated:2")
    try:
        model = torch.nn.Sequential(torch.nn.Linear(8, 40000), torch.nn.Linear(40000, 4))
        trainer = Trainer(model, daemon, job, offload_fraction=0.0)
        trace = trace_of(daemon, job, tmp_path / "trace.json", trainer.step, steps=3)
    finally:
        daemon.stop()
    trace.check_lanes()
    steps = {span.step for span in trace.of("steps", "update")}
    for name in ("to device", "kernel", "from device"):
        spans = [*trace.of("device 0", name), *trace.of("device 1", name)]
        assert {span.step for span in spans} == steps, name
        assert all((span.bytes > 0) == (name != "kernel") for span in spans), name
    # Each kernel comes between the copies of its batch.
    copies = zip(
        trace.of("device 0", "to device"),
        trace.of("device 0", "kernel"),
        trace.of("device 0", "from device"),
    )
    for to_device, kernel, from_device in copies:
        assert to_device.begin + to_device.duration == kernel.begin
        assert kernel.begin + kernel.duration == from_device.begin


@pytest.mark.parametrize("how", ["interrupt", "daemon"])
def test_a_trace_that_is_cut_can_be_read(own_daemon, job, tmp_path, how):
    trainer = Trainer(small_model(), own_daemon, job)
    tracing = Tracing(own_daemon, job, tmp_path / "trace.json", 1000)
    try:
        while not tracing.has_begun():
            assert tracing.process.poll() is None, tracing.end()
        trainer.step()
        while '"publish"' not in tracing.path.read_text():
            assert tracing.process.poll() is None, tracing.end()
        if how == "interrupt":
            tracing.process.send_signal(signal.SIGINT)
        else:
            own_daemon.kill()
        status, said = tracing.end()
    finally:
        tracing.process.kill()
    assert status == (7 if how == "interrupt" else 5), said
    trace = Trace(tracing.path)
    assert trace.other["complete"] is False
    assert {span.step for span in trace.of("steps", "update")} == {1}
    if how == "daemon":
        own_daemon.start()
    trainer.step()  # nothing has happened to the job
