"""The rules of nodes that the C++ client and the simulation have are those of resolution.py."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/simulation"))

import write_resolution_cases


def test_the_cases_are_what_the_rules_answer():
    """//tests/simulation:resolution_test gives the same cases to the C++."""
    there = write_resolution_cases.CASES_FILE.read_text()
    assert there == write_resolution_cases.cases(), "run tests/simulation/write_resolution_cases.py"
