#ifndef OPTSTATE_TESTS_SIMULATION_SCRATCH_DIRECTORY_H_
#define OPTSTATE_TESTS_SIMULATION_SCRATCH_DIRECTORY_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace optstate::simulation {

// A new directory, in memory when there is a tmpfs, as in production; removed
// with all that is in it when the object is destroyed. Move-only.
class ScratchDirectory {
 public:
  static absl::StatusOr<ScratchDirectory> Make();
  ScratchDirectory(ScratchDirectory&& other) noexcept
      : path_(std::exchange(other.path_, {})) {}
  ScratchDirectory& operator=(ScratchDirectory&& other) noexcept {
    std::swap(path_, other.path_);
    return *this;
  }
  ~ScratchDirectory();

  const std::string& path() const { return path_; }
  // Returns the sum of the sizes of all files below.
  uint64_t FileBytes() const;

 private:
  explicit ScratchDirectory(std::string path) : path_(std::move(path)) {}

  std::string path_;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_SCRATCH_DIRECTORY_H_
