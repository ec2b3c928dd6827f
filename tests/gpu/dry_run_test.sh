#!/bin/bash
# Runs tests/gpu/run without a GPU: with emulated devices and the interpreter of PTX, as on a machine
# that has no GPU, where what needs one skips and says why, and with programs that fail.
set -euo pipefail

# run_all NAME ARGUMENT...: leaves the exit status in $status and the last line in $last.
run_all() {
  local out=$TEST_TMPDIR/$1
  shift
  mkdir -p "$out"
  status=0
  OUT=$out tests/gpu/run "$@" >"$out/printed" || status=$?
  cat "$out/printed"
  last=$(tail -n 1 "$out/printed")
  if ((status)); then tail -n 30 "$out"/logs/*.log; fi
  [[ -s $out/results.json ]]
}

expect() {
  if [[ ! $last =~ ^$2$ ]] || ((status != $1)); then
    echo "expected exit status $1 and \"$2\", got $status and \"$last\""
    exit 1
  fi
}

# A kit has no other files, whatever Bazel puts beside them for the programs' own tests.
kit=$TEST_TMPDIR/kit
while read -r path; do
  mkdir -p "$kit/$(dirname "$path")"
  ln -s "$PWD/$path" "$kit/$path"
done < <(tests/gpu/run --list-files)

run_all dry --kit "$kit" --dry-run --limit-s 3000
expect 0 '[1-9][0-9]* passed, 0 failed, [0-9]+ skipped'
[[ -s $TEST_TMPDIR/dry/plot.svg ]]
python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' "$TEST_TMPDIR/dry/plot.svg"

run_all plain --kit "$kit"
expect 0 '[0-9]+ passed, 0 failed, [1-9][0-9]* skipped'

# A kit of programs that crash, hang, fail, and run no test.
fake() {
  mkdir -p "$TEST_TMPDIR/fake/$(dirname "$1")"
  printf '#!/bin/bash\n%s\n' "$2" >"$TEST_TMPDIR/fake/$1"
  chmod +x "$TEST_TMPDIR/fake/$1"
}
fake kernels/cuda/device_kernels_test 'echo "[       OK ] A.B (1 ms)"; kill -SEGV $$'
fake storage/accelerator/device_suite_test 'echo "[  FAILED  ] A.B (1 ms)"; exit 1'
fake server/scheduler/executors/device_update_executor_test 'exit 0'
fake server/scheduler/executors/device_gradients_test 'exit 0'
fake server/scheduler/executors/device_residents_test 'exit 0'
fake tests/gpu/device_job_test 'sleep 100077 & wait'
run_all failing --kit "$TEST_TMPDIR/fake" --only kernels,runtime,executor,job,speed --limit-s 10
expect 1 '1 passed, 7 failed, 0 skipped'
for text in 'ended by signal 11' 'first failure: A.B' 'no test ran' 'took too long' 'the kit lacks'; do
  grep -q "$text" "$TEST_TMPDIR/failing/printed"
done
if pgrep -f 'sleep 100077' -P 1 >/dev/null; then
  echo "what was killed left a process"
  exit 1
fi
