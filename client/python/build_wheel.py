"""Packs the optstate wheel: Python files, liboptstate.so, optstated and optctl.

There is nothing to compile for a Python version, so the wheel is py3-none and
this needs the standard library alone. Equal input gives equal bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import pathlib
import re
import sys
import zipfile

import tomllib

_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the earliest that zip knows
_FILE, _PROGRAM = 0o100644, 0o100755


def header_version(header: str) -> str:
    """kVersion of proto/types/version.h, the one place that says it."""
    found = re.search(r'\bkVersion\s*=\s*"([^"]+)"', header)
    if found is None:
        raise SystemExit("no kVersion in the version header")
    return found[1]


def metadata(project: dict, version: str, readme: str) -> str:
    """The METADATA file: core metadata 2.4."""
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {version}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        f"Requires-Python: {project['requires-python']}",
        *(f"Classifier: {classifier}" for classifier in project["classifiers"]),
    ]
    for extra, requirements in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {each}; extra == '{extra}'" for each in requirements]
    lines += ["Description-Content-Type: text/markdown", "", readme]
    return "\n".join(lines)


def wheel_tags(platform: str) -> str:
    return (
        "Wheel-Version: 1.0\n"
        "Generator: optstate\n"
        "Root-Is-Purelib: false\n"
        f"Tag: py3-none-{platform}\n"
    )


def name_in_package(path: pathlib.Path, package: pathlib.Path) -> str:
    """Returns a file's place in the package: built files have no folder, and lie on top."""
    if package in path.parents:
        return path.relative_to(package).as_posix()
    return path.name


def entry_points(project: dict) -> str:
    scripts = [f"{name} = {target}\n" for name, target in project["scripts"].items()]
    return "[console_scripts]\n" + "".join(scripts)


class Wheel:
    """A wheel being written; close() adds RECORD."""

    def __init__(self, path: pathlib.Path, info: str) -> None:
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6)
        self._record = f"{info}/RECORD"
        self._rows: list[str] = []

    def add(self, name: str, data: bytes, mode: int = _FILE) -> None:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self._rows.append(f"{name},sha256={digest},{len(data)}\n")
        self._write(name, data, mode)

    def _write(self, name: str, data: bytes, mode: int) -> None:
        entry = zipfile.ZipInfo(name, _TIMESTAMP)
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.external_attr = mode << 16
        self._zip.writestr(entry, data)

    def close(self) -> None:
        self._rows.append(f"{self._record},,\n")
        self._write(self._record, "".join(self._rows).encode(), _FILE)
        self._zip.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("output", "pyproject", "readme", "license", "version-header"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--platform", required=True, help="wheel platform tag")
    parser.add_argument("--package", type=pathlib.Path, required=True, help="its source folder")
    parser.add_argument("--program", type=pathlib.Path, action="append", default=[])
    parser.add_argument("files", type=pathlib.Path, nargs="+", help="files of the package")
    arguments = parser.parse_args()

    # The encoding is that of the files, whatever the locale has.
    project = tomllib.loads(arguments.pyproject.read_text("utf-8"))["project"]
    version = header_version(arguments.version_header.read_text("utf-8"))
    expected = f"{project['name']}-{version}-py3-none-{arguments.platform}.whl"
    if arguments.output.name != expected:
        sys.exit(
            f"the wheel is {arguments.output.name} in client/python/BUILD.bazel, but by"
            f" {arguments.version_header} it is {expected}"
        )
    info = f"{project['name']}-{version}.dist-info"
    wheel = Wheel(arguments.output, info)
    names = {name_in_package(path, arguments.package): path for path in arguments.files}
    if len(names) != len(arguments.files):
        sys.exit("two files have one name in the package")
    for name, path in sorted(names.items()):
        wheel.add(f"{project['name']}/{name}", path.read_bytes())
    for path in sorted(arguments.program, key=lambda path: path.name):
        wheel.add(f"{project['name']}/{path.name}", path.read_bytes(), _PROGRAM)
    readme = arguments.readme.read_text("utf-8")
    wheel.add(f"{info}/METADATA", metadata(project, version, readme).encode())
    wheel.add(f"{info}/WHEEL", wheel_tags(arguments.platform).encode())
    wheel.add(f"{info}/entry_points.txt", entry_points(project).encode())
    wheel.add(f"{info}/licenses/LICENSE", arguments.license.read_bytes())
    wheel.close()


if __name__ == "__main__":
    main()
