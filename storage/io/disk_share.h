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
  // For whom a process uses the disks. Users divide these by their weights, and
  // processes of one user its part by theirs. Weights are at least 1; a user's
  // is the same in all its processes.
  struct User {
    uint32_t id = 0;
    uint32_t weight = 100;
  };

  // Takes a slot of the file, which is made if it is not there.
  // RESOURCE_EXHAUSTED: all slots are taken.
  static absl::StatusOr<std::unique_ptr<DiskShare>> Open(
      const std::string& path, uint32_t weight, User user);
  ~DiskShare();
  DiskShare(const DiskShare&) = delete;
  DiskShare& operator=(const DiskShare&) = delete;

  // Notes that this process has requests. `now_ns` is of the monotonic clock.
  void NoteActive(int64_t now_ns);
  // Returns this process's part of the disks, of all that had requests lately,
  // this one included: 1 when there is no other. A process of a former build
  // says no user, and counts as one of its own, with its weight.
  double Part(int64_t now_ns) const;

 private:
  struct Slot;

  DiskShare(UniqueFd fd, Slot* slots, size_t own, uint32_t weight, User user)
      : fd_(std::move(fd)),
        slots_(slots),
        own_(own),
        weight_(weight),
        user_(user) {}

  const UniqueFd fd_;
  Slot* const slots_;
  const size_t own_;
  const uint32_t weight_;
  const User user_;
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_DISK_SHARE_H_
