#ifndef OPTSTATE_CLIENT_CTL_PROGRAM_LINES_H_
#define OPTSTATE_CLIENT_CTL_PROGRAM_LINES_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::ctl {

// Runs a program of $PATH to its end and writes each of its lines to stdout, as
// `change` makes it; its stderr and stdin are this process's. Returns its exit
// code, of one that a signal has ended 128 and the signal. NOT_FOUND: there is
// no such program.
//
// On a terminal a pager shows the lines, as systemd's programs do:
// $SYSTEMD_PAGER, $PAGER, or less if there is one; not when the program
// `follows` what happens, whose lines are shown at once. Ctrl-C is for the
// program, whose end ends this.
absl::StatusOr<int> PassLines(
    std::vector<std::string> command, bool follows,
    const std::function<std::string(absl::string_view)>& change);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_PROGRAM_LINES_H_
