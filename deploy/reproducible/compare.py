"""Compares two folders of packages byte by byte, and names the first file in them that differs.

Usage: compare.py FIRST SECOND [--absent TEXT]...

A package that differs is unpacked, and what is in it too, down to the file: a Debian package, a
wheel, an OCI image as a folder, and tar, zip, gzip, xz and ar files inside them. --absent: no file,
unpacked, may have this text in it, such as the folder in which it was built. Exit status 1:
something differs, which is said.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import io
import json
import lzma
import pathlib
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence

_AR = b"!<arch>\n"
_GZIP = b"\x1f\x8b"
_XZ = b"\xfd7zXZ\x00"
_ZIP = b"PK\x03\x04"
# Bytes that are shown of a file that differs, from the first other one on, and some before it.
_SHOWN, _SHOWN_BEFORE = 32, 16


@dataclasses.dataclass(frozen=True)
class Part:
    """A file in an archive. Its `facts` are what the archive says of it: time, mode, owner."""

    name: str
    facts: str
    data: bytes


def parts_of(data: bytes) -> list[Part] | None:
    """Returns the parts of an archive in their order, or None: it is none."""
    if data.startswith(_GZIP):
        # The time, flags for speed, and the system that packed it.
        return [Part("(gunzipped)", data[3:10].hex(), gzip.decompress(data))]
    if data.startswith(_XZ):
        return [Part("(unxzed)", "", lzma.decompress(data))]
    if data.startswith(_AR):
        # A Debian package's control files have the digests of the others, so the others come first.
        return sorted(_parts_of_ar(data), key=lambda part: part.name.startswith("control.tar"))
    if data.startswith(_ZIP):
        return list(_parts_of_zip(data))
    if data[257:262] == b"ustar":
        return list(_parts_of_tar(data))
    return None


def _parts_of_ar(data: bytes) -> Iterator[Part]:
    at, long_names = len(_AR), b""
    while at < len(data):
        header = data[at : at + 60]
        size = int(header[48:58])
        part = data[at + 60 : at + 60 + size]
        name = header[:16].decode("ascii", "replace").rstrip()
        if name == "//":
            long_names = part
        elif name[1:].isdigit():  # where its name begins in the table of long ones
            name = long_names[int(name[1:]) :].partition(b"/\n")[0].decode("utf-8", "replace")
        facts = header[16:48].decode("ascii", "replace")
        yield Part(name.rstrip("/") or f"({name})", " ".join(facts.split()), part)
        at += 60 + size + size % 2


def _parts_of_zip(data: bytes) -> Iterator[Part]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            facts = f"time {entry.date_time}, mode {entry.external_attr >> 16:o}"
            facts += f", system {entry.create_system}"
            yield Part(entry.filename, facts, archive.read(entry))


def _parts_of_tar(data: bytes) -> Iterator[Part]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for entry in archive:
            file = archive.extractfile(entry) if entry.isreg() else None
            facts = f"type {entry.type.decode('ascii')}, mode {entry.mode:o}, time {entry.mtime}"
            facts += f", owner {entry.uid}:{entry.gid} {entry.uname}:{entry.gname}"
            facts += f", link to {entry.linkname!r}"
            yield Part(entry.name, facts, file.read() if file else b"")


def difference(where: str, first: bytes, second: bytes) -> str | None:
    """Returns where two files first differ, down to the innermost file; None: they are equal."""
    if first == second:
        return None
    parts = parts_of(first), parts_of(second)
    if None in parts:
        return _difference_of_bytes(where, first, second)
    return difference_of_parts(where, *parts) or (
        f"{where}: equal files in it, and other bytes around them: the compression, or its settings"
    )


def difference_of_parts(where: str, first: Sequence[Part], second: Sequence[Part]) -> str | None:
    """Returns where two archives first differ: in their files' order, facts or bytes."""
    names = [part.name for part in first], [part.name for part in second]
    if sorted(names[0]) != sorted(names[1]):
        for side, own, others in (("first", *names), ("second", *reversed(names))):
            alone = [name for name in own if name not in others]
            if alone:
                return f"{where}: {alone[0]}: is in the {side} alone"
    for one, other in zip(first, second):
        if one.name != other.name:
            return f"{where}: the order: {one.name} in the first, {other.name} in the second"
        if one.facts != other.facts:
            return f"{where}: {one.name}: {one.facts} in the first, {other.facts} in the second"
        found = difference(f"{where}: {one.name}", one.data, other.data)
        if found:
            return found
    return None


def _difference_of_bytes(where: str, first: bytes, second: bytes) -> str:
    pairs = enumerate(zip(first, second))
    at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    begin = max(0, at - _SHOWN_BEFORE)
    shown = [each[begin : at + _SHOWN] for each in (first, second)]
    return (
        f"{where}: byte {at} of {len(first)} in the first and {len(second)} in the second:\n"
        f"  first:  {shown[0]!r}\n  second: {shown[1]!r}"
    )


def image_parts(folder: pathlib.Path) -> list[Part]:
    """The blobs of an OCI image by what they are, because their names are their digests.

    A layer comes before what has its digest, and so before all that differs because of it.
    """
    index = json.loads((folder / "index.json").read_bytes())
    known = set()

    def blob(descriptor: dict) -> bytes:
        path = folder / "blobs" / descriptor["digest"].replace(":", "/")
        known.add(path)
        return path.read_bytes()

    parts = []
    for number, entry in enumerate(index["manifests"]):
        manifest = json.loads(blob(entry))
        for layer, descriptor in enumerate(manifest["layers"]):
            parts.append(Part(f"layer {layer} of image {number}", "", blob(descriptor)))
        parts.append(Part(f"configuration of image {number}", "", blob(manifest["config"])))
        parts.append(Part(f"manifest of image {number}", "", blob(entry)))
    return parts + [
        Part(str(path.relative_to(folder)), "", path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path not in known
    ]


def packages_in(folder: pathlib.Path) -> list[Part]:
    """Every package in a folder; that of an image has the image's folder in its name."""
    found = []
    for path in sorted(folder.iterdir()):
        if (path / "oci-layout").is_file():
            found += [
                dataclasses.replace(part, name=f"{path.name}: {part.name}")
                for part in image_parts(path)
            ]
        elif path.is_dir():
            raise SystemExit(f"{path} is a folder, and no OCI image")
        elif not path.name.startswith("."):
            found.append(Part(path.name, "", path.read_bytes()))
    return found


def place_of(where: str, data: bytes, texts: Sequence[str]) -> str | None:
    """Returns where one of the texts stands in a file or in what is packed in it; None: nowhere."""
    parts = parts_of(data)
    for part in parts or ():
        found = place_of(f"{where}: {part.name}", part.data, texts)
        if found:
            return found
    if parts is None:
        for text in texts:
            if text.encode() in data:
                return f"{where}: has the text {text}"
    return None


def check(first: pathlib.Path, second: pathlib.Path, absent: Sequence[str]) -> str | None:
    """Returns what is wrong; None: nothing."""
    packages = packages_in(first), packages_in(second)
    if not packages[0]:
        return f"no package is in {first}"
    found = difference_of_parts("packages", *packages)
    if found:
        return found
    for part in packages[0]:
        found = place_of(part.name, part.data, absent)
        if found:
            return f"{found}, which is of the machine that built it"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=pathlib.Path)
    parser.add_argument("second", type=pathlib.Path)
    parser.add_argument("--absent", action="append", default=[], metavar="TEXT")
    arguments = parser.parse_args()
    found = check(arguments.first, arguments.second, arguments.absent)
    if found:
        print(f"{arguments.first} and {arguments.second} are not equal:\n{found}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
