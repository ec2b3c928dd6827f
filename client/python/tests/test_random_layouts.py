"""Layouts that other programs have registered, and answers of optctl, changed at random.

A layout is all that a node's daemon keeps of a note or of a part of a job, and any client can
register one under such a name. What is read from it is whole, or an error of optstate.
"""

from __future__ import annotations

import copy
import json
import random
import subprocess

import pytest
from optstate import _optctl, errors
from optstate._torch.nodes.copy_note import CopyNote, note_from
from optstate._torch.nodes.moves import holdings
from optstate._torch.nodes.moves.holdings import HeldJob, Mark, mark_of
from optstate._torch.nodes.moves.making_note import MakingNote, note_of
from optstate._torch.nodes.part_names import Part, part_of
from optstate._torch.nodes.resolution import Position, Step
from optstate.session_spec import LossScalerState

COUNT = 3000
MANY = "9" * 5000  # more digits than int() takes
PART = Part("0f1e", 1, 2)
MARK = Mark(PART, 3, "ab12", LossScalerState(1024.0, 2, 1), "0123456789abcdef", (2, 3))
NAMES = {
    "copy": (note_from, CopyNote(7, 0xABC, False, 2, "2026-11-27T01:02:03.000000004Z")),
    "making": (note_of, MakingNote("b1", "ade")),
    "part": (lambda name: part_of([name]), PART),
    "parcel": (lambda name: mark_of([name]), MARK),
}
PIECES = ("", "/", "@", "@0", "#", "#0", ".", "of", "-", "0", "1", "\0", "\n", "é", "٣", "²", MANY)


def changed(text: str, rng: random.Random) -> str:
    """Returns the text after one to three changes: a piece put in, or in the place of a part."""
    for _ in range(rng.randint(1, 3)):
        begin = rng.randint(0, len(text))
        end = min(len(text), begin + rng.choice((0, 0, 1, 1, 2, 8)))
        piece = rng.choice((*PIECES, text[begin : begin + 8], chr(rng.randrange(0x110000))))
        text = text[:begin] + piece + text[end:]
    return text


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_is_read_whole_or_is_of_another_parameter(kind, seed):
    read, value = NAMES[kind]
    assert read(value.name) == value
    rng = random.Random(seed)
    for _ in range(COUNT):
        found = read(changed(value.name, rng))
        if found is not None:  # NaN is not equal to itself
            assert read(found.name).name == found.name


@pytest.mark.parametrize("kind", NAMES)
def test_a_number_of_thousands_of_digits_is_none_of_ours(kind):
    read, value = NAMES[kind]
    for at in (i for i, each in enumerate(value.name) if each.isdigit()):
        found = read(value.name[:at] + MANY + value.name[at:])
        # A run is named by any number of hexadecimal digits, and a time is text.
        assert found is None or MANY in found.name


def parameter(name: str, **more: object) -> dict:
    """Returns what optctl prints of a parameter."""
    of_all = {"dtype": "DTYPE_FLOAT32", "gradient_dtype": "DTYPE_BFLOAT16", "group": 0}
    shard = {"owner": 0, "global_shape": ["8"], "offset": ["4"]}
    entry = {"name": name, "shape": ["4"], "numel": "4", "shard": shard, **of_all, **more}
    return {"parameter": entry}


def description(first: str) -> dict:
    """Returns what optctl prints of a job."""
    return {
        "facts": {
            "created_at": "2026-11-27T01:02:03Z",
            "world_size": 1,
            "partition": "PARTITION_MODE_LOCAL",
            "storage": {"placement": "PLACEMENT_HOST", "durability": "DURABILITY_KIND_STEP"},
        },
        "parameters": [
            parameter(first, shape=["0"], numel="0"),
            parameter("w#1@0"),
            parameter("b#0@0", shape=[], numel="1"),
        ],
    }


def places(value: object, above: tuple = ()) -> list[tuple]:
    """Returns the keys that lead to each value within a JSON value."""
    if not isinstance(value, (dict, list)):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [p for key in keys for p in ((*above, key), *places(value[key], (*above, key)))]


def change_one(described: dict, rng: random.Random) -> None:
    *above, key = rng.choice([each for each in places(described) if len(each) > 1])
    holder = described
    for each in above:
        holder = holder[each]
    if rng.random() < 0.2:
        del holder[key]
    elif isinstance(holder[key], str) and rng.random() < 0.6:
        holder[key] = changed(holder[key], rng)
    else:
        holder[key] = rng.choice(("", "-1", MANY, -1, 2**64, 1e400, True, None, [], ["x"], {}))


@pytest.mark.parametrize("first", ["weight", PART.name, MARK.name])
def test_a_layout_is_a_job_or_an_error_of_ours(first, seed, monkeypatch):
    position = Position(Step(3, 7), loads_finished=2)
    described = description(first)
    monkeypatch.setattr(
        _optctl, "find_registered", lambda endpoint, job: _optctl.RegisteredJob(**described)
    )
    valid = holdings._describe(None, "gpt", position)
    assert valid is not None and len(valid.blocks) == 3
    rng = random.Random(seed)
    outcomes = set()
    for _ in range(COUNT):
        described = copy.deepcopy(description(first))
        for _ in range(rng.randint(1, 2)):
            change_one(described, rng)
        try:
            held = holdings._describe(None, "gpt", position)
        except errors.FailedPreconditionError as error:
            assert "optctl get params gpt" in str(error)
            held = error
        assert held is None or isinstance(held, (HeldJob, errors.OptstateError))
        outcomes.add(type(held))
    assert {HeldJob, errors.FailedPreconditionError} <= outcomes


def test_an_answer_is_an_object_or_there_is_none(seed, monkeypatch):
    text = json.dumps(description(MARK.name))
    rng = random.Random(seed)
    answers = [b"", b"3", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, MANY.encode()]
    answers += [text[: rng.randint(0, len(text))].encode() for _ in range(COUNT // 10)]
    answers += [changed(text, rng).encode("utf-8", "surrogatepass") for _ in range(COUNT)]
    for answer in answers:
        done = subprocess.CompletedProcess([], 0, answer, b"")
        monkeypatch.setattr(_optctl, "_run", lambda endpoint, *arguments, _done=done: _done)
        try:
            assert isinstance(_optctl.ask(None, "get", "jobs"), dict)
        except errors.UnavailableError as error:
            assert str(error).startswith("optctl get jobs: ")
