#ifndef OPTSTATE_PROTO_SHM_SEALED_SEGMENT_H_
#define OPTSTATE_PROTO_SHM_SEALED_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/unique_fd.h"

namespace optstate::shm {

// Gives a range of a writable mapping its pages, and maps them; both ends are
// at page boundaries. UNIMPLEMENTED: the kernel cannot (before Linux 5.14).
// RESOURCE_EXHAUSTED: there is no memory for all of the range. Thread-safe.
absl::Status PopulatePages(std::byte* data, uint64_t bytes);

// A memfd that this process writes and other processes may only read: mapped
// writable here, then sealed SHRINK | GROW | FUTURE_WRITE | SEAL, so that no
// peer can write to it, change its size or punch holes in it.
//
// Move-only; the destructor unmaps and closes it.
class SealedSegment {
 public:
  // The state of the pages when Create returns. Mapped and reserved ones belong
  // to this segment: no later access raises SIGBUS. kReserved takes less than
  // half the time and leaves the rest to the first writer of each page. With
  // kNone the caller gives pages to what it writes (PopulatePages) before it
  // does so.
  enum class Pages { kMapped, kReserved, kNone };

  // Creates a segment. RESOURCE_EXHAUSTED when the memory is not available
  // (checked against MemAvailable and the cgroup's limit before any page is
  // taken, then, but for kNone, taken).
  // `name` shows in /proc/PID/maps.
  static absl::StatusOr<SealedSegment> Create(const std::string& name,
                                              uint64_t bytes,
                                              Pages pages = Pages::kMapped);
  SealedSegment() = default;
  SealedSegment(SealedSegment&& other) noexcept;
  SealedSegment& operator=(SealedSegment&& other) noexcept;
  ~SealedSegment();

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

// A peer's segment, mapped read-only after its seals, size and population were
// checked. Move-only; the destructor unmaps it.
//
// MapFile maps a file that has to outlive the peer and cannot be sealed: only
// its owner can change the file, and every reader must trust the owner.
class PeerSegment {
 public:
  // Maps a segment. INVALID_ARGUMENT, with the expected and the found value:
  // not a sealed memfd, another size than `bytes`, or holes (unreserved pages).
  static absl::StatusOr<PeerSegment> Map(UniqueFd fd, uint64_t bytes);
  // Maps a segment of which only the first `reserved_bytes` need be without
  // holes. The caller must not read further before it has seen pages there
  // (EndOfWritten): that would take memory of its own, or raise SIGBUS.
  static absl::StatusOr<PeerSegment> MapPartly(UniqueFd fd, uint64_t bytes,
                                               uint64_t reserved_bytes);
  // Makes the checks of Map alone, for a caller that maps in its own way.
  static absl::Status Check(int fd, uint64_t bytes);
  // Maps a file. INVALID_ARGUMENT, as in Map: `fd` is not open for reading
  // alone, others than the file's owner may write to the file, its size is not
  // `bytes`, or (in memory, not on a disk) it has holes.
  static absl::StatusOr<PeerSegment> MapFile(UniqueFd fd, uint64_t bytes);
  static absl::Status CheckFile(int fd, uint64_t bytes);
  PeerSegment() = default;
  PeerSegment(PeerSegment&& other) noexcept;
  PeerSegment& operator=(PeerSegment&& other) noexcept;
  ~PeerSegment();

  const std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  static absl::StatusOr<PeerSegment> MapChecked(int fd, uint64_t bytes);

  const std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

}  // namespace optstate::shm

#endif  // OPTSTATE_PROTO_SHM_SEALED_SEGMENT_H_
