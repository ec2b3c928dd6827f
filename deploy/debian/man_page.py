"""Writes a manual page from what a program says of itself with --help.

Usage: man_page.py PROGRAM SECTION [SEE_ALSO...] > PAGE

The text is that of --help alone, so the page cannot say anything else. Verbs get a section each.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import subprocess
import sys

_ENTRY = re.compile(r"^  (\S.*?)(?:  +(\S.*))?$")
_OWN = ("-h,--help", "--version")


@dataclasses.dataclass
class Help:
    """The help text of a program or verb, taken apart."""

    before: list[str]  # up to "Usage:"
    usage: str
    entries: dict[str, list[tuple[str, str]]]  # "Options", "Subcommands"
    after: list[str]


def parse(text: str) -> Help:
    before, _, rest = text.strip("\n").partition("Usage: ")
    usage, _, rest = rest.partition("\n")
    help_ = Help(before.strip("\n").splitlines(), usage.strip(), {}, [])
    section = ""
    for line in rest.splitlines():
        entry = _ENTRY.match(line)
        if line.rstrip().endswith(":") and not line.startswith(" "):
            section = line.rstrip()[:-1]
            help_.entries[section] = []
        elif section and entry:
            help_.entries[section].append((entry[1], entry[2] or ""))
        elif section and line.startswith("   "):
            name, meaning = help_.entries[section][-1]
            help_.entries[section][-1] = (name, f"{meaning} {line.strip()}".strip())
        elif line.strip():
            section = ""
            help_.after.append(line)
    return help_


def ask(program: str, verbs: list[str]) -> Help:
    done = subprocess.run(
        [program, *verbs, "--help"], check=True, capture_output=True, encoding="utf-8", timeout=60
    )
    return parse(done.stdout)


def escape(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


def paragraph(lines: list[str]) -> list[str]:
    """Indented lines are examples, which stay as they are."""
    out, verbatim = [], False
    for line in lines:
        if line.startswith("  ") != verbatim:
            verbatim = not verbatim
            out += [".PP", ".nf"] if verbatim else [".fi", ".PP"]
        out.append(escape(line) if line else ".PP")
    return out + ([".fi"] if verbatim else [])


def options(help_: Help, keep_own: bool) -> list[str]:
    out = []
    for name, meaning in help_.entries.get("Options", []):
        if keep_own or name not in _OWN:
            out += [".TP", f"\\fB{escape(name)}\\fR", escape(meaning)]
    return out


def verbs_of(program: str, path: list[str]) -> list[str]:
    out = []
    for verb, _ in ask(program, path).entries.get("Subcommands", []):
        inner = [*path, verb]
        help_ = ask(program, inner)
        deeper = verbs_of(program, inner)
        if not deeper:
            _, _, arguments = help_.usage.partition(" ".join(inner))
            out.append(f'.SS "{escape(" ".join(inner) + arguments)}"')
            out += [*paragraph(help_.before), *options(help_, False)]
        out += deeper
    return out


def page(program: str, section: str, see_also: list[str]) -> str:
    name = os.path.basename(program)
    help_ = ask(program, [])
    ask_version = ["version", "--client"] if "Subcommands" in help_.entries else ["--version"]
    version = subprocess.run(
        [program, *ask_version], check=True, capture_output=True, encoding="utf-8"
    ).stdout.split()
    number = next(word for word in version if re.fullmatch(r"\d+\.\d+\S*", word))
    date = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.UTC)
    summary = re.sub(rf"^{name} ", "", help_.before[0].rstrip(".")).strip()
    out = [
        f'.TH {name.upper()} {section} {date:%Y-%m-%d} "optstate {number}"',
        ".SH NAME",
        escape(f"{name} - {summary}").replace("\\-", "\\-", 1),
        ".SH SYNOPSIS",
        f".B {name}",
        escape(help_.usage.removeprefix(name).strip()),
        ".SH DESCRIPTION",
        *paragraph(help_.before),
        ".SH OPTIONS",
        *options(help_, True),
    ]
    verbs = verbs_of(program, [])
    if verbs:
        out += [".SH VERBS", *verbs]
    if help_.after:
        out += [".SH NOTES", ".nf", *(escape(line) for line in help_.after), ".fi"]
    if see_also:
        out += [".SH SEE ALSO", ", ".join(f"\\fB{each[:-3]}\\fR{each[-3:]}" for each in see_also)]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    # The page is part of a package, so the locale does not choose its encoding.
    sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write(page(sys.argv[1], sys.argv[2], sys.argv[3:]))
