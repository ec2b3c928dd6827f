"""Runs a `bazel test` command, prints each test as it finishes and counts the cases.

Usage: bazel_tests.py COUNTS_FILE bazel test ...

Bazel itself reports whole test binaries at the end of the run; its event stream and the XML
files that GoogleTest writes have the cases. A test that could not be built is built once more: a
compiler that died for want of memory does not die twice. A test that failed runs once more, and
one that passes then is counted as passed and named at the end as unsteady. COUNTS_FILE gets
"PASSED FAILED". Exits with 1 when a test failed twice or could not be built, and with Bazel's own
status when it did not get that far.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.parse
from xml.etree import ElementTree

# Bazel's statuses for: all well, something did not build, no test was selected.
_OK, _BUILD_FAILED, _NO_TESTS = 0, 1, 4

# How often a test runs at the most, until it passes.
_ATTEMPTS = 2

# How much of a failed test's output is shown.
_LOG_LINES = 300


def count_cases(xml_path):
    """Returns (passed, failed, skipped) of a JUnit-like file; one that is unreadable failed."""
    try:
        cases = ElementTree.parse(xml_path).iter("testcase")
    except (OSError, ElementTree.ParseError):
        return 0, 1, 0
    # A case that ran once more is there twice, the last run behind.
    last_runs = {(case.get("classname"), case.get("name")): case for case in cases}
    passed = failed = skipped = 0
    for case in last_runs.values():
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.get("status") == "notrun":
            pass  # Excluded by a filter, or DISABLED_.
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


class Report:
    """Follows the events of one run."""

    def __init__(self, colour):
        self._counts = {}  # of each test's last attempt: passed, failed
        self._unsteady = set()
        self._tests = set()
        self._built = set()
        self._finished = set()
        self._green, self._red, self._plain = (
            ("\033[32m", "\033[31m", "\033[0m") if colour else ("", "", "")
        )

    @property
    def passed(self):
        return sum(passed for passed, _ in self._counts.values())

    @property
    def failed(self):
        return sum(failed for _, failed in self._counts.values())

    def take(self, event):
        name = event.get("id", {})
        if "targetConfigured" in name and event.get("configured", {}).get("testSize"):
            self._tests.add(name["targetConfigured"]["label"])
        elif "targetCompleted" in name and event.get("completed", {}).get("success"):
            self._built.add(name["targetCompleted"]["label"])
        elif "testResult" in name and "testResult" in event:
            self._result(name["testResult"], event["testResult"])

    def _result(self, name, result):
        # A test of several shards has a result for each.
        label, shard = name["label"], name.get("shard", 1)
        files = {
            out["name"]: urllib.parse.unquote(urllib.parse.urlparse(out["uri"]).path)
            for out in result.get("testActionOutput", [])
        }
        passed, failed, skipped = (
            count_cases(files["test.xml"]) if "test.xml" in files else (0, 0, 0)
        )
        ok = result["status"] in ("PASSED", "FLAKY")
        if not ok and not failed:
            failed = 1  # A crash, a time-out or a failure outside the cases.
        if failed and name.get("attempt", 1) < _ATTEMPTS:
            self._unsteady.add(label)
        self._counts[label, shard] = (passed, failed)
        self._finished.add(label)
        seconds = int(result.get("testAttemptDurationMillis", 0)) / 1000
        self._line(
            ok and not failed,
            f"{label}: {passed} passed, {failed} failed"
            + (f", {skipped} skipped" if skipped else "")
            + (" (cached)" if result.get("cachedLocally") else f" ({seconds:.1f} s)"),
        )

        if (failed or not ok) and "test.log" in files:
            with open(files["test.log"], encoding="utf-8", errors="replace") as log:
                print("".join(log.readlines()[-_LOG_LINES:]), flush=True)

    def not_built(self):
        """Labels of the tests that could not be built."""
        # A test that was built and has no result was excluded by its tags.
        return sorted(self._tests - self._built - self._finished)

    def finish(self):
        for label in self.not_built():
            self._counts[label, 1] = (0, 1)
            self._line(False, f"{label}: did not build")
        failed = {label for (label, _), (_, failed) in self._counts.items() if failed}
        for label in sorted(self._unsteady - failed):
            self._line(True, f"{label}: unsteady, it passed only when it ran once more")

    def _line(self, ok, text):
        word = f"{self._green}ok  " if ok else f"{self._red}FAIL"
        print(f"{word}{self._plain} {text}", flush=True)


def follow(path, process):
    """Yields the events of the file while the process writes them."""
    rest = ""
    with open(path, encoding="utf-8") as stream:
        while True:
            ended = process.poll() is not None
            rest += stream.read()
            *lines, rest = rest.split("\n")
            for line in lines:
                yield json.loads(line)
            if ended:
                return
            time.sleep(0.2)


def run(command, report):
    """Runs the command, `bazel test ...`, and reports its events. Returns Bazel's status."""
    with tempfile.NamedTemporaryFile(suffix=".json") as events:
        options = [
            f"--build_event_json_file={events.name}",
            "--nobuild_event_json_file_path_conversion",
            "--test_output=summary",
            "--test_summary=none",
            "--keep_going",
            f"--flaky_test_attempts={_ATTEMPTS}",
            "--ui_event_filters=-info,-fail",
        ]
        where = command.index("test") + 1
        process = subprocess.Popen(
            command[:where] + options + command[where:], stdin=subprocess.DEVNULL
        )
        for event in follow(events.name, process):
            report.take(event)
        return process.wait()


def main(counts_path, command):
    report = Report(sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    status = run(command, report)
    labels = report.not_built()
    if labels:
        print(f"{len(labels)} tests did not build and are built once more:", *labels, flush=True)
        options = [word for word in command if not word.startswith("//")]
        again = run(options + labels, report)
        status = again if status == _BUILD_FAILED else status
    report.finish()
    with open(counts_path, "w", encoding="utf-8") as counts:
        counts.write(f"{report.passed} {report.failed}\n")
    if report.failed:
        return 1
    return _OK if status in (_OK, _NO_TESTS) else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
