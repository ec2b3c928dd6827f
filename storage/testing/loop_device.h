#ifndef OPTSTATE_STORAGE_TESTING_LOOP_DEVICE_H_
#define OPTSTATE_STORAGE_TESTING_LOOP_DEVICE_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "proto/types/unique_fd.h"

namespace optstate::storage {

// A block device over a file, which goes with this object.
class LoopDevice {
 public:
  struct Options {
    uint32_t block_bytes = 512;
    bool read_only = false;
  };

  // FAILED_PRECONDITION: this process cannot make one where it runs, and why;
  // a test skips then.
  static absl::StatusOr<LoopDevice> Make(const std::string& file,
                                         const Options& options);
  LoopDevice(LoopDevice&&) = default;
  LoopDevice& operator=(LoopDevice&&) = delete;
  ~LoopDevice();

  const std::string& path() const { return path_; }

 private:
  LoopDevice(std::string path, UniqueFd fd)
      : path_(std::move(path)), fd_(std::move(fd)) {}

  std::string path_;
  UniqueFd fd_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_TESTING_LOOP_DEVICE_H_
