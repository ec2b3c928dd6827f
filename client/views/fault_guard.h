#ifndef OPTSTATE_CLIENT_VIEWS_FAULT_GUARD_H_
#define OPTSTATE_CLIENT_VIEWS_FAULT_GUARD_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace optstate::client {

// Keeps the process alive when it touches a mapped file behind the file's end.
//
// Any process that may write a file may cut it short, and the kernel then
// answers every access to a missing page with SIGBUS. Within a guarded range
// the missing page and all behind it become zeros instead, and lost() returns
// true: where a file is cut, nothing behind the cut is left to show, in private
// copies of its pages either. The first guard installs a SIGBUS handler; faults
// elsewhere go to the previous handler. Any number of ranges can be guarded.
//
// Thread-safe. The range must stay mapped as long as the guard lives.
class FaultGuard {
 public:
  FaultGuard() = default;
  // `protection`: of the zeros, as in mmap. The range is made of whole pages,
  // but for the last one.
  FaultGuard(absl::Span<const std::byte> range, int protection);
  FaultGuard(FaultGuard&& other) noexcept;
  FaultGuard& operator=(FaultGuard&& other) noexcept;
  ~FaultGuard();

  // Returns whether a missing page of the range was touched.
  bool lost() const;

  // A range that is guarded, or was; see fault_guard.cc.
  struct Slot;

 private:
  Slot* slot_ = nullptr;
};

// The file that a descriptor is open for, by its name; for errors.
std::string NameOfFile(int file);

// DATA_LOSS, with what to do: a file of the job was cut short.
absl::Status CutShort(absl::string_view name, absl::string_view detail = "");

// CutShort unless the file has `bytes` and none of its pages was missed by
// `guard`.
absl::Status CheckNotCutShort(int file, uint64_t bytes,
                              const FaultGuard& guard = {});

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_VIEWS_FAULT_GUARD_H_
