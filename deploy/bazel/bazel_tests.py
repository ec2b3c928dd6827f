"""Runs a `bazel test` command, prints each test as it finishes and counts the cases.

Usage: bazel_tests.py COUNTS_FILE bazel test ...

Bazel itself reports whole test binaries at the end of the run; its event stream and the XML
files that GoogleTest writes have the cases. A test that could not be built is built once more: a
compiler that died for want of memory does not die twice. A test that failed runs once more, and
one that passes then is counted as passed and named at the end as unsteady. COUNTS_FILE gets
"PASSED FAILED", then a line "TEST<tab>REASON" for each case that was skipped. Exits with 1 when a
test failed twice or could not be built, and with Bazel's own status when it did not get that far.
"""

import json
import os
import re
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

# How many lines say why cases were skipped.
_SKIP_LINES = 12

# The words of reasons that name what a machine lacks. Other reasons are those of parameters: "none
# are needed".
_LACKING = re.compile(
    r"CUDA|GPU|NUMA|install|kernel|root|compiler|sanitizer|may not|in memory"
    r"|\b(driver|cuobjdump|machine|here|needs|takes)\b"
)


def count_cases(xml_path):
    """Returns (passed, failed, skips) of a JUnit-like file; one that is unreadable failed.

    skips: the class and the reason of each case that was skipped."""
    try:
        cases = ElementTree.parse(xml_path).iter("testcase")
    except (OSError, ElementTree.ParseError):
        return 0, 1, []
    # A case that ran once more is there twice, the last run behind.
    last_runs = {(case.get("classname"), case.get("name")): case for case in cases}
    passed = failed = 0
    skips = []
    for case in last_runs.values():
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.get("status") == "notrun":
            pass  # Excluded by a filter, or DISABLED_.
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            skips.append((case.get("classname", ""), _skip_reason(case.find("skipped"))))
        else:
            passed += 1
    return passed, failed, skips


def _skip_reason(skipped):
    text = "" if skipped is None else skipped.get("message") or skipped.text or ""
    # GoogleTest has the place in front: "some_test.cc:12".
    return " ".join(re.sub(r"\A\S+:\d+\n", "", text).split())


def skip_summary(skips):
    """Returns the lines that say what machines lacked, for pairs of a test and a reason."""
    tests = {}  # the test of each case, by reason
    others = 0
    for test, reason in skips:
        if _LACKING.search(reason):
            tests.setdefault(reason, []).append(test)
        else:
            others += 1
    lines = []
    for reason, cases in sorted(tests.items(), key=lambda each: -len(each[1])):
        more = len(set(cases)) - 1
        where = min(cases) + (f" and {more} more" if more else "")
        said = reason if len(reason) <= 120 else reason[:117] + "..."
        lines.append(f"{len(cases):>5} of {where}: {said}")
    if len(lines) >= _SKIP_LINES:
        left = len(lines) - (_SKIP_LINES - 2)
        lines[-left:] = [f"      and {left} more reasons"]
    if others:
        lines.append(f"{others:>5} others, which their parameters leave out")
    return lines


class Report:
    """Follows the events of one run."""

    def __init__(self, colour):
        self._counts = {}  # of each test's last attempt: passed, failed
        self._skips = {}  # of each test's last attempt: reasons
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

    @property
    def skips(self):
        """Pairs of a test and a reason."""
        return [(label, reason) for (label, _), each in self._skips.items() for reason in each]

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
        passed, failed, skips = (
            count_cases(files["test.xml"]) if "test.xml" in files else (0, 0, [])
        )
        ok = result["status"] in ("PASSED", "FLAKY")
        if not ok and not failed:
            failed = 1  # A crash, a time-out or a failure outside the cases.
        if failed and name.get("attempt", 1) < _ATTEMPTS:
            self._unsteady.add(label)
        self._counts[label, shard] = (passed, failed)
        self._skips[label, shard] = [reason for _, reason in skips]
        self._finished.add(label)
        seconds = int(result.get("testAttemptDurationMillis", 0)) / 1000
        self._line(
            ok and not failed,
            f"{label}: {passed} passed, {failed} failed"
            + (f", {len(skips)} skipped" if skips else "")
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
        counts.writelines(f"{test}\t{reason}\n" for test, reason in report.skips)
    if report.failed:
        return 1
    return _OK if status in (_OK, _NO_TESTS) else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
