#ifndef OPTSTATE_STORAGE_TESTING_TEST_MOUNTS_H_
#define OPTSTATE_STORAGE_TESTING_TEST_MOUNTS_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace optstate::storage {

// Mounts for tests. FAILED_PRECONDITION from any of these means that this
// process cannot mount where it runs, and says why: without CAP_SYS_ADMIN
// (EPERM), in a chroot, whose "/" is no mount point (EINVAL), or with a kernel
// that lacks the file system. A test skips then; every other error is a fault.

// Gives the calling thread and its children mounts that no other process sees
// and that go with them.
absl::Status EnterPrivateMounts();

// A tmpfs on an existing directory, which lives as long as this object.
class TestTmpfs {
 public:
  // Mounts with `options` of mount(8), such as "nr_inodes=8".
  static absl::StatusOr<TestTmpfs> Mount(std::string directory,
                                         const std::string& options);
  TestTmpfs(TestTmpfs&& other) noexcept
      : directory_(std::exchange(other.directory_, "")) {}
  TestTmpfs& operator=(TestTmpfs&&) = delete;
  ~TestTmpfs();

 private:
  explicit TestTmpfs(std::string directory)
      : directory_(std::move(directory)) {}

  std::string directory_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_TESTING_TEST_MOUNTS_H_
