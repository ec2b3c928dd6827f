"""Runs every test and benchmark that needs a GPU, the most important first; see README.md.

Needs Python 3.9 or later and no package. The last line printed is "N passed, N failed, N skipped";
the exit status is 1 when something failed, 2 when nothing can run here.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

import gpu_parts
import gpu_plot
from gpu_parts import Part, Result

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Early versions of Python 3.9 and later lack them.
HAS_FILTERS = hasattr(tarfile, "data_filter")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run",
        description="Runs what needs a GPU: parity of the kernels, devices, executor, jobs on a "
        "daemon, Python, speed. Without --kit it builds the programs with Bazel.",
    )
    parser.add_argument("--kit", help="what tests/gpu/build has made, or a folder with its files")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="needs no GPU: emulated devices, and an interpreter for the compiled kernels",
    )
    parser.add_argument("--only", help="parts by name, with commas between", default="")
    parser.add_argument(
        "--limit-s", type=float, default=570, help="for the whole run; each part has a limit too"
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch")
    parser.add_argument(
        "--out",
        default=os.environ.get("OUT", "gpu-results"),
        help="a folder for results.json and logs; else $OUT, or gpu-results",
    )
    parser.add_argument("--list-files", action="store_true", help="the files of a kit")
    return parser.parse_args()


def first_line(command: list[str]) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip().splitlines()[0] if ran.stdout.strip() else ""


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def describe_machine() -> dict[str, str]:
    """Returns facts about machine, driver and device; "none" for what is not there."""
    query = "name,memory.total,driver_version,compute_cap,pcie.link.gen.max,pcie.link.width.max"
    driver = pathlib.Path("/proc/driver/nvidia/version")
    return {
        "cpu": f"{os.cpu_count()} x {cpu_name()}",
        "memory": f"{memory_gib():.0f} GiB",
        "kernel": platform.release(),
        "glibc": os.confstr("CS_GNU_LIBC_VERSION") or "none",
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "none",
        "device": first_line(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
        or "none",
    }


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def why_not_here(kit: pathlib.Path) -> str:
    """Why the kit's programs do not start here; empty: they do."""
    if platform.machine() != "x86_64":
        return f"the programs are for x86_64, this is {platform.machine()}"
    needs = kit / "glibc"
    if not needs.exists():
        return ""
    needed = needs.read_text().strip()
    have = os.confstr("CS_GNU_LIBC_VERSION") or ""
    if version_of(have) < version_of(needed):
        return f"the programs need glibc {needed} or later, here is {have or 'another C library'}"
    return ""


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> None:
    with tarfile.open(archive) as kit:
        options = {"filter": "data"} if HAS_FILTERS else {}
        kit.extractall(folder, **options)
    # A program that comes from a wheel has lost its mode.
    for path in folder.rglob("*"):
        if path.is_file() and path.read_bytes()[:4] == b"\x7fELF":
            path.chmod(0o755)
    # The programs of the Python package are the daemon and the operator's tool.
    for program, place in (("optstated", "server"), ("optctl", "client/ctl")):
        packed = folder / "python" / "optstate" / program
        if packed.exists() and not (folder / place / program).exists():
            (folder / place).mkdir(parents=True, exist_ok=True)
            (folder / place / program).symlink_to(packed)


def find_kit(arguments: argparse.Namespace, scratch: pathlib.Path) -> pathlib.Path:
    if arguments.kit is None:
        if shutil.which("bazel") is None:
            sys.exit(
                "tests/gpu/run: there is no bazel; make a kit with tests/gpu/build, give --kit"
            )
        subprocess.run(["bazel", "build", "//tests/gpu:programs"], cwd=ROOT, check=True)
        return ROOT / "bazel-bin"
    kit = pathlib.Path(arguments.kit).resolve()
    if kit.is_dir():
        return kit
    if not kit.exists():
        sys.exit(f"tests/gpu/run: there is no {kit}")
    unpack(kit, scratch / "kit")
    return scratch / "kit"


def print_table(results: list[Result]) -> None:
    print(f"\n{'PART':<10} {'PASSED':>6} {'FAILED':>6} {'SKIPPED':>7} {'SECONDS':>7}  NOTE")
    for one in results:
        print(
            f"{one.name:<10} {one.passed:>6} {one.failed:>6} {one.skipped:>7} {one.seconds:>7.1f}"
            f"  {one.note}"
        )
        for value in one.values:
            print(f"{'':<10}   {value.text()}")


def main() -> int:
    arguments = parse_arguments()
    if arguments.list_files:
        print("\n".join(gpu_parts.FILES))
        return 0
    begin = time.monotonic()
    machine = describe_machine()
    for key, value in machine.items():
        print(f"{key + ':':<8} {value}")
    out = pathlib.Path(arguments.out).resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="gpu-run-") as scratch:
        kit = find_kit(arguments, pathlib.Path(scratch))
        if why := why_not_here(kit):
            print(f"tests/gpu/run: {why}", file=sys.stderr)
            return 2
        parts: list[Part] = gpu_parts.make_parts(
            kit, ROOT, arguments.python, arguments.dry_run, pathlib.Path(scratch)
        )
        wanted = [name for name in arguments.only.split(",") if name]
        if unknown := set(wanted) - {part.name for part in parts}:
            sys.exit(f"tests/gpu/run: there is no part {', '.join(sorted(unknown))}")
        for part in parts:
            if wanted and part.name not in wanted:
                continue
            left_s = arguments.limit_s - (time.monotonic() - begin)
            print(f"== {part.name}: {part.what}", flush=True)
            result = gpu_parts.run_part(part, kit, out / "logs", left_s)
            print(
                f"   {result.passed} passed, {result.failed} failed, {result.skipped} skipped"
                f"{': ' + result.note if result.note else ''}",
                flush=True,
            )
            results.append(result)
            gpu_parts.compare(part, results)
            # Whatever comes after, this is kept.
            (out / "results.json").write_text(
                json.dumps(
                    {
                        "machine": machine,
                        "dry_run": arguments.dry_run,
                        "parts": [one.as_dict() for one in results],
                    },
                    indent=2,
                )
            )
    print_table(results)
    plot = out / "plot.svg"
    shown = dict(machine, device="emulated") if arguments.dry_run else machine
    gpu_plot.write_plot(results, shown, plot)
    if plot.exists():
        print(f"plot: {plot}")
    failed = sum(one.failed for one in results)
    print(f"results: {out}/results.json, {out}/logs")
    print(
        f"{sum(one.passed for one in results)} passed, {failed} failed, "
        f"{sum(one.skipped for one in results)} skipped"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
