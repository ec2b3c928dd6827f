#!/bin/bash
# Usage: needed_test.sh ARTEFACT [EXPORTED_PREFIX [release|development]]
#
# No artefact may need a library of CUDA. A release artefact must need nothing but glibc 2.36 or
# older. With a prefix, every symbol that the artefact exports must begin with it: torch and grpcio
# bring other copies of our libraries into the same process.
set -euo pipefail

artefact=$1
prefix=${2:-}
built=${3:-release}
failed=0

needed() {
  readelf --dynamic --wide "$artefact" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'
}

# A machine without a GPU has none of these: what needs them opens them when it runs.
if libraries=$(needed | grep -E '^lib(cuda|cudart|nccl|nvidia)'); then
  printf '%s needs these, which are to be opened at run time or linked into it:\n%s\n' "$artefact" "$libraries" >&2
  exit 1
fi
if [[ $built != release ]]; then
  echo "Nothing else to check: $artefact was not built with --config=release"
  exit 0
fi

while read -r library; do
  case $library in
    libc.so.6 | libm.so.6 | ld-linux*.so.*) ;;
    *)
      echo "$artefact needs $library, which is not part of glibc" >&2
      failed=1
      ;;
  esac
done < <(needed)

newest=$(readelf --version-info --wide "$artefact" |
  grep -o 'GLIBC_2\.[0-9]*' | sort --version-sort --unique | tail -n 1)
if [[ $(printf '%s\n' "$newest" GLIBC_2.36 | sort --version-sort | tail -n 1) != GLIBC_2.36 ]]; then
  echo "$artefact needs $newest" >&2
  failed=1
fi

if [[ -n $prefix ]]; then
  exported=$(nm --dynamic --defined-only --extern-only --format=posix "$artefact" | awk '$2 != "A" {print $1}')
  if ! grep -q "^$prefix" <<<"$exported"; then
    echo "$artefact exports nothing that begins with $prefix" >&2
    failed=1
  fi
  if others=$(grep -v "^$prefix" <<<"$exported"); then
    printf '%s also exports:\n%s\n' "$artefact" "$others" >&2
    failed=1
  fi
fi

exit "$failed"
