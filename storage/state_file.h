#ifndef OPTSTATE_STORAGE_STATE_FILE_H_
#define OPTSTATE_STORAGE_STATE_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/unique_fd.h"
#include "storage/memory/memory_locker.h"
#include "storage/memory/memory_region.h"

namespace optstate::storage {

struct ByteRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// One file of the state, mapped whole. Only its reserved ranges have blocks and
// may be touched: the file system has promised their memory, so that no access
// raises SIGBUS. The rest is holes.
//
// Units: bytes. Move-only; not thread-safe. data() moves when Resize succeeds.
class StateFile {
 public:
  // Creates a new file of zeros; `path` must not exist. RESOURCE_EXHAUSTED when
  // the file system cannot hold it; the file may then be there and is the
  // caller's to remove.
  static absl::StatusOr<StateFile> Create(std::string path, uint64_t bytes,
                                          absl::Span<const ByteRange> reserved);

  // Opens what Create made. DATA_LOSS when the file is missing or shorter. A
  // longer one is cut back (an extension that was not finished).
  static absl::StatusOr<StateFile> Open(std::string path, uint64_t bytes,
                                        absl::Span<const ByteRange> reserved);

  // Grows (new bytes are zero) or cuts to `bytes` and maps anew. On failure the
  // file and the mapping are as before.
  absl::Status Resize(uint64_t bytes, absl::Span<const ByteRange> reserved);

  // Reserves bytes up to `end` of a file that is reserved from its beginning
  // on, in place. RESOURCE_EXHAUSTED: nothing changed.
  absl::Status ReserveTo(uint64_t end);

  // Reserves the bytes up to `end` for a Resize(), which then takes a moment;
  // the mapping stays. RESOURCE_EXHAUSTED: nothing changed.
  absl::Status ReserveAhead(uint64_t end) const;

  // Has the locker lock the reserved ranges, unless they are; Resize ends that.
  // The locker outlives this.
  void LockMemory(MemoryLocker* locker);

  std::byte* data() const { return region_.data(); }
  uint64_t size() const { return region_.size(); }
  const std::vector<ByteRange>& reserved() const { return reserved_; }
  // Returns the sum of the reserved ranges.
  uint64_t reserved_bytes() const;
  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }

 private:
  StateFile(std::string path, UniqueFd fd);
  absl::Status Reserve(absl::Span<const ByteRange> ranges);
  absl::Status Map(uint64_t bytes);

  std::string path_;
  UniqueFd fd_;
  MemoryRegion region_;
  std::vector<ByteRange> reserved_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_STATE_FILE_H_
