# Sourced by the scripts in deploy/: where we are, colours and a HOME to write to.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck disable=SC2034 # used by those who source this
python=$root/.venv/bin/python

if [[ -t 1 && -z ${NO_COLOR:-} ]]; then
  bold=$'\e[1m' green=$'\e[32m' red=$'\e[31m' dim=$'\e[2m' plain=$'\e[0m'
else
  bold='' green='' red='' dim='' plain=''
fi

heading() { printf '%s== %s ==%s\n' "$bold" "$*" "$plain"; }
note() { printf '%s%s%s\n' "$dim" "$*" "$plain"; }
good() { printf '%s%s%s\n' "$green" "$*" "$plain"; }
bad() { printf '%s%s%s\n' "$red" "$*" "$plain" >&2; }
die() {
  bad "$@"
  exit 1
}

# Bazel and pip keep caches below HOME; services and containers often have none, or may not write there.
if [[ ! -d ${HOME:-} || ! -w ${HOME:-} ]]; then
  HOME=${TMPDIR:-/tmp}/optstate-home-$(id -u)
  export HOME
  mkdir -p "$HOME"
fi

cd "$root" || exit 1
