#!/bin/bash
# Usage: train_on_nodes_test.sh TRAIN OPTSTATED [OPTION_OF_SECOND_RUN...]
#
# Two nodes, each with a daemon, learn together and have equal parameters. A rank that is killed at any step
# leaves nodes that go on together in the next run.
set -euo pipefail
train=$1 optstated=$2

directory=$(mktemp --directory)
daemons=() ranks=()
# A daemon that is asked to end ends its engines too.
clean_up() {
  local process
  for process in "${ranks[@]}"; do kill -9 "$process" 2>/dev/null || true; done
  for process in "${daemons[@]}"; do kill "$process" 2>/dev/null || true; done
  wait || true
  rm -rf "$directory"
}
trap clean_up EXIT

for node in a b; do
  "$optstated" --state-dir "$directory/state-$node" --socket "$directory/$node" --log-level warn &
  daemons+=($!)
  until [[ -S $directory/$node ]]; do
    kill -0 "${daemons[-1]}"
    read -rt 0.01 <> <(:) || true
  done
done

# start RUN OPTIONS...: starts both ranks of a run; their process numbers are in $rank0 and $rank1.
start() {
  local run=$1
  shift
  mkdir -m 0700 "$directory/$run"
  OPTSTATE_NODE=a "$train" "$@" line "unix:$directory/a" 0 2 "$directory/$run" >"$directory/$run-0" 2>&1 &
  rank0=$!
  OPTSTATE_NODE=b "$train" "$@" line "grpc:unix:$directory/b" 1 2 "$directory/$run" >"$directory/$run-1" 2>&1 &
  rank1=$!
  ranks+=("$rank0" "$rank1")
}

# finish RUN: waits for both ranks, which succeed with equal parameters.
finish() {
  local status=0
  wait "$rank0" || status=$?
  wait "$rank1" || status=$?
  tail -n +1 "$directory/$1-0" "$directory/$1-1"
  ((status == 0))
  diff <(grep '^step ' "$directory/$1-0") <(grep '^step ' "$directory/$1-1")
}

start first
finish first
grep -q "^rank 0 on a starts at step 1$" "$directory/first-0"
grep -q "^step 400 .* w 2\.\|^step 400 .* w 3" "$directory/first-0"

start second "${@:3}"
finish second
grep -q "^rank 1 on b starts at step 401$" "$directory/second-1"
grep -q "^step 800 .* w 2\.9\|^step 800 .* w 3\.0\|^step 800 .* w 3 " "$directory/second-0"

# A rank is killed; the other one ends with an error.
start third --steps 10000000
until grep -q "^step 900 " "$directory/third-1"; do
  kill -0 "$rank0"
  kill -0 "$rank1"
  read -rt 0.01 <> <(:) || true
done
kill -9 "$rank1"
wait "$rank1" || true
status=0
wait "$rank0" || status=$?
tail -n 2 "$directory/third-0"
((status == 1))

start fourth
finish fourth
went_on=$(sed -n 's/^rank 0 on a starts at step //p' "$directory/fourth-0")
((went_on > 900))
grep -q "^rank 1 on b starts at step $went_on$" "$directory/fourth-1"
