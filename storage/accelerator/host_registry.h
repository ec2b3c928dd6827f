#ifndef OPTSTATE_STORAGE_ACCELERATOR_HOST_REGISTRY_H_
#define OPTSTATE_STORAGE_ACCELERATOR_HOST_REGISTRY_H_

#include <cstddef>
#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

namespace optstate::accelerator {

// The ranges of the host's memory that a device may copy. CUDA copies others
// too, but while the host waits, so that nothing overlaps and no error says
// so: therefore they are refused.
//
// Thread-safe.
class HostRegistry {
 public:
  // INVALID_ARGUMENT: it is empty, or a part of it is there already.
  absl::Status Add(absl::Span<const std::byte> memory);
  // Returns whether a range began there.
  bool Remove(const std::byte* begin);
  // Returns INVALID_ARGUMENT unless one range has all of these bytes.
  absl::Status Check(const void* begin, size_t bytes) const;

 private:
  mutable absl::Mutex mu_;
  std::map<uint64_t, uint64_t> end_of_begin_ ABSL_GUARDED_BY(mu_);
};

}  // namespace optstate::accelerator

#endif  // OPTSTATE_STORAGE_ACCELERATOR_HOST_REGISTRY_H_
