#ifndef OPTSTATE_TESTS_FAULTS_SMALL_TMPFS_H_
#define OPTSTATE_TESTS_FAULTS_SMALL_TMPFS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/unique_fd.h"

namespace optstate::faults {

// From here on the calling thread and its children see mounts that nobody else
// does and that go with them. PERMISSION_DENIED without CAP_SYS_ADMIN.
absl::Status EnterPrivateMounts();

// A tmpfs of a given size, mounted where only this process and its children see
// it.
class SmallTmpfs {
 public:
  static absl::StatusOr<std::unique_ptr<SmallTmpfs>> Mount(uint64_t bytes);
  ~SmallTmpfs();

  const std::string& path() const { return path_; }

  // Takes every block that is left and, until Empty, every one that anybody
  // frees.
  void Fill();
  // Gives them back.
  absl::Status Empty();

 private:
  explicit SmallTmpfs(std::string path) : path_(std::move(path)) {}

  const std::string path_;
  UniqueFd filler_;
  std::atomic<bool> filling_{false};
  std::thread thread_;
};

}  // namespace optstate::faults

#endif  // OPTSTATE_TESTS_FAULTS_SMALL_TMPFS_H_
