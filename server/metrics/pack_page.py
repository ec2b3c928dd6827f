"""Writes a file as a C++ source that returns its bytes: pack_page.py FILE > page.cc."""

import pathlib
import sys

_BYTES_A_LINE = 24

_SOURCE = """#include "server/metrics/page.h"

namespace optstate::metrics {{
namespace {{

constexpr unsigned char kPage[] = {{
{bytes}}};

}}  // namespace

absl::string_view Page() {{
  return absl::string_view(reinterpret_cast<const char*>(kPage), sizeof(kPage));
}}

}}  // namespace optstate::metrics
"""


def main():
    content = pathlib.Path(sys.argv[1]).read_bytes()
    lines = [
        ", ".join(str(byte) for byte in content[start : start + _BYTES_A_LINE]) + ",\n"
        for start in range(0, len(content), _BYTES_A_LINE)
    ]
    sys.stdout.write(_SOURCE.format(bytes="".join(lines)))


if __name__ == "__main__":
    main()
