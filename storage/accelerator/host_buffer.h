#ifndef OPTSTATE_STORAGE_ACCELERATOR_HOST_BUFFER_H_
#define OPTSTATE_STORAGE_ACCELERATOR_HOST_BUFFER_H_

#include <cstddef>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::accelerator {

// Registered memory of the host, for tests.
class HostBuffer {
 public:
  HostBuffer(Device* device, size_t bytes) : device_(*device), bytes_(bytes) {
    const absl::Status registered =
        device->RegisterHost(absl::MakeSpan(bytes_));
    EXPECT_TRUE(registered.ok()) << registered;
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  ~HostBuffer() { device_.UnregisterHost(bytes_.data()); }

  std::byte* data() { return bytes_.data(); }
  std::vector<std::byte>& bytes() { return bytes_; }
  void Fill(std::mt19937* random) {
    for (std::byte& byte : bytes_) byte = static_cast<std::byte>((*random)());
  }

 private:
  Device& device_;
  std::vector<std::byte> bytes_;
};

}  // namespace optstate::accelerator

#endif  // OPTSTATE_STORAGE_ACCELERATOR_HOST_BUFFER_H_
