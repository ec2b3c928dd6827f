# Sourced by what runs a test in a virtual machine: how it gets in, and its results out.
# shellcheck shell=bash

# pack_machine FOLDER SETUP TEST [ARGUMENT...] >INITRD: the folder with busybox beside it, and an init that, after the
# shell commands SETUP, runs the test and goes off.
pack_machine() {
  local folder=$1 setup=$2
  shift 2
  mkdir -p "$folder"/{dev,proc,sys,tmp}
  cat >"$folder/init" <<INIT
#!/busybox sh
/busybox mount -t proc proc /proc
/busybox mount -t sysfs sysfs /sys
/busybox mount -t devtmpfs devtmpfs /dev
export GTEST_COLOR=no TESTBRIDGE_TEST_ONLY='${TESTBRIDGE_TEST_ONLY:-*}'
export OPTSTATE_TEST_SEED='${OPTSTATE_TEST_SEED:-}'
[ "\$OPTSTATE_TEST_SEED" ] || unset OPTSTATE_TEST_SEED
$setup
XML_OUTPUT_FILE=/result.xml ${*@Q}
status=\$?
echo BEGIN RESULT
/busybox cat /result.xml
echo END RESULT
echo "EXIT STATUS \$status"
/busybox poweroff -f
INIT
  chmod +x "$folder/init"
  (cd "$folder" && find . | cpio --quiet -o -H newc)
}

# read_machine SCRATCH <CONSOLE: shows what the test says, keeps its results where Bazel wants them, and returns its
# exit status.
read_machine() {
  local scratch=$1 status
  sed -u 's/\r$//' | tee "$scratch/console" | sed -u '/^BEGIN RESULT$/,/^END RESULT$/d'
  sed -n '/^BEGIN RESULT$/,/^END RESULT$/{//!p}' "$scratch/console" >"${XML_OUTPUT_FILE:-/dev/null}"
  status=$(sed -n 's/^EXIT STATUS \([0-9]*\)$/\1/p' "$scratch/console")
  return "${status:-1}"
}
