"""The parts of tests/gpu/run: their commands, limits, and how their output is read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import time
import xml.etree.ElementTree
from typing import NamedTuple

# The files of a kit, below its folder as they are below bazel-bin.
FILES = (
    "client/collective/nccl/nccl_device_test",
    "client/ctl/optctl",
    "kernels/cuda/_nvcc/launch/launch.pic.o",
    "kernels/cuda/_nvcc/launch/launch.ptx",
    "kernels/cuda/_nvcc/launch/whole_launch.pic.o",
    "kernels/cuda/_nvcc/launch/whole_launch.ptx",
    "kernels/cuda/device_kernels_test",
    "kernels/cuda/ptx_kernels_test",
    "kernels/cuda/ptx_test",
    "kernels/cuda/sass_test",
    "server/optstated",
    "server/scheduler/executors/device_gradients_test",
    "server/scheduler/executors/device_residents_test",
    "server/scheduler/executors/device_update_executor_test",
    "storage/accelerator/device_suite_test",
    "tests/gpu/device_benchmark",
    "tests/gpu/device_job_test",
)

# The least ratios that a GPU must reach, by the beginnings of their names, and the largest ones.
LEAST = {
    "Update/": 0.9,
    "Copies": 0.9,
    "BesideTorch/": 1.0,
    "BesideMegatron/": 1.5,
}
MOST = {"backward_with_hooks_over_without": 1.03}


class Comparison(NamedTuple):
    """A ratio of a number that two benchmarks have measured."""

    name: str
    number: str
    ours: str
    theirs: str


COMPARISONS = (
    # The two read and write the same bytes.
    Comparison(
        "BesideTorch/AdamW/float32",
        "GB_per_s",
        "Update/AdamW/float32",
        "TorchFused/AdamW/float32",
    ),
    Comparison(
        "BesideMegatron/offload:0.5",
        "tokens_per_s",
        "Training/optstate/offload:0.5/resident",
        "Training/megatron/offload:0.5",
    ),
)

SKIPPED_STATUS = 77  # of device_benchmark


@dataclasses.dataclass
class Value:
    """A measured ratio, and what it was made of."""

    name: str
    ratio: float
    numbers: dict[str, float]
    goal: float | None = None
    is_goal_most: bool = False  # the ratio may be no larger than the goal, else no smaller

    @property
    def is_missed(self) -> bool:
        if self.goal is None:
            return False
        is_met = self.ratio <= self.goal if self.is_goal_most else self.ratio >= self.goal
        return not is_met  # a ratio that is NaN meets none

    def text(self) -> str:
        goal = ""
        if self.goal is not None:
            word = "MISSED" if self.is_missed else "met"
            bound = f"at most {self.goal}" if self.is_goal_most else f"{self.goal}"
            goal = f" (goal {bound}: {word})"
        numbers = "".join(f", {key} {value:.4g}" for key, value in self.numbers.items())
        return f"{self.name}: ratio {self.ratio:.3f}{goal}{numbers}"


@dataclasses.dataclass
class Result:
    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0
    note: str = ""
    values: list[Value] = dataclasses.field(default_factory=list)

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Part:
    """Commands that are read alike, run one after the other in the kit's folder."""

    name: str
    what: str
    limit_s: float
    kind: str  # "gtest", "pytest", "benchmark"
    commands: list[list[str]]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    # Why it cannot run at all; empty: it can.
    why_not: str = ""
    report: pathlib.Path | None = None  # that pytest or the benchmark writes
    has_goals: bool = False  # the speed of an emulated device says nothing


def make_parts(
    kit: pathlib.Path, root: pathlib.Path, python: str, dry_run: bool, scratch: pathlib.Path
) -> list[Part]:
    """The parts, the most important first. Emulated devices may take ten times as long."""
    # The part of a test's name that chooses the device.
    device = "Emulated" if dry_run else "Cuda"
    benchmark = scratch / "benchmark.json"
    speed = ["tests/gpu/device_benchmark", f"--benchmark_out={benchmark}"]
    if dry_run:
        speed += ["--devices=emulated", "--benchmark_min_time=0.001"]
        kernels = ["kernels/cuda/ptx_kernels_test"]
        executor = "-*Cuda*"
    else:
        speed += ["--devices=cuda", "--benchmark_min_time=0.5"]
        kernels = ["kernels/cuda/device_kernels_test"]
        executor = "*Cuda*"
    parts = [
        Part(
            "kernels",
            "every optimizer, dtype and format, the bits of the CPU",
            180,
            "gtest",
            [kernels],
        ),
        Part(
            "runtime",
            "what a device promises",
            90,
            "gtest",
            [["storage/accelerator/device_suite_test", f"--gtest_filter=*{device}*"]],
        ),
        Part(
            "executor",
            "updates that are shared with a device",
            120,
            "gtest",
            [
                [f"server/scheduler/executors/{test}", f"--gtest_filter={executor}"]
                for test in (
                    "device_update_executor_test",
                    "device_residents_test",
                    "device_gradients_test",
                )
            ],
        ),
        Part(
            "job",
            "a daemon's job, its fraction changed live, its engine killed: the bits of the CPU",
            180,
            "gtest",
            [["tests/gpu/device_job_test", f"--gtest_filter=*/{device}"]],
        ),
        Part(
            "nccl",
            "NCCL itself, with one rank",
            60,
            "gtest",
            [["client/collective/nccl/nccl_device_test"]],
            environment=nccl_environment(python),
        ),
        python_part(kit, root, python, dry_run, scratch),
        training_part(kit, root, python, dry_run, scratch),
        Part(
            "speed",
            "update, copies, and updates by both",
            150,
            "benchmark",
            [speed],
            report=benchmark,
            has_goals=not dry_run,
        ),
        Part(
            "code",
            "what nvcc has compiled, read as PTX and as machine code",
            90,
            "gtest",
            [["kernels/cuda/ptx_test"], ["kernels/cuda/sass_test"]],
        ),
    ]
    for part in parts:
        part.limit_s *= 10 if dry_run else 1
    return parts


