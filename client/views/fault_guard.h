#ifndef OPTSTATE_CLIENT_VIEWS_FAULT_GUARD_H_
#define OPTSTATE_CLIENT_VIEWS_FAULT_GUARD_H_

#include <cstddef>

#include "absl/types/span.h"

namespace optstate::client {

// Keeps the process alive when it touches a mapped file behind the file's end.
//
// Any process that may write a file may cut it short, and the kernel then
// answers every access to a missing page with SIGBUS. Within a guarded range
// the missing page becomes a page of zeros instead, and lost() returns true.
// The first guard installs a SIGBUS handler; faults elsewhere go to the
// previous handler, as do all faults in guards beyond the handler's capacity.
//
// Thread-safe. The range must stay mapped as long as the guard lives.
class FaultGuard {
 public:
  FaultGuard() = default;
  explicit FaultGuard(absl::Span<const std::byte> range);
  FaultGuard(FaultGuard&& other) noexcept;
  FaultGuard& operator=(FaultGuard&& other) noexcept;
  ~FaultGuard();

  // Returns whether a missing page of the range was touched.
  bool lost() const;

 private:
  int slot_ = -1;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_VIEWS_FAULT_GUARD_H_
