#ifndef OPTSTATE_CLIENT_CHANNEL_SHM_STABLE_MAPPING_H_
#define OPTSTATE_CLIENT_CHANNEL_SHM_STABLE_MAPPING_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/views/fault_guard.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// A peer's file mapped at an address that does not change when the file does.
//
// A daemon that comes back may bring another parameter file (the job was
// deleted and made anew), while the trainer holds pointers into the old one.
// The new file is mapped over the old one in one step, so that the address is
// never unmapped and never shows anything else.
//
// A file that another process cuts short reads as zeros behind its end, and
// CheckWhole() says so.
//
// The destructor unmaps the file.
class StableMapping {
 public:
  StableMapping() = default;
  StableMapping(const StableMapping&) = delete;
  StableMapping& operator=(const StableMapping&) = delete;
  ~StableMapping();

  // Maps the file, read-only, after shm::PeerSegment::CheckFile. Every call has
  // the same `bytes`. DATA_LOSS: the file has fewer. After an error the mapping
  // is as before.
  absl::Status Replace(UniqueFd fd, uint64_t bytes);

  // DATA_LOSS, with the file's name: the file was cut short since Replace, so
  // that some of what was read, or would be read, is not the peer's.
  absl::Status CheckWhole() const;

  // Returns the mapped bytes; none before the first Replace.
  absl::Span<const std::byte> bytes() const { return {data_, size_}; }
  // The file of the last Replace, -1 before; the next Replace closes it.
  int file() const { return file_.get(); }

 private:
  UniqueFd file_;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  FaultGuard guard_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CHANNEL_SHM_STABLE_MAPPING_H_