def python_part(
    kit: pathlib.Path, root: pathlib.Path, python: str, dry_run: bool, scratch: pathlib.Path
) -> Part:
    names = ["test_devices.py"] if dry_run else ["test_cuda.py", "test_cuda_residents.py"]
    tests = [root / "client" / "python" / "tests" / name for name in names]
    report = scratch / "pytest.xml"
    part = Part(
        "python",
        f"PyTorch: {', '.join(names)}",
        180,
        "pytest",
        [
            [
                python,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--junitxml={report}",
                *map(str, tests),
            ]
        ],
        environment=python_environment(kit),
        report=report,
        has_goals=not dry_run,
    )
    if not (kit / "python" / "optstate").is_dir():
        part.why_not = "the kit has no Python package"
    elif missing := [test for test in tests if not test.exists()]:
        part.why_not = f"there is no {missing[0]}"
    else:
        part.why_not = why_no_torch(python, dry_run)
    return part


def training_part(
    kit: pathlib.Path, root: pathlib.Path, python: str, dry_run: bool, scratch: pathlib.Path
) -> Part:
    report = scratch / "training.json"
    command = [python, str(root / "tests/gpu/training_benchmark.py"), f"--out={report}"]
    if dry_run:
        command += ["--tiny", "--rounds=1", "--steps=1"]
    part = Part(
        "training",
        "tokens a second of a GPT, and device memory",
        180,
        "benchmark",
        [command],
        environment=python_environment(kit),
        report=report,
        has_goals=not dry_run,
    )
    if not (kit / "python" / "optstate").is_dir():
        part.why_not = "the kit has no Python package"
    else:
        part.why_not = why_no_torch(python, dry_run)
    return part


