#ifndef OPTSTATE_CLIENT_FAULT_GUARD_H_
#define OPTSTATE_CLIENT_FAULT_GUARD_H_

#include <cstddef>

#include "absl/types/span.h"

namespace optstate::client {

// Keeps a process alive that touches a mapped file behind its end.
//
// Whoever may write a file may cut it short, and the kernel then answers every
// access to a page that is gone with SIGBUS. Within a guarded range the page
// becomes one of zeros instead, and lost() says so. The first guard installs a
// handler of SIGBUS; faults elsewhere go to the one that was there before, as
// do all when there are more guards than it has room for.
//
// Thread-safe. The range must stay mapped as long as the guard lives.
class FaultGuard {
 public:
  FaultGuard() = default;
  explicit FaultGuard(absl::Span<const std::byte> range);
  FaultGuard(FaultGuard&& other) noexcept;
  FaultGuard& operator=(FaultGuard&& other) noexcept;
  ~FaultGuard();

  // Whether a page of the range was gone when it was touched.
  bool lost() const;

 private:
  int slot_ = -1;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_FAULT_GUARD_H_
