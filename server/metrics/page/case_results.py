"""Runs unittest's cases as a test of Bazel's: with its filter, and its XML of all cases."""

from __future__ import annotations

import os
import sys
import time
import unittest
from xml.etree import ElementTree


class _Cases(unittest.TextTestResult):
    """Keeps what has become of each case, for Bazel's XML."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.cases = []

    def startTest(self, test):
        self._began_s = time.monotonic()
        super().startTest(test)

    def stopTest(self, test):
        bad = [text for one, text in self.failures + self.errors if one.id().startswith(test.id())]
        skipped = [text for one, text in self.skipped if one is test]
        self.cases.append((test.id(), time.monotonic() - self._began_s, bad, skipped))
        super().stopTest(test)

    def write(self, path):
        suite = ElementTree.Element("testsuite", name="page_test")
        for name, seconds, bad, skipped in self.cases:
            case = ElementTree.SubElement(suite, "testcase", name=name, time=f"{seconds:.3f}")
            for kind, texts in (("failure", bad), ("skipped", skipped)):
                for text in texts:
                    ElementTree.SubElement(case, kind, message=text)
        for name, text in self.errors:  # before a case began
            if "setUpClass" in str(name):
                case = ElementTree.SubElement(suite, "testcase", name=str(name))
                ElementTree.SubElement(case, "failure", message=text)
        ElementTree.ElementTree(suite).write(path)


def run_cases() -> int:
    """Runs the cases of the main module. Returns the exit status."""
    # Bazel's --test_filter, in which a colon stands between patterns.
    only = os.environ.get("TESTBRIDGE_TEST_ONLY", "")
    options = [word for pattern in only.split(":") if pattern for word in ("-k", pattern)]
    runner = unittest.TextTestRunner(verbosity=2, resultclass=_Cases)
    result = unittest.main(argv=sys.argv + options, testRunner=runner, exit=False).result
    if "XML_OUTPUT_FILE" in os.environ:
        result.write(os.environ["XML_OUTPUT_FILE"])
    for test, reason in result.skipped:
        print(f"SKIPPED: {test}: {reason}")
    return 0 if result.wasSuccessful() else 1
