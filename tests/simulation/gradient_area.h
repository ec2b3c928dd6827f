#ifndef OPTSTATE_TESTS_SIMULATION_GRADIENT_AREA_H_
#define OPTSTATE_TESTS_SIMULATION_GRADIENT_AREA_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace optstate::simulation {

// The gradients of one session over gRPC: the job's staging file
// (server/session/recovery/staging_file.h), mapped. Unlike a transport, it
// keeps no fd: thousands of ranks are in this process.
class GradientArea {
 public:
  // Opens the file, or makes one of zeros.
  static absl::StatusOr<std::shared_ptr<GradientArea>> Map(
      const std::string& path, uint64_t bytes);
  ~GradientArea();
  GradientArea(const GradientArea&) = delete;
  GradientArea& operator=(const GradientArea&) = delete;

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  // Whether the file was there, with what the session had written.
  bool was_present() const { return was_present_; }

 private:
  GradientArea(std::byte* data, uint64_t size, bool was_present)
      : data_(data), size_(size), was_present_(was_present) {}

  std::byte* const data_;
  const uint64_t size_;
  const bool was_present_;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_GRADIENT_AREA_H_
