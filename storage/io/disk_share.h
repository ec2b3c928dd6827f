#ifndef OPTSTATE_STORAGE_IO_DISK_SHARE_H_
#define OPTSTATE_STORAGE_IO_DISK_SHARE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/types/unique_fd.h"

namespace optstate::io {

// This process's part of the disks that processes of one node use at once: a
// file that all of them map, with a slot for each. A slot is locked by its
// owner (an open file description lock), so that it is free again whatever ends
// the process, and says when the owner had requests last.
//
// Threads: one at a time.
class DiskShare {
 public:
  // Takes a slot of the file, which is made if it is not there. `weight` is at
  // least 1. RESOURCE_EXHAUSTED: all slots are taken.
  static absl::StatusOr<std::unique_ptr<DiskShare>> Open(
      const std::string& path, uint32_t weight);
  ~DiskShare();
  DiskShare(const DiskShare&) = delete;
  DiskShare& operator=(const DiskShare&) = delete;

  // Notes that this process has requests. `now_ns` is of the monotonic clock.
  void NoteActive(int64_t now_ns);
  // Returns this process's weight divided by the weights of all that had
  // requests lately, this one included: 1 when there is no other.
  double Part(int64_t now_ns) const;

 private:
  struct Slot;

  DiskShare(UniqueFd fd, Slot* slots, size_t own, uint32_t weight)
      : fd_(std::move(fd)), slots_(slots), own_(own), weight_(weight) {}

  const UniqueFd fd_;
  Slot* const slots_;
  const size_t own_;
  const uint32_t weight_;
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_DISK_SHARE_H_
