#ifndef OPTSTATE_SERVER_SUPERVISOR_SLEEP_COPY_CONTROL_H_
#define OPTSTATE_SERVER_SUPERVISOR_SLEEP_COPY_CONTROL_H_

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace optstate::supervisor {

// The progress of a job on its way to sleep or awake, and how it is cancelled.
//
// Threads: the counts and `cancelled` may be used by any thread, `before` by
// the one that works.
struct CopyControl {
  std::atomic<uint64_t> bytes = 0;
  std::atomic<uint64_t> bytes_total = 0;
  // Set to end a copy early, with ABORTED. What follows a copy is not ended.
  std::atomic<bool> cancelled = false;
  // For tests: called before each operation on files, with its name and path.
  // An error is returned instead of the operation; the process may also die.
  std::function<absl::Status(absl::string_view operation,
                             absl::string_view path)>
      before = nullptr;

  absl::Status Before(absl::string_view operation, absl::string_view path) {
    return before == nullptr ? absl::OkStatus() : before(operation, path);
  }
  absl::Status CheckGoesOn() const {
    if (!cancelled) return absl::OkStatus();
    return absl::AbortedError("the daemon ends");
  }
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SLEEP_COPY_CONTROL_H_
