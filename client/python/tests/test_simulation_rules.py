"""The rules of nodes that tests/simulation has in C++ are those of resolution.py."""

from __future__ import annotations

import importlib.util
import pathlib

SIMULATION = pathlib.Path(__file__).parents[3] / "tests" / "simulation"


def test_the_cases_are_what_the_rules_answer():
    """//tests/simulation:resolution_test gives the same cases to the C++."""
    writer = SIMULATION / "write_resolution_cases.py"
    spec = importlib.util.spec_from_file_location("write_resolution_cases", writer)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.CASES_FILE.read_text() == module.cases(), f"run {writer}"
