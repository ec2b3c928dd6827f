#ifndef OPTSTATE_CLIENT_CTL_INTERRUPT_H_
#define OPTSTATE_CLIENT_CTL_INTERRUPT_H_

#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {

// Turns the first Ctrl-C (SIGINT) or SIGTERM into something to read, so that a
// command can end what it began; a second one ends the process as ever. Stays
// in force until the process ends. At most one.
class Interrupt {
 public:
  static absl::StatusOr<Interrupt> Install();

  // Becomes readable, and stays so, once the signal has come.
  int fd() const { return fd_.get(); }

  // Waits that long. Returns whether the signal has come.
  bool Await(absl::Duration time) const;

 private:
  explicit Interrupt(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_INTERRUPT_H_
