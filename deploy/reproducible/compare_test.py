"""Tests compare.py: each kind of package, with one file in it that differs."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import pathlib
import tarfile
import tempfile
import unittest
import zipfile

import compare


def tar(files: dict[str, bytes], mode: int = 0o644, mtime: int = 7) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), mode, mtime
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def ar(files: dict[str, bytes], time: int = 7) -> bytes:
    out = b"!<arch>\n"
    for name, data in files.items():
        out += f"{name + '/':16}{time:<12}{0:<6}{0:<6}{644:<8}{len(data):<10}`\n".encode()
        out += data + b"\n" * (len(data) % 2)
    return out


def deb(files: dict[str, bytes], **facts: int) -> bytes:
    packed = lzma.compress(tar(files, **facts))
    digest = hashlib.sha256(packed).hexdigest().encode()
    control = lzma.compress(tar({"./md5sums": digest}))
    return ar({"debian-binary": b"2.0\n", "control.tar.xz": control, "data.tar.xz": packed})


def wheel(files: dict[str, bytes], year: int = 1980) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), data)
    return out.getvalue()


def write_image(folder: pathlib.Path, files: dict[str, bytes]) -> None:
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)

    def add(data: bytes) -> dict:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}"}

    layer = tar(files)
    config = add(hashlib.sha256(layer).hexdigest().encode())
    layers = [add(gzip.compress(layer, mtime=0))]
    manifest = add(json.dumps({"config": config, "layers": layers}).encode())
    (folder / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    (folder / "oci-layout").write_text("{}")


class CompareTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.sides = [pathlib.Path(folder.name, side) for side in ("first", "second")]
        for side in self.sides:
            side.mkdir()

    def check(self, name: str, first: bytes, second: bytes, absent=()) -> str | None:
        for side, data in zip(self.sides, (first, second)):
            (side / name).write_bytes(data)
        return compare.check(*self.sides, absent)

    def test_equal_packages_are_equal(self):
        for name, data in (("a.deb", deb({"a": b"1"})), ("a.whl", wheel({"a": b"1"}))):
            self.assertIsNone(self.check(name, data, data))
        for side in self.sides:
            write_image(side / "a.oci", {"usr/bin/optstated": b"1"})
        self.assertIsNone(compare.check(*self.sides, ["/home/me"]))

    def test_nothing_is_not_equal_to_nothing(self):
        self.assertIn("no package is in", compare.check(*self.sides, []))

    def test_a_package_of_one_side_is_named(self):
        (self.sides[1] / "a.deb").write_bytes(deb({}))
        (self.sides[0] / "b.deb").write_bytes(deb({}))
        (self.sides[1] / "b.deb").write_bytes(deb({}))
        self.assertEqual(compare.check(*self.sides, []), "packages: a.deb: is in the second alone")

    def test_a_file_in_a_debian_package_is_named(self):
        first, second = (deb({"a": b"", "etc/b": b"x" * 40 + end}) for end in (b"1", b"2"))
        found = self.check("a.deb", first, second)
        self.assertIn("packages: a.deb: data.tar.xz: (unxzed): etc/b: byte 40 of 41", found)

    def test_a_time_in_an_archive_is_named(self):
        found = self.check("a.deb", deb({"b": b""}, mtime=7), deb({"b": b""}, mtime=8))
        self.assertRegex(found, r"b: .*time 7.* in the first, .*time 8.* in the second")
        found = self.check("a.deb", ar({"b": b""}, time=7), ar({"b": b""}, time=8))
        self.assertIn("a.deb: b: 7 0 0 644 in the first, 8 0 0 644 in the second", found)
        (self.sides[0] / "a.deb").unlink()
        (self.sides[1] / "a.deb").unlink()
        found = self.check("a.whl", wheel({"b": b""}), wheel({"b": b""}, year=2000))
        self.assertRegex(found, r"b: time \(1980, .* in the first, time \(2000, ")

    def test_a_mode_is_named(self):
        found = self.check("a.deb", deb({"b": b""}, mode=0o644), deb({"b": b""}, mode=0o600))
        self.assertRegex(found, "b: .*mode 644.* in the first, .*mode 600.* in the second")

    def test_another_order_is_named(self):
        found = self.check("a.whl", wheel({"a": b"", "b": b""}), wheel({"b": b"", "a": b""}))
        self.assertEqual(found, "packages: a.whl: the order: a in the first, b in the second")

    def test_a_time_that_gzip_keeps_is_named(self):
        found = self.check("a.gz", gzip.compress(b"a", mtime=1), gzip.compress(b"a", mtime=2))
        self.assertRegex(found, r"a\.gz: \(gunzipped\): \w+ in the first, \w+ in the second")

    def test_another_compression_is_named(self):
        first, second = (lzma.compress(b"a" * 9999, preset=preset) for preset in (0, 9))
        self.assertIn("the compression", self.check("a.xz", first, second))

    def test_a_layer_is_named_before_the_digests_that_follow_from_it(self):
        for side, data in zip(self.sides, (b"1", b"2")):
            write_image(side / "a.oci", {"usr/bin/optstated": data})
        found = compare.check(*self.sides, [])
        self.assertRegex(found, r"a\.oci: layer 0 of image 0: .*: usr/bin/optstated: byte 0 of 1")

    def test_a_file_that_only_one_image_has_is_named(self):
        for side in self.sides:
            write_image(side / "a.oci", {"usr/bin/optstated": b""})
        (self.sides[1] / "a.oci/blobs/sha256/left").write_bytes(b"")
        found = compare.check(*self.sides, [])
        self.assertEqual(found, "packages: a.oci: blobs/sha256/left: is in the second alone")

    def test_long_names_in_an_archive_of_objects_are_read(self):
        table = {"/": b"a_long_name_of_an_object.o/\n"}
        first, second = (ar(table | {"/0": data}).replace(b"/0/", b"/0 ") for data in (b"1", b"2"))
        found = self.check("a.a", first, second)
        self.assertIn("packages: a.a: a_long_name_of_an_object.o: byte 0", found)

    def test_a_text_that_may_not_be_there_is_found_however_deep(self):
        data = deb({"man.gz": gzip.compress(b"built in /home/me/clone", mtime=0)})
        found = self.check("a.deb", data, data, ["/tmp/other", "/home/me"])
        self.assertIn("man.gz: (gunzipped): has the text /home/me", found)
        self.assertIsNone(self.check("a.deb", data, data, ["/home/you"]))


if __name__ == "__main__":
    unittest.main()
