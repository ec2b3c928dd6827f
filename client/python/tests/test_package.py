"""The wheel: what is in it, that it runs from pip alone, and that it is light."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import venv

import optstate
import pytest
from optstate import _native

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]


def installed_from_wheel() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("optstate")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("optstate runs from its source folder")


def test_one_version_everywhere():
    header = (REPOSITORY / "proto/types/version.h").read_text()
    version = re.search(r'kVersion\s*=\s*"([^"]+)"', header)[1]
    assert optstate.__version__ == version
    assert installed_from_wheel().version == version


def test_a_wheel_does_not_depend_on_who_packs_it(tmp_path):
    """Another folder, encoding, umask and order of the files: equal bytes."""
    source = REPOSITORY / "client/python"
    wheels = []
    for side, locale in (("one", "C.UTF-8"), ("another", "POSIX")):
        folder = tmp_path / side
        package = folder / "optstate"
        package.mkdir(parents=True, mode=0o755 if side == "one" else 0o700)
        files = [package / name for name in ("__init__.py", "inner.py")] + [folder / "optstated"]
        for file in files if side == "one" else reversed(files):
            file.write_text(f"# {file.name}\n")
            file.chmod(0o644 if side == "one" else 0o700)
            os.utime(file, (len(wheels), len(wheels)))
        wheel = folder / f"optstate-{optstate.__version__}-py3-none-any.whl"
        command = [sys.executable, source / "build_wheel.py", "--output", wheel]
        command += ["--platform", "any", "--pyproject", source / "pyproject.toml"]
        command += ["--readme", source / "README.md", "--license", REPOSITORY / "LICENSE"]
        command += ["--version-header", REPOSITORY / "proto/types/version.h"]
        command += ["--package", package, "--program", files.pop()]
        command += files if side == "one" else reversed(files)
        environment = os.environ | {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        subprocess.run(command, check=True, env=environment)
        wheels.append(wheel.read_bytes())
    assert wheels[0] == wheels[1]


def test_importing_it_imports_no_torch():
    code = (
        "import optstate, sys; optstate.InvalidArgumentError; optstate.__version__;"
        "assert 'torch' not in sys.modules; assert 'AdamW' in dir(optstate);"
        "from optstate import AdamW; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_library_is_named(tmp_path):
    code = (
        "import optstate, torch\n"
        "try: optstate.AdamW([torch.zeros(1)])\n"
        "except optstate.UnavailableError as error: assert 'nothing.so' in str(error), error\n"
        "else: raise SystemExit('no error')"
    )
    environment = {**os.environ, "OPTSTATE_LIBRARY": str(tmp_path / "nothing.so")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_commands_are_there(tmp_path):
    """pip install of the wheel's files alone gives optstated and optctl."""
    distribution = installed_from_wheel()
    scripts = {entry.name for entry in distribution.entry_points}
    assert scripts == {"optstated", "optctl"}
    # An environment without torch that sees this installation.
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    site = pathlib.Path(optstate.__file__).parents[1]
    for script, flag in (("optctl", "--help"), ("optstated", "--help")):
        code = (
            f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv = [{script!r}, {flag!r}];"
            f"from optstate._scripts import {script}; {script}()"
        )
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert script in done.stdout


def test_structs_have_the_sizes_of_the_header(tmp_path):
    """The C compiler's sizes and offsets, where there is a compiler."""
    import ctypes
    import shutil

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    structs = {
        "optstate_parameter": _native.Parameter,
        "optstate_group": _native.Group,
        "optstate_session_options": _native.SessionOptions,
        "optstate_job_access": _native.JobAccess,
        "optstate_outcome": _native.Outcome,
        "optstate_session_info": _native.SessionInfo,
        "optstate_piece": _native.PieceWithGradient,
        "optstate_hyperparams": _native.Hyperparams,
        "optstate_commit_options": _native.CommitOptions,
        "optstate_device_range": _native.DeviceRange,
        "optstate_sleep_progress": _native.SleepProgress,
        "optstate_sleep_options": _native.SleepOptions,
        "optstate_sleep_result": _native.SleepResult,
    }
    checks = []
    for name, structure in structs.items():
        checks.append(f"_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, {name!r});")
        for field in (
            each[0] for base in structure.__mro__ for each in vars(base).get("_fields_", ())
        ):
            offset = getattr(structure, field).offset
            checks.append(f"_Static_assert(offsetof({name}, {field}) == {offset}, {name!r});")
    source = tmp_path / "check.c"
    include = '#include "client/c_api_access.h"\n#include "client/c_api_devices.h"\n'
    include += '#include "client/c_api_sleep.h"\n'  # which includes the others
    source.write_text(include + "\n".join(checks).replace("'", '"') + "\n")
    subprocess.run([compiler, "-fsyntax-only", f"-I{REPOSITORY}", source], check=True)
