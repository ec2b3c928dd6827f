#ifndef OPTSTATE_CLIENT_STABLE_MAPPING_H_
#define OPTSTATE_CLIENT_STABLE_MAPPING_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// A peer's file at an address that does not change when the file does.
//
// A daemon that comes back may bring another parameter file (the job was
// deleted and made anew), while the trainer holds pointers into the old one.
// The new one is mapped over the old in one step, so that at no time there is
// nothing, or something else, at the address.
//
// Unmaps when destroyed.
class StableMapping {
 public:
  StableMapping() = default;
  StableMapping(const StableMapping&) = delete;
  StableMapping& operator=(const StableMapping&) = delete;
  ~StableMapping();

  // Maps the file, read-only, after shm::PeerSegment::CheckFile. Every
  // call has the same `bytes`. After an error the mapping is as before.
  absl::Status Replace(UniqueFd fd, uint64_t bytes);

  // Empty before the first Replace.
  absl::Span<const std::byte> bytes() const { return {data_, size_}; }
  // Of the last Replace, -1 before; closed by the next one.
  int file() const { return file_.get(); }

 private:
  UniqueFd file_;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_STABLE_MAPPING_H_
