"""Reads .proto files as far as the page's tests need it: types of fields, and values of enums."""

from __future__ import annotations

import dataclasses
import pathlib
import re

_TYPES = {
    **dict.fromkeys(
        ("int32", "int64", "uint32", "uint64", "fixed32", "fixed64", "float", "double"), "number"
    ),
    "string": "text",
    "bytes": "bytes",
    "bool": "bool",
    "google.protobuf.Timestamp": "time",
}
_BLOCK = re.compile(r"\b(message|enum)\s+(\w+)\s*\{([^{}]*)\}")
_FIELD = re.compile(r"\b(?:(repeated|optional)\s+)?([\w.]+)\s+(\w+)\s*=\s*\d+\s*;")
_VALUE = re.compile(r"\b(\w+)\s*=\s*\d+\s*;")


@dataclasses.dataclass
class Protos:
    # By message, the type of each field: "number", "text", "bool", "time", "bytes", or the name of
    # a message or an enum, with "[]" behind it for a repeated field, "?" for an optional one.
    messages: dict[str, dict[str, str]]
    enums: dict[str, set[str]]


def read_protos(paths: list[pathlib.Path]) -> Protos:
    """Blocks within blocks are none of ours: the messages of the Admin service have none."""
    protos = Protos({}, {})
    for path in paths:
        text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        for kind, name, body in _BLOCK.findall(text):
            if kind == "enum":
                protos.enums[name] = set(_VALUE.findall(body))
                continue
            fields = {}
            for label, kind_of_field, field in _FIELD.findall(body):
                suffix = {"repeated": "[]", "optional": "?"}.get(label, "")
                fields[field] = _TYPES.get(kind_of_field, kind_of_field) + suffix
            protos.messages[name] = fields
    return protos


def faults_of_json(value, kind: str, protos: Protos, where: str) -> list[str]:
    """Returns what in a JSON value is not as protobuf's mapping of this type would have it."""
    if kind.endswith("[]"):
        faults = [] if isinstance(value, list) else [f"{where} is no list"]
        for index, one in enumerate(value if isinstance(value, list) else []):
            faults += faults_of_json(one, kind[:-2], protos, f"{where}[{index}]")
        return faults
    kind = kind.rstrip("?")
    if kind in protos.messages:
        faults = []
        for name, field in value.items():
            field_kind = protos.messages[kind].get(name)
            if field_kind is None:
                faults.append(f"{where}: {kind} has no field {name}")
            else:
                faults += faults_of_json(field, field_kind, protos, f"{where}.{name}")
        return faults
    if kind in protos.enums:
        return [] if value in protos.enums[kind] else [f"{where}: {kind} has no value {value}"]
    if kind == "number":
        is_right = isinstance(value, (int, float)) or re.fullmatch(r"-?\d+", str(value))
    else:
        is_right = isinstance(value, bool if kind == "bool" else str)
    return [] if is_right else [f"{where} is no {kind}: {value}"]
