#!/bin/bash
# Usage: train_linear_test.sh TRAIN_LINEAR OPTSTATED
#
# Two runs of the example on one daemon: the second goes on after the first, also with state on a disk.
set -euo pipefail

directory=$(mktemp --directory)
mkdir -m 0700 "$directory/disk"
"$2" --state-dir "$directory/state" --socket "$directory/sock" --nvme-dir "$directory/disk" --log-level warn &
daemon=$!
trap 'kill "$daemon"; wait "$daemon" || true; rm -rf "$directory"' EXIT

until [[ -S $directory/sock ]]; do
  kill -0 "$daemon"
  read -rt 0.01 <> <(:) || true
done

first=$("$1" line "unix:$directory/sock")
second=$("$1" line "grpc:unix:$directory/sock")
printf '%s\n%s\n' "$first" "$second"
grep -q "starts at step 1$" <<<"$first"
grep -q "starts at step 401$" <<<"$second"
grep -q "^step 800 .* w 2\.9\|^step 800 .* w 3\.0\|^step 800 .* w 3 " <<<"$second"

first=$("$1" --durable durable "unix:$directory/sock")
second=$("$1" --durable durable "unix:$directory/sock")
printf '%s\n%s\n' "$first" "$second"
grep -q "starts at step 1$" <<<"$first"
grep -q "starts at step 401$" <<<"$second"
compgen -G "$directory/disk/jobs/durable/*" >/dev/null
