"""Writes an OCI image of optstated: a layout folder for skopeo, umoci and podman.

The image has two programs, the parts of glibc that they load, and a few files of /etc: no shell,
no package manager, nothing else to run. An image is JSON and tar files, so this needs neither root
nor a container engine. Equal input gives equal bytes; $SOURCE_DATE_EPOCH is the time of all in it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import tarfile
import time

_PROGRAMS = ("optstated", "optctl")
# Opened when they are there, see deploy/bazel/README.md: tables of optctl, CRC-32C at its fastest.
_OPTIONAL = ("libsmartcols.so.1", "libisal.so.2")
_ETC = {
    "etc/passwd": "root:x:0:0:root:/:/nonexistent\nnobody:x:65534:65534:nobody:/:/nonexistent\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def needed_libraries(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """The shared objects that a file loads, with theirs: name in the image to file here."""
    listed = subprocess.run(["ldd", path], check=True, capture_output=True, text=True).stdout
    return {
        found[1].removeprefix("/usr").lstrip("/"): pathlib.Path(found[1]).resolve()
        for found in re.finditer(r"(/\S+) \(0x", listed)
    }


def library_path(name: str) -> pathlib.Path | None:
    listed = subprocess.run(["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True)
    found = re.search(rf"^\s*{re.escape(name)} .* => (\S+)$", listed.stdout, re.MULTILINE)
    return pathlib.Path(found[1]) if found else None


class Layer:
    """A layer being written: entries in the order in which they are added, parents first."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._bytes = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._bytes, mode="w", format=tarfile.USTAR_FORMAT)
        self._folders: set[str] = set()

    def add_folder(self, name: str, mode: int = 0o755) -> None:
        if name in self._folders or name in ("", "."):
            return
        self.add_folder(os.path.dirname(name))
        self._folders.add(name)
        self._add(name, mode, tarfile.DIRTYPE)

    def add_file(self, name: str, data: bytes, mode: int = 0o644) -> None:
        self.add_folder(os.path.dirname(name))
        self._add(name, mode, tarfile.REGTYPE, data)

    def _add(self, name: str, mode: int, kind: bytes, data: bytes = b"") -> None:
        entry = tarfile.TarInfo(name)
        entry.mode, entry.type, entry.size, entry.mtime = mode, kind, len(data), self._epoch
        self._tar.addfile(entry, io.BytesIO(data))

    def close(self) -> bytes:
        self._tar.close()
        return self._bytes.getvalue()


def root_file_system(binaries: pathlib.Path, root: pathlib.Path, epoch: int) -> bytes:
    layer = Layer(epoch)
    libraries: dict[str, pathlib.Path] = {}
    for program in _PROGRAMS:
        libraries |= needed_libraries(binaries / program)
    for name in _OPTIONAL:
        path = library_path(name)
        if path is not None:
            libraries |= {str(path).removeprefix("/usr").lstrip("/"): path.resolve()}
            libraries |= needed_libraries(path)
    for name, text in sorted(_ETC.items()):
        layer.add_file(name, text.encode())
    layer.add_file(
        "etc/optstate/optstated.yaml", (root / "deploy/container/optstated.yaml").read_bytes()
    )
    for name, path in sorted(libraries.items()):
        layer.add_file(name, path.read_bytes(), 0o755)
    layer.add_folder("tmp", 0o1777)
    for program in _PROGRAMS:
        layer.add_file(f"usr/bin/{program}", (binaries / program).read_bytes(), 0o755)
    layer.add_file("usr/share/doc/optstate/LICENSE", (root / "LICENSE").read_bytes())
    # Where volumes are mounted: the socket, the state, disks.
    for folder in ("run/optstate", "var/lib/optstate/state", "var/lib/optstate/nvme"):
        layer.add_folder(folder)
    return layer.close()


class Layout:
    """An OCI image layout: blobs by their digest."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        shutil.rmtree(path, ignore_errors=True)
        (path / "blobs/sha256").mkdir(parents=True)

    def add(self, data: bytes, media_type: str) -> dict:
        digest = hashlib.sha256(data).hexdigest()
        (self._path / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def add_json(self, value: dict, media_type: str) -> dict:
        return self.add(_json(value), media_type)

    def close(self, manifest: dict, tag: str) -> None:
        manifest["annotations"] = {"org.opencontainers.image.ref.name": tag}
        (self._path / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
        (self._path / "index.json").write_bytes(
            _json({"schemaVersion": 2, "manifests": [manifest]})
        )


def _json(value: dict) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def write_image(output: pathlib.Path, layer: bytes, version: str, epoch: int) -> None:
    kind = "application/vnd.oci.image."
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
    layout = Layout(output)
    config = {
        "created": created,
        "architecture": _ARCHITECTURES[os.uname().machine],
        "os": "linux",
        "config": {
            "Entrypoint": ["/usr/bin/optstated"],
            "Cmd": ["--config", "/etc/optstate/optstated.yaml"],
            "Env": ["PATH=/usr/bin"],
            "StopSignal": "SIGTERM",
            "Labels": {
                "org.opencontainers.image.title": "optstate",
                "org.opencontainers.image.version": version,
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{"created": created, "created_by": "deploy/package image"}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": kind + "manifest.v1+json",
        "config": layout.add_json(config, kind + "config.v1+json"),
        "layers": [layout.add(gzip.compress(layer, 9, mtime=0), kind + "layer.v1.tar+gzip")],
    }
    layout.close(layout.add_json(manifest, manifest["mediaType"]), version)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binaries", type=pathlib.Path, required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    root = pathlib.Path(__file__).resolve().parents[2]
    write_image(
        arguments.output,
        root_file_system(arguments.binaries, root, epoch),
        arguments.version,
        epoch,
    )


if __name__ == "__main__":
    main()
