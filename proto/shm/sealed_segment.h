#ifndef OPTSTATE_PROTO_SHM_SEALED_SEGMENT_H_
#define OPTSTATE_PROTO_SHM_SEALED_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/unique_fd.h"

namespace optstate::shm {

// A memfd that this process writes and others may only read: populated, mapped
// writable here, then sealed SHRINK | GROW | FUTURE_WRITE | SEAL, so that no
// peer can write to it, change its size or punch holes in it.
//
// Move-only; unmaps and closes when destroyed.
class SealedSegment {
 public:
  // How far the pages are when Create returns; they are this segment's own in
  // either case. kReserved takes less than half the time, and leaves the rest
  // to whoever writes a page first.
  enum class Pages { kMapped, kReserved };

  // RESOURCE_EXHAUSTED when the memory cannot be had (checked against
  // MemAvailable and the cgroup's limit before any page is taken, then reserved
  // with fallocate, so that no later access raises SIGBUS).
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
// checked. Move-only; unmaps when destroyed.
//
// Or a file of the peer that has to outlive it, which cannot be sealed: one
// that nobody but its owner can change, whom whoever reads it must trust.
class PeerSegment {
 public:
  // INVALID_ARGUMENT, saying what was expected and found: not a sealed memfd,
  // another size than `bytes`, or holes in it (pages not reserved).
  static absl::StatusOr<PeerSegment> Map(UniqueFd fd, uint64_t bytes);
  // The checks of Map alone, for a caller that maps in its own way.
  static absl::Status Check(int fd, uint64_t bytes);
  // INVALID_ARGUMENT, likewise: `fd` is not open for reading alone, others than
  // the file's owner may write to it, it has another size than `bytes`, or (in
  // memory, not on a disk) holes.
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
