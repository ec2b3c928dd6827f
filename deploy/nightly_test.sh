#!/bin/bash
# Tests how deploy/nightly runs its stages, and what it says of them. Argument: its path.
set -euo pipefail

nightly=$PWD/$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cat >"$scratch/stages" <<STAGES
# name   command
good     touch $scratch/was-run; echo 7 passed, 0 failed
broken   echo it is broken; exit 1
absent   echo SKIPPED: no container boots here; exit 3

last     true
STAGES

fail() {
  echo "FAILED: $*"
  echo "$out"
  exit 1
}
# run OPTION...: leaves the output in $out and the exit status in $status.
run() {
  status=0
  out=$("$nightly" --stages "$scratch/stages" "$@" 2>&1) || status=$?
}
says() { [[ $out == *"$1"* ]] || fail "it does not say: $1"; }
ends_with() { [[ $(tail -n 1 <<<"$out") == "$1" ]] || fail "it does not end with: $1"; }

run --list
((status == 0)) || fail "--list: status $status"
says "broken         echo it is broken; exit 1"
[[ ! -e $scratch/was-run ]] || fail "--list runs a stage"

# Each stage runs, whatever becomes of the one before.
run --logs "$scratch/logs"
((status == 1)) || fail "a stage failed, and the status is $status"
[[ -e $scratch/was-run ]] || fail "the first stage was not run"
says "7 passed, 0 failed"
says "FAILED   broken"
says "SKIPPED  absent"
says "SKIPPED: no container boots here"
says "ok       last"
ends_with "2 passed, 1 failed"
[[ $(<"$scratch/logs/broken.log") == "it is broken" ]] || fail "the log of the broken stage is wrong"

run --logs "$scratch/logs" --only last --only good
((status == 0)) || fail "--only: status $status"
ends_with "2 passed, 0 failed"
[[ $out != *broken* ]] || fail "a stage that was not asked for was run"

run --only nothing
((status == 1)) || fail "a stage that is none: status $status"
says "there is no stage nothing; there are: good broken absent last"
run --bogus
((status == 2)) || fail "bad usage: status $status"

# Its own stages are well formed.
out=$("$nightly" --list) || fail "its own stages"
says "deploy/test --packages"
says "{ deploy/setup --build-only --browser || exit 1; }; /usr/bin/python3 -B server/metrics/page/page_test.py --require-browser"
says "deploy/package --check-reproducible"
says "deploy/demo --tier nvme --host-budget 64MiB"
says "demo-on-device deploy/demo --device emulated"
says "bazel test --//:cuda=off //server:optstated //storage/accelerator/... //server/scheduler/executors/..."
says "tests/fuzz/run"
# Bazel ends with status 3 when a test fails, which would be shown as SKIPPED.
if grep "bazel test" <<<"$out" | grep -qv "|| exit 1$"; then fail "a failed test of a stage is SKIPPED"; fi
says "tests/crash/campaign"
says "//tests/load:load_benchmark -- --seconds 60"
says "//tests/load:load_benchmark -- --only-flood --flood-ratio-max 1.2"
echo "passed"
