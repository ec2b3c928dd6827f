"""Puts the parts of the page into one file.

Each line `@include FILE` of page.html becomes the file's text; comments and indentation stay
behind, nothing else is changed. Usage: assemble.py page.html > index.html. Fails when a part is
missing, or the page is too large.
"""

from __future__ import annotations

import pathlib
import re
import sys

# The daemon keeps the page in memory, and sends it whole.
PAGE_BYTES_MAX = 60 * 1024

# A line that is blank or a comment. No part has a text of several lines in which one would count.
_LEFT_OUT = re.compile(r"\s*(//.*)?$")


def read_part(path: pathlib.Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line.strip() for line in lines if not _LEFT_OUT.match(line))


def assemble(template: pathlib.Path) -> str:
    def include(match: re.Match) -> str:
        return read_part(template.parent / match[1])

    page = re.sub(r"^@include (\S+)$", include, read_part(template), flags=re.MULTILINE) + "\n"
    size_bytes = len(page.encode())
    if size_bytes > PAGE_BYTES_MAX:
        raise ValueError(f"the page has {size_bytes} bytes, and may have {PAGE_BYTES_MAX}")
    return page


if __name__ == "__main__":
    sys.stdout.write(assemble(pathlib.Path(sys.argv[1])))
