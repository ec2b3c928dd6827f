# Sourced by the scripts in deploy/: where we are, colours, Debian's packages and a HOME to write to.
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

as_root() {
  if [[ $(id -u) == 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "Packages are missing and neither root nor sudo is available. As root, run: $*"
  fi
}

# install_packages PACKAGE...: those of Debian that are missing.
install_packages() {
  local package missing=()
  for package in "$@"; do
    if [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) != installed ]]; then
      missing+=("$package")
    fi
  done
  if [[ ${#missing[@]} == 0 ]]; then
    note "Debian packages: all $# are installed"
    return
  fi
  echo "Debian packages: installing ${missing[*]}"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

# Bazel and pip keep caches below HOME; services and containers often have none, or may not write there.
if [[ ! -d ${HOME:-} || ! -w ${HOME:-} ]]; then
  HOME=${TMPDIR:-/tmp}/optstate-home-$(id -u)
  export HOME
  mkdir -p "$HOME"
fi

cd "$root" || exit 1
