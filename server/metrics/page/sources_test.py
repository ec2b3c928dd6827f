"""Tests the page's sources: what they read, against the .proto, and what they may not do.

Besides that, what its tests say on a machine without a browser.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import assemble
import canned_nodes as canned
import proto_fields

_HERE = pathlib.Path(__file__).parent
# By Bazel and from the repository's root alike.
_PROTOS = pathlib.Path("proto/optstate/v1")
_SCRIPTS = sorted(_HERE.glob("*.js"))


def script_text() -> str:
    """Returns the page's script without comments and without the table of fields."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in _SCRIPTS)
    text = re.sub(r"(^|\s)//[^\n]*", "", text)
    return re.sub(r"const MESSAGES = \{.*?\n\};", "", text, flags=re.DOTALL)


def fields_read() -> dict[str, dict[str, str]]:
    """Returns the table of messages.js: by message, the type of each field."""
    text = (_HERE / "messages.js").read_text(encoding="utf-8")
    table = re.search(r"const MESSAGES = \{(.*?)\n\};", text, flags=re.DOTALL)[1]
    messages = {}
    for name, _, fields in re.findall(r"(\w+): ([\"`])([^\"`]*)\2", table):
        pairs = (field.partition(":") for field in fields.split())
        messages[name] = {field: kind or "number" for field, _, kind in pairs}
    return messages


class FieldsTest(unittest.TestCase):
    """The page, the canned reports and the .proto name the same things."""

    @classmethod
    def setUpClass(cls):
        cls.protos = proto_fields.read_protos(sorted(_PROTOS.glob("*.proto")))

    def test_every_field_that_the_page_reads_is_in_the_proto(self):
        table = fields_read()
        self.assertGreater(len(table), 20)
        for message, fields in table.items():
            self.assertIn(message, self.protos.messages)
            for field, kind in fields.items():
                self.assertEqual(
                    self.protos.messages[message].get(field), kind, f"{message}.{field}"
                )

    def test_the_script_reads_no_other_field_and_each_of_the_table(self):
        known = {field for fields in fields_read().values() for field in fields}
        script = script_text()
        # Names of our own are in camel case.
        self.assertEqual(
            set(re.findall(r"\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b", script)) - known, set()
        )
        self.assertEqual({one for one in known if not re.search(rf"\b{one}\b", script)}, set())

    def test_every_value_of_an_enum_that_the_script_names_is_in_the_proto(self):
        values = set().union(*self.protos.enums.values())
        kinds = ("JOB_PHASE", "EVENT_SEVERITY", "OPTIMIZER_KIND", "PLACEMENT", "DURABILITY_KIND")
        named = set(re.findall(rf"\b(?:{'|'.join(kinds)})_[A-Z0-9_]*[A-Z0-9]\b", script_text()))
        self.assertGreater(len(named), 5)
        self.assertEqual(named - values, set())
        # These are told by their short names.
        durations = {f"DURABILITY_KIND_{one}" for one in ("NONE", "STEP", "EVERY", "INTERVAL")}
        self.assertEqual(durations - values, set())
        self.assertIn("PLACEMENT_HOST", values)

    def test_the_canned_reports_are_the_messages_of_the_proto(self):
        for make in (canned.busy_node, canned.hostile_node, canned.crowded_node):
            faults = proto_fields.faults_of_json(make(7), "NodeReport", self.protos, make.__name__)
            self.assertEqual(faults, [])


class SourceTest(unittest.TestCase):
    """The page parses no text as markup, and sends nothing but GET."""

    def test_no_text_is_parsed(self):
        parsing = (
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser"
            r"|setHTML|\beval\b|new Function|createContextualFragment"
        )
        self.assertEqual(re.findall(parsing, script_text()), [])

    def test_one_request_is_made_and_it_is_get(self):
        script = script_text()
        self.assertEqual(script.count("fetch("), 1)
        others = r"method:|XMLHttpRequest|sendBeacon|WebSocket|EventSource|<form|\bimport\b"
        self.assertEqual(re.findall(others, script), [])

    def test_the_page_is_whole_and_needs_nothing_else(self):
        page = assemble.assemble(_HERE / "page.html")
        self.assertNotIn("@include", page)
        addresses = set(re.findall(r"(?:https?:|src=|url\(|@import)[^\s\"']*", page))
        self.assertEqual(addresses, {"http://www.w3.org/2000/svg"})  # the name of SVG, not fetched
        for script in _SCRIPTS:
            self.assertIn(f"@include {script.name}\n", (_HERE / "page.html").read_text("utf-8"))

    def test_a_page_that_is_too_large_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            template = pathlib.Path(folder, "page.html")
            template.write_text("@include part\n", encoding="utf-8")
            template.with_name("part").write_text("x" * assemble.PAGE_BYTES_MAX, encoding="utf-8")
            with self.assertRaisesRegex(ValueError, "61441 bytes"):
                assemble.assemble(template)
            template.with_name("part").write_text("  a {\n\n  // why\n  }\n", encoding="utf-8")
            self.assertEqual(assemble.assemble(template), "a {\n}\n")


class BrowserTest(unittest.TestCase):
    """A run that is there for its browser does not pass without one."""

    def test_a_required_browser_that_is_missing_is_said(self):
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run(
                [sys.executable, "-B", str(_HERE / "page_test.py"), "--require-browser"],
                env={"PATH": empty},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.assertEqual(done.returncode, 3, done.stdout)
        self.assertIn("no Chromium is installed: deploy/setup --browser", done.stdout)
