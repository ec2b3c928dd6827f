#ifndef OPTSTATE_TESTS_FAULTS_SMALL_TMPFS_H_
#define OPTSTATE_TESTS_FAULTS_SMALL_TMPFS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/unique_fd.h"
#include "storage/testing/test_mounts.h"

namespace optstate::faults {

// A tmpfs of a given size, mounted where only this process and its children see
// it. FAILED_PRECONDITION where nothing can be mounted: the test skips.
class SmallTmpfs {
 public:
  // Mounts a tmpfs; `inodes` 0: as many as the kernel gives it.
  static absl::StatusOr<std::unique_ptr<SmallTmpfs>> Mount(uint64_t bytes,
                                                           uint64_t inodes = 0);
  ~SmallTmpfs();

  const std::string& path() const { return path_; }

  // Takes every block that is left and, until Empty, every one that is freed.
  void Fill();
  // Makes empty files until there is no inode for one more.
  void FillInodes();
  // Gives blocks and inodes back.
  absl::Status Empty();

 private:
  SmallTmpfs(std::string path, storage::TestTmpfs mounted)
      : path_(std::move(path)), mounted_(std::move(mounted)) {}

  const std::string path_;
  std::optional<storage::TestTmpfs> mounted_;
  UniqueFd filler_;
  uint64_t empty_files_ = 0;
  std::atomic<bool> filling_{false};
  std::thread thread_;
};

}  // namespace optstate::faults

#endif  // OPTSTATE_TESTS_FAULTS_SMALL_TMPFS_H_