def python_environment(kit: pathlib.Path) -> dict[str, str]:
    # Packages beside the kit, such as Megatron, are found too.
    paths = [str(kit / "python"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def nccl_environment(python: str) -> dict[str, str]:
    """NCCL of the packages that torch needs; without them the system's is looked for."""
    asks = "import nvidia.nccl; print(next(iter(nvidia.nccl.__path__)))"
    ran = subprocess.run([python, "-c", asks], capture_output=True, text=True, check=False)
    library = pathlib.Path(ran.stdout.strip()) / "lib" / "libnccl.so.2"
    if ran.returncode or not library.exists():
        return {}
    return {"OPTSTATE_NCCL_LIBRARY": str(library)}


def why_no_torch(python: str, dry_run: bool) -> str:
    asks = "import pytest, torch"
    if not dry_run:
        asks += "; assert torch.cuda.is_available(), 'torch finds no CUDA device'"
    ran = subprocess.run([python, "-c", asks], capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        return ""
    lines = ran.stderr.strip().splitlines()
    return f"{python}: {lines[-1] if lines else 'does not run'}"


def run_part(part: Part, kit: pathlib.Path, logs: pathlib.Path, left_s: float) -> Result:
    """Runs a part within its limit and what is left of the whole; never raises for what it runs."""
    result = Result(part.name)
    missing = [
        command[0]
        for command in part.commands
        if not command[0].startswith("/") and not (kit / command[0]).exists()
    ]
    if part.why_not:
        result.skipped, result.note = 1, part.why_not
    elif missing:
        result.failed, result.note = 1, f"the kit lacks {', '.join(missing)}"
    elif left_s < 5:
        result.skipped, result.note = 1, "no time is left"
    if result.note:
        return result
    begin = time.monotonic()
    until = begin + min(part.limit_s, left_s)
    log = logs / f"{part.name}.log"
    with log.open("w") as output:
        for command in part.commands:
            start = output.tell()
            status = run_command(command, part, kit, output, until)
            with log.open(errors="replace") as text:
                text.seek(start)
                read_output(part, status, text.read(), result)
    result.seconds = time.monotonic() - begin
    return result


def run_command(
    command: list[str], part: Part, kit: pathlib.Path, output, until: float
) -> int | None:
    """Returns the exit status; None: it took too long and was killed, with its children."""
    program = command[0] if command[0].startswith("/") else str(kit / command[0])
    output.write(f"$ {' '.join(command)}\n")
    output.flush()
    environment = dict(os.environ, **part.environment)
    libraries = [str(kit / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in libraries if path)
    # Tests make daemons and sockets, whose paths have to be short.
    environment.pop("TEST_TMPDIR", None)
    # Bazel's report is that of dry_run_test, not of a program that it runs.
    environment.pop("XML_OUTPUT_FILE", None)
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            cwd=kit,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        output.write(f"{error}\n")
        output.flush()
        return 127
    try:
        status: int | None = process.wait(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        status = None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    output.seek(0, os.SEEK_END)
    return status


def read_output(part: Part, status: int | None, text: str, result: Result) -> None:
    before = result.failed
    ran = result.passed + result.failed + result.skipped
    {"gtest": read_gtest, "pytest": read_pytest, "benchmark": read_benchmark}[part.kind](
        part, status, text, result
    )
    if status is None:
        result.failed += 1
        result.note = "took too long and was killed"
    elif status < 0:
        result.failed += 1
        result.note = f"ended by signal {-status}"
    elif status not in (0, SKIPPED_STATUS) and result.failed == before:
        result.failed += 1
        result.note = f"exit status {status}"
    elif result.passed + result.failed + result.skipped == ran:
        result.failed += 1
        result.note = "no test ran"


def read_gtest(part: Part, status: int | None, text: str, result: Result) -> None:
    del part, status
    result.passed += len(re.findall(r"^\[       OK \] ", text, re.M))
    skipped = len(re.findall(r"^\[  SKIPPED \] .* \(\d+ ms\)$", text, re.M))
    failures = re.findall(r"^\[  FAILED  \] ([^\s,]+).* \(\d+ ms\)$", text, re.M)
    result.skipped += skipped
    result.failed += len(failures)
    if failures:
        result.note = f"first failure: {failures[0]}"
    elif skipped and not result.failed:
        reason = re.search(r": Skipped\n(.*)", text)
        result.note = f"skipped: {reason.group(1)}" if reason else "skipped"


def value_of(part: Part, name: str, ratio: float, numbers: dict[str, float]) -> Value:
    """Returns the value with its goal, if the part has goals and the name has one."""
    for goals, is_most in ((LEAST, False), (MOST, True)):
        for start, goal in goals.items():
            if part.has_goals and name.startswith(start):
                return Value(name, ratio, numbers, goal, is_most)
    return Value(name, ratio, numbers)


def compare(part: Part, results: list[Result]) -> None:
    """Adds to the last result, of this part, the comparisons that it has made possible."""
    values = {value.name: value for result in results for value in result.values}
    for name, number, *sides in COMPARISONS:
        if name in values or not set(sides) <= values.keys():
            continue
        ours, theirs = (values[side].numbers.get(number, math.nan) for side in sides)
        ratio = ours / theirs if theirs else math.nan
        results[-1].values.append(value_of(part, name, ratio, {}))


def read_pytest(part: Part, status: int | None, text: str, result: Result) -> None:
    del status, text
    if part.report is None or not part.report.exists():
        return
    for case in xml.etree.ElementTree.parse(part.report).iter("testcase"):
        kinds = {child.tag for child in case}
        for measured in case.iter("property"):
            name = measured.get("name", "")
            if name.endswith("_over_without"):
                ratio = float(measured.get("value", "nan"))
                result.values.append(value_of(part, name, ratio, {}))
        if kinds & {"failure", "error"}:
            result.failed += 1
            result.note = f"first failure: {case.get('name')}" if not result.note else result.note
        elif "skipped" in kinds:
            result.skipped += 1
        else:
            result.passed += 1


def read_benchmark(part: Part, status: int | None, text: str, result: Result) -> None:
    if status == SKIPPED_STATUS:
        result.skipped += 1
        reason = re.search(r"^skipped: (.*)", text, re.M)
        result.note = reason.group(0) if reason else "skipped"
        return
    if part.report is None or not part.report.exists():
        return
    try:
        measured = json.loads(part.report.read_text())["benchmarks"]
    except (ValueError, KeyError):
        return  # it was killed in the middle
    known = {"real_time", "cpu_time", "iterations", "repetitions", "threads", "ratio"}
    for one in measured:
        name = one["name"].removesuffix("/real_time")
        numbers = {
            key: value
            for key, value in one.items()
            if isinstance(value, float) and key not in known
        }
        result.passed += 1
        result.values.append(value_of(part, name, one.get("ratio", 0.0), numbers))
